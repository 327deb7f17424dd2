//! Tokenizing input groups and writing the shards of each; `pipelines` runs both.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::Sender;
use xxhash_rust::xxh3::xxh3_64;

use super::options::Pass;
use super::output_dir::{InputGroupRecord, OutputDir};
use crate::error::{Error, Result};
use crate::format::{DocumentWriter, ShardSpec};
use crate::input::{Cut, GroupEnd, Mark, TextBatch};
use crate::store::Cancel;
use crate::tokenizer::{Encoder, Tokenizer};

pub(super) struct InputGroupBuilder<'a> {
    pub out: &'a OutputDir,
    pub tokenizer: &'a Tokenizer,
    pub spec: ShardSpec,
    pub validation_fraction: f64,
    pub pass: Pass,
    pub num_groups: usize,
    pub cancel: Cancel,
}

#[derive(Debug, Default)]
pub(super) struct Written {
    pub documents: AtomicU64,
    pub tokens: AtomicU64,
}

/// A batch after tokenization: its ids, and the number of ids of each marked text.
pub(super) struct TokenBatch {
    ids: Vec<u32>,
    texts: Vec<(usize, Mark)>,
}

pub(super) struct PipelineWriter<'a> {
    pub builder: &'a InputGroupBuilder<'a>,
    pub written: &'a Written,
    /// Sends records to the uploaders, if there are uploads.
    pub finished: Sender<InputGroupRecord>,
    pub current: Option<InputGroupWriter>,
}

impl PipelineWriter<'_> {
    /// Writes the texts of a batch; the mark at the end of an input group finishes the group.
    pub fn write(&mut self, TokenBatch { ids, texts }: TokenBatch) -> Result<()> {
        let mut at = 0;
        for (count, mark) in texts {
            match (mark, &mut self.current) {
                (Mark::Begin(number), current @ None) => {
                    *current = Some(InputGroupWriter::new(self.builder, number)?);
                }
                (Mark::InputGroup(end), Some(_)) => {
                    let record = self.current.take().map(|group| group.finish(self.builder, *end));
                    record.map_or(Ok(()), |record| self.save(record?))?;
                }
                (Mark::Begin(_), Some(_)) | (_, None) => {
                    let text =
                        "more text was read than belongs to the input groups of this run; please report this";
                    return Err(Error::Input(text.to_owned()));
                }
                (mark, Some(group)) => group.push(&ids[at..at + count], &mark, self.written)?,
            }
            at += count;
        }
        Ok(())
    }

    fn save(&self, record: InputGroupRecord) -> Result<()> {
        match self.builder.out.num_uploads() {
            0 => self.builder.out.save_record(&self.builder.pass, &record),
            _ => self.finished.send(record).map_err(|_| Error::Interrupted), // all uploaders have failed
        }
    }

    pub fn end(self) -> Result<()> {
        let error = || Error::Input("the input ended within an input group; please report this".to_owned());
        self.current.map_or(Ok(()), |_| Err(error()))
    }
}

pub(super) fn line_cut(tokenizer: &Tokenizer) -> Cut<'static> {
    if tokenizer.splits_at_whitespace() { Cut::Blanks } else { Cut::Nowhere }
}

pub(super) fn tokenize(encoder: &mut Encoder, batch: &TextBatch) -> Result<TokenBatch> {
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

pub(super) struct InputGroupWriter {
    input_group: usize,
    train: DocumentWriter,
    validation: DocumentWriter,
    threshold: u64,
    in_validation: bool,
    documents: u64,
    empty_documents: u64,
}

impl InputGroupWriter {
    fn new(builder: &InputGroupBuilder, input_group: usize) -> Result<Self> {
        builder.out.check_fingerprint()?;
        let threshold = (builder.validation_fraction * 2_f64.powi(64)) as u64;
        Ok(Self {
            input_group,
            train: DocumentWriter::new(&builder.out.dir, input_group, 0, builder.spec.clone()),
            validation: DocumentWriter::new(&builder.out.validation(), input_group, 0, builder.spec.clone()),
            threshold,
            in_validation: is_validation(input_group, 0, threshold),
            documents: 0,
            empty_documents: 0,
        })
    }

    fn push(&mut self, ids: &[u32], mark: &Mark, written: &Written) -> Result<()> {
        let writer = if self.in_validation { &mut self.validation } else { &mut self.train };
        writer.push(ids)?;
        written.tokens.fetch_add(ids.len() as u64, Ordering::Release);
        match mark {
            Mark::Line => writer.end_line()?,
            Mark::Document if writer.end_document()? => {
                self.documents += 1;
                written.documents.fetch_add(1, Ordering::Release);
                self.in_validation = is_validation(self.input_group, self.documents, self.threshold);
            }
            Mark::Document => self.empty_documents += 1,
            Mark::Partial | Mark::Begin(_) | Mark::InputGroup(_) => {}
        }
        Ok(())
    }

    fn finish(self, builder: &InputGroupBuilder, end: GroupEnd) -> Result<InputGroupRecord> {
        builder.out.check_fingerprint()?;
        Ok(InputGroupRecord {
            fingerprint: builder.out.fingerprint.clone(),
            input_group: self.input_group,
            documents: self.documents,
            empty_documents: self.empty_documents,
            shards: self.train.finish()?,
            validation: self.validation.finish()?,
            skipped: end.skipped,
            inputs: end.inputs,
            watched: end.watched,
            drops: builder.pass.digest().map(str::to_owned),
            checksum: String::new(),
        })
    }
}

/// Whether a document goes to the validation set: a pure function of its position in the corpus.
fn is_validation(input_group: usize, document: u64, threshold: u64) -> bool {
    let mut position = [0; 16];
    position[..8].copy_from_slice(&(input_group as u64).to_le_bytes());
    position[8..].copy_from_slice(&document.to_le_bytes());
    xxh3_64(&position) < threshold
}
