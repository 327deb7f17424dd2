//! Tokenizing input groups and writing the shards of each.

use xxhash_rust::xxh3::xxh3_64;

use super::output_dir::{InputGroupRecord, OutputDir};
use super::progress::{Progress, ProgressReporter};
use crate::error::{Error, Result};
use crate::format::{DocumentWriter, ShardSpec};
use crate::input::{Batcher, Cut, Intake, Mark, SkipLog, SkippedRecord, TextBatch, run};
use crate::tokenizer::{Encoder, Tokenizer};

/// What all input groups of a run share.
pub(super) struct InputGroupBuilder<'a> {
    pub out: &'a OutputDir,
    pub tokenizer: &'a Tokenizer,
    pub spec: ShardSpec,
    /// Fraction of documents that go to the validation split.
    pub validation_fraction: f64,
    pub threads: usize,
}

/// A batch after tokenization: its ids, and how many of them each marked text has.
struct TokenBatch {
    ids: Vec<u32>,
    texts: Vec<(usize, Mark)>,
}

impl InputGroupBuilder<'_> {
    /// Builds the input groups whose documents `read` sends, in this order, each ended by its mark.
    pub fn build(
        &self,
        input_groups: &[usize],
        skips: SkipLog,
        read: impl FnOnce(&mut Batcher) -> Result<()> + Send,
        bytes: impl Fn() -> (u64, u64),
        progress: &mut dyn FnMut(Progress) -> bool,
    ) -> Result<()> {
        if input_groups.is_empty() {
            return Ok(());
        }
        let mut remaining = input_groups.iter();
        let mut writer: Option<InputGroupWriter> = None;
        let mut state = Progress::default();
        let mut reporter = ProgressReporter::new(progress);
        let consume = |batch: Option<TokenBatch>| {
            if let Some(TokenBatch { ids, texts }) = batch {
                let mut at = 0;
                for (count, mark) in texts {
                    let current = match &mut writer {
                        Some(current) => current,
                        none => {
                            let group = *remaining.next().ok_or_else(text_outside_groups)?;
                            none.insert(InputGroupWriter::new(self, group))
                        }
                    };
                    current.push(&ids[at..at + count], &mark, &mut state)?;
                    at += count;
                    if let Mark::InputGroup(skipped) = mark
                        && let Some(done) = writer.take()
                    {
                        done.finish(self, skipped)?;
                    }
                }
            }
            reporter.report_if_due(|| {
                (state.bytes_done, state.bytes_total) = bytes();
                state
            })
        };
        let intake = Intake { skips, ..Intake::everything(line_cut(self.tokenizer)) };
        let worker = || {
            let mut encoder = self.tokenizer.encoder();
            move |batch| tokenize(&mut encoder, &batch)
        };
        run(self.threads, intake, read, worker, consume)?;
        if remaining.next().is_some() || writer.is_some() {
            return Err(Error::Input("the input ended within an input group; report this".to_owned()));
        }
        (state.bytes_done, state.bytes_total) = bytes();
        reporter.finish(state);
        Ok(())
    }
}

/// Where lines may be cut without changing what this tokenizer makes of them.
pub(super) fn line_cut(tokenizer: &Tokenizer) -> Cut<'static> {
    if tokenizer.splits_at_whitespace() { Cut::Blanks } else { Cut::Nowhere }
}

fn text_outside_groups() -> Error {
    Error::Input("more text was read than belongs to the input groups of this run; report this".to_owned())
}

fn tokenize(encoder: &mut Encoder, batch: &TextBatch) -> Result<TokenBatch> {
    let (mut ids, mut texts) = (Vec::with_capacity(batch.num_bytes() / 3), Vec::new());
    for marked in batch.texts() {
        let before = ids.len();
        if !marked.text.is_empty() {
            encoder.encode_into(marked.text, &mut ids)?;
        }
        texts.push((ids.len() - before, marked.mark.clone()));
    }
    Ok(TokenBatch { ids, texts })
}

