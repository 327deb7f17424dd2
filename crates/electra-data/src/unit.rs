//! Tokenising units of input and writing each as shards of its own.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::job::{Folder, UnitRecord};
use crate::pipeline::{Batch, Batcher, Mark, run};
use crate::tokenize::{Encoder, Tokenizer};
use crate::writer::{ShardSpec, UnitWriter};

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
pub(crate) struct UnitJob<'a> {
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
        read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
        bytes: impl Fn() -> (u64, u64),
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        let mut waiting: VecDeque<usize> = units.iter().copied().collect();
        let Some(first) = waiting.pop_front() else { return Ok(()) };
        let mut unit = UnitBuilder::new(self, first);
        let mut state = Progress::default();
        let mut reported: Option<Instant> = None;
        let consume = |tokens: Option<Tokens>| {
            if let Some(tokens) = tokens {
                let mut at = 0;
                for (count, mark) in tokens.pieces {
                    unit.push(&tokens.ids[at..at + count], mark, &mut state)?;
                    at += count;
                    if mark == Mark::Unit {
                        let next = UnitBuilder::new(self, waiting.pop_front().unwrap_or(usize::MAX));
                        std::mem::replace(&mut unit, next).finish(self)?;
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
        let cut = self.tokenizer.splits_at_whitespace();
        let worker = || {
            let mut encoder = self.tokenizer.encoder();
            move |batch| tokenise(&mut encoder, &batch)
        };
        run(self.threads, cut, read, worker, consume)?;
        (state.bytes_done, state.bytes_total) = bytes();
        progress(state);
        Ok(())
    }
}

fn tokenise(encoder: &mut Encoder, batch: &Batch) -> Result<Tokens> {
    let (mut ids, mut pieces) = (Vec::with_capacity(batch.num_bytes() / 3), Vec::new());
    for (text, mark) in batch.pieces() {
        let before = ids.len();
        if !text.is_empty() {
            encoder.encode_into(text, &mut ids)?;
        }
        pieces.push((ids.len() - before, mark));
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

    fn push(&mut self, ids: &[u32], mark: Mark, state: &mut Progress) -> Result<()> {
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
            Mark::Part | Mark::Unit => Ok(()),
        }
    }

    fn finish(self, job: &UnitJob) -> Result<()> {
        job.folder.save_record(&UnitRecord {
            job: job.folder.job.clone(),
            unit: self.unit,
            documents: self.documents,
            empty_documents: self.empty_documents,
            shards: self.train.finish()?,
            holdout: self.holdout.finish()?,
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
    use super::*;

    #[test]
    fn about_the_fraction_is_held_out() {
        let threshold = (0.1 * 2_f64.powi(64)) as u64;
        let count = (0..20_000).filter(|&document| is_held_out(3, document, threshold)).count();
        assert!((1_850..2_150).contains(&count), "{count}");
        assert!((0..1_000).all(|document| !is_held_out(0, document, 0)));
    }
}
