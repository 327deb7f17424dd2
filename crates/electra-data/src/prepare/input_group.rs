//! Tokenising units of input and writing each as shards of its own.

use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::output_dir::{Folder, UnitRecord};
use crate::error::{Error, Result};
use crate::format::{ShardSpec, UnitWriter};
use crate::input::{Batch, Batcher, Cut, Intake, Mark, SkipLog, SkippedRecord, run};
use crate::tokenizer::{Encoder, Tokenizer};

const REPORT_EVERY: Duration = Duration::from_millis(100);

/// How far a run has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes of input read, as they lie on disk.
    pub bytes_done: u64,
    /// Bytes of input that this run has to read; 0 if nobody can know.
    pub bytes_total: u64,
    /// Documents with at least one token.
    pub documents: u64,
    /// Tokens in them.
    pub tokens: u64,
}

/// What all units of a run share.
pub(super) struct UnitJob<'a> {
    pub folder: &'a Folder,
    pub tokenizer: &'a Tokenizer,
    pub spec: ShardSpec,
    /// Fraction of documents to hold out.
    pub holdout: f64,
    pub threads: usize,
}

/// A batch after the tokenizer: ids, and how many of them each piece has.
struct Tokens {
    ids: Vec<u32>,
    pieces: Vec<(usize, Mark)>,
}

impl UnitJob<'_> {
    /// Builds the units whose documents `read` sends, in this order, each ended by its mark.
    pub fn build(
        &self,
        units: &[usize],
        skips: SkipLog,
        read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
        bytes: impl Fn() -> (u64, u64),
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        if units.is_empty() {
            return Ok(());
        }
        let mut waiting = units.iter();
        let mut unit: Option<UnitBuilder> = None;
        let mut state = Progress::default();
        let mut reported: Option<Instant> = None;
        let consume = |tokens: Option<Tokens>| {
            if let Some(tokens) = tokens {
                let mut at = 0;
                for (count, mark) in tokens.pieces {
                    let current = match &mut unit {
                        Some(current) => current,
                        none => none
                            .insert(UnitBuilder::new(self, *waiting.next().ok_or_else(text_without_unit)?)),
                    };
                    current.push(&tokens.ids[at..at + count], &mark, &mut state)?;
                    at += count;
                    if let Mark::Unit(skipped) = mark
                        && let Some(done) = unit.take()
                    {
                        done.finish(self, skipped)?;
                    }
                }
            }
            if reported.is_some_and(|moment| moment.elapsed() < REPORT_EVERY) {
                return Ok(());
            }
            reported = Some(Instant::now());
            (state.bytes_done, state.bytes_total) = bytes();
            if progress(state) { Ok(()) } else { Err(Error::Interrupted) }
        };
        let cut = if self.tokenizer.splits_at_whitespace() { Cut::Blanks } else { Cut::Nowhere };
        let intake = Intake { skips, ..Intake::of_all(cut) };
        let worker = || {
            let mut encoder = self.tokenizer.encoder();
            move |batch| tokenise(&mut encoder, &batch)
        };
        run(self.threads, intake, read, worker, consume)?;
        (state.bytes_done, state.bytes_total) = bytes();
        progress(state);
        Ok(())
    }
}

fn text_without_unit() -> Error {
    Error::Input("more text was read than belongs to the units of this run; report this".to_owned())
}

fn tokenise(encoder: &mut Encoder, batch: &Batch) -> Result<Tokens> {
    let (mut ids, mut pieces) = (Vec::with_capacity(batch.num_bytes() / 3), Vec::new());
    for piece in batch.pieces() {
        let before = ids.len();
        if !piece.text.is_empty() {
            encoder.encode_into(piece.text, &mut ids)?;
        }
        pieces.push((ids.len() - before, piece.mark.clone()));
    }
    Ok(Tokens { ids, pieces })
}