struct InputGroupWriter {
    input_group: usize,
    train: DocumentWriter,
    validation: DocumentWriter,
    threshold: u64,
    /// Whether the document being written goes to the validation split.
    in_validation: bool,
    documents: u64,
    empty_documents: u64,
}

impl InputGroupWriter {
    fn new(builder: &InputGroupBuilder, input_group: usize) -> Self {
        let threshold = (builder.validation_fraction * 2_f64.powi(64)) as u64;
        Self {
            input_group,
            train: DocumentWriter::new(&builder.out.dir, input_group, builder.spec.clone()),
            validation: DocumentWriter::new(&builder.out.validation(), input_group, builder.spec.clone()),
            threshold,
            in_validation: is_validation(input_group, 0, threshold),
            documents: 0,
            empty_documents: 0,
        }
    }

    fn push(&mut self, ids: &[u32], mark: &Mark, state: &mut Progress) -> Result<()> {
        let writer = if self.in_validation { &mut self.validation } else { &mut self.train };
        writer.push(ids)?;
        state.tokens += ids.len() as u64;
        match mark {
            Mark::Line => writer.end_line(),
            Mark::Document if writer.end_document()? => {
                self.documents += 1;
                state.documents += 1;
                self.in_validation = is_validation(self.input_group, self.documents, self.threshold);
                Ok(())
            }
            Mark::Document => {
                self.empty_documents += 1;
                Ok(())
            }
            Mark::Partial | Mark::InputGroup(_) => Ok(()),
        }
    }

    fn finish(self, builder: &InputGroupBuilder, skipped: Vec<SkippedRecord>) -> Result<()> {
        builder.out.save_record(&InputGroupRecord {
            fingerprint: builder.out.fingerprint.clone(),
            input_group: self.input_group,
            documents: self.documents,
            empty_documents: self.empty_documents,
            shards: self.train.finish()?,
            validation: self.validation.finish()?,
            skipped,
            checksum: String::new(),
        })
    }
}

/// Whether a document goes to the validation split: a pure function of its position in the corpus.
fn is_validation(input_group: usize, document: u64, threshold: u64) -> bool {
    let mut position = [0; 16];
    position[..8].copy_from_slice(&(input_group as u64).to_le_bytes());
    position[8..].copy_from_slice(&document.to_le_bytes());
    xxh3_64(&position) < threshold
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::output_dir::{ALL, Claim};

    #[test]
    fn text_outside_of_input_groups_is_an_error_and_not_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = dir.path().join("vocab.txt");
        std::fs::write(&vocab, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n").unwrap();
        let tokenizer = Tokenizer::from_file(&vocab, None, None).unwrap();
        let Claim::Ours(out) = OutputDir::claim(&dir.path().join("out"), "job", ALL).unwrap() else {
            panic!("the folder is new");
        };
        let (tag, tokenizer_hash) = (ALL.to_owned(), tokenizer.hash());
        let spec = ShardSpec { width: 2, tokenizer_hash, tag, max_tokens: 1 << 20, max_documents: 1 << 10 };
        let builder = InputGroupBuilder {
            out: &out,
            tokenizer: &tokenizer,
            spec,
            validation_fraction: 0.0,
            threads: 1,
        };
        let build = |documents_after: usize| {
            let read = move |to: &mut Batcher| {
                to.push_document("a a")?;
                to.end_input_group()?;
                (0..documents_after).try_for_each(|_| to.push_document("a"))
            };
            builder.build(&[0], SkipLog::default(), read, || (0, 0), &mut |_| true)
        };
        build(0).unwrap();
        assert!(build(1).unwrap_err().to_string().contains("more text was read"));
    }

    #[test]
    fn about_the_fraction_goes_to_validation() {
        let threshold = (0.1 * 2_f64.powi(64)) as u64;
        let count = (0..20_000).filter(|&document| is_validation(3, document, threshold)).count();
        assert!((1_850..2_150).contains(&count), "{count}");
        assert!((0..1_000).all(|document| !is_validation(0, document, 0)));
    }
}