struct UnitBuilder {
    unit: usize,
    train: UnitWriter,
    holdout: UnitWriter,
    threshold: u64,
    /// Where the document being written goes.
    held_out: bool,
    documents: u64,
    empty_documents: u64,
}

impl UnitBuilder {
    fn new(job: &UnitJob, unit: usize) -> Self {
        let threshold = (job.holdout * 2_f64.powi(64)) as u64;
        Self {
            unit,
            train: UnitWriter::new(&job.folder.dir, unit, job.spec.clone()),
            holdout: UnitWriter::new(&job.folder.holdout(), unit, job.spec.clone()),
            threshold,
            held_out: is_held_out(unit, 0, threshold),
            documents: 0,
            empty_documents: 0,
        }
    }

    fn push(&mut self, ids: &[u32], mark: &Mark, state: &mut Progress) -> Result<()> {
        let writer = if self.held_out { &mut self.holdout } else { &mut self.train };
        writer.push(ids)?;
        state.tokens += ids.len() as u64;
        match mark {
            Mark::Line => writer.end_line(),
            Mark::Document if writer.end_document()? => {
                self.documents += 1;
                state.documents += 1;
                self.held_out = is_held_out(self.unit, self.documents, self.threshold);
                Ok(())
            }
            Mark::Document => {
                self.empty_documents += 1;
                Ok(())
            }
            Mark::Part | Mark::Unit(_) => Ok(()),
        }
    }

    fn finish(self, job: &UnitJob, skipped: Vec<SkippedRecord>) -> Result<()> {
        job.folder.save_record(&UnitRecord {
            job: job.folder.job.clone(),
            unit: self.unit,
            documents: self.documents,
            empty_documents: self.empty_documents,
            shards: self.train.finish()?,
            holdout: self.holdout.finish()?,
            skipped,
            checksum: String::new(),
        })
    }
}

/// The draw for one document: a pure function of its place in the corpus.
fn is_held_out(unit: usize, document: u64, threshold: u64) -> bool {
    let mut place = [0; 16];
    place[..8].copy_from_slice(&(unit as u64).to_le_bytes());
    place[8..].copy_from_slice(&document.to_le_bytes());
    xxh3_64(&place) < threshold
}

#[cfg(test)]
mod tests {
    use super::super::output_dir::{ALL, Claim};
    use super::*;

    #[test]
    fn text_that_belongs_to_no_unit_is_an_error_and_not_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = dir.path().join("vocab.txt");
        std::fs::write(&vocab, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n").unwrap();
        let tokenizer = Tokenizer::from_file(&vocab, None, None).unwrap();
        let Claim::Ours(folder) = Folder::claim(&dir.path().join("out"), "job", ALL).unwrap() else {
            panic!("the folder is new");
        };
        let (tag, tokenizer_hash) = (ALL.to_owned(), tokenizer.hash());
        let spec = ShardSpec { width: 2, tokenizer_hash, tag, max_tokens: 1 << 20, max_documents: 1 << 10 };
        let job = UnitJob { folder: &folder, tokenizer: &tokenizer, spec, holdout: 0.0, threads: 1 };
        let build = |documents_after: usize| {
            let read = move |to: &mut Batcher| {
                to.push_document("a a")?;
                to.end_unit()?;
                (0..documents_after).try_for_each(|_| to.push_document("a"))
            };
            job.build(&[0], SkipLog::default(), read, || (0, 0), &mut |_| true)
        };
        build(0).unwrap();
        assert!(build(1).unwrap_err().to_string().contains("more text was read"));
    }

    #[test]
    fn about_the_fraction_is_held_out() {
        let threshold = (0.1 * 2_f64.powi(64)) as u64;
        let count = (0..20_000).filter(|&document| is_held_out(3, document, threshold)).count();
        assert!((1_850..2_150).contains(&count), "{count}");
        assert!((0..1_000).all(|document| !is_held_out(0, document, 0)));
    }
}
