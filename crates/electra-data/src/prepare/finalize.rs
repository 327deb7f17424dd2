//! From finished input groups to a corpus: the last steps of `prepare`. The manifest is written last, and files are
//! removed only after that.
//!
//! Several runs may finalize at once: they write the same bytes, and if a file is missing for one run, another run has
//! written the manifest and removed the file.

use super::changes;
use super::clean_up::clean_up;
use super::output_dir::{InputGroupRecord, OutputDir};
use super::place::Place;
use super::repeats::Dropped;
use crate::error::{Error, Result};
use crate::format::{
    DocumentWriter, MANIFEST, Manifest, Shard, ShardEntry, ShardSpec, TokenizerEntry, VALIDATION,
    create_folder, hash_hex, saturating_sum,
};
use crate::input::{SKIPPED, SkippedRecord, skipped_to_jsonl};
use crate::tokenizer::Tokenizer;

/// Writes a corpus from finished input groups; the fields are the manifest's contents other than the shards.
pub(super) struct Finalizer<'a> {
    pub out: &'a OutputDir,
    pub tokenizer: &'a Tokenizer,
    pub spec: ShardSpec,
    pub options: serde_json::Value,
    pub dropped: Dropped,
    pub wants_validation: bool,
}

impl Finalizer<'_> {
    pub fn finalize(&self, mut records: Vec<InputGroupRecord>) -> Result<Manifest> {
        if let Place::Store(_) = self.out.place {
            // A run that has ended must not overwrite anything.
            self.out.check_fingerprint()?;
        }
        let documents = saturating_sum(records.iter().map(|record| record.documents));
        if self.wants_validation && documents > 1 && records.iter().all(|record| record.validation.is_empty())
        {
            self.move_last_to_validation(&mut records)?;
        }
        let collect = |shards: fn(&InputGroupRecord) -> &[ShardEntry]| -> Vec<ShardEntry> {
            records.iter().flat_map(shards).cloned().collect()
        };
        let (train, validation) = (collect(|record| &record.shards), collect(|record| &record.validation));
        if train.is_empty() {
            return Err(self.nothing_left(&records));
        }
        let empty_documents = saturating_sum(records.iter().map(|record| record.empty_documents));
        let has_validation = !validation.is_empty();
        if has_validation {
            let manifest = self.manifest(validation).seal();
            self.write_tokenizer(&format!("{VALIDATION}/"))?;
            self.out.write(&format!("{VALIDATION}/{MANIFEST}"), manifest.canonical().as_bytes())?;
        }
        let inputs = records.iter_mut().flat_map(|record| std::mem::take(&mut record.inputs)).collect();
        changes::write(self.out, inputs)?;
        let skipped: Vec<SkippedRecord> = records.into_iter().flat_map(|record| record.skipped).collect();
        let skipped_hash = self.write_skipped(&skipped)?;
        let skipped_records = skipped.len() as u64;
        let Dropped { documents: dropped_documents, lines: dropped_lines, emptied_documents } = self.dropped;
        let manifest = Manifest {
            empty_documents,
            skipped_records,
            skipped_hash,
            dropped_documents,
            emptied_documents,
            dropped_lines,
            has_validation,
            ..self.manifest(train)
        };
        self.write_tokenizer("")?;
        let manifest = self.out.write_manifest(manifest.seal())?;
        clean_up(&self.out.place, &manifest)?;
        Ok(manifest)
    }

    fn manifest(&self, shards: Vec<ShardEntry>) -> Manifest {
        let (file, bytes) = self.tokenizer.file();
        let (lowercase, strip_accents) = self.tokenizer.settings();
        let tokenizer = TokenizerEntry {
            file: file.to_owned(),
            file_hash: hash_hex(bytes),
            hash: format!("{:016x}", self.tokenizer.hash()),
            lowercase,
            strip_accents,
            vocab_size: self.tokenizer.vocab_size(),
            special_tokens: self.tokenizer.special_tokens(),
        };
        Manifest {
            fingerprint: self.out.fingerprint.clone(),
            options: self.options.clone(),
            ..Manifest::new(self.spec.width, tokenizer, shards)
        }
    }

    fn write_skipped(&self, skipped: &[SkippedRecord]) -> Result<Option<String>> {
        if skipped.is_empty() {
            return self.out.place.remove(SKIPPED).map(|()| None);
        }
        let lines = skipped_to_jsonl(skipped).map_err(|e| Error::io(SKIPPED, e.into()))?;
        self.out.write(SKIPPED, &lines)?;
        Ok(Some(hash_hex(&lines)))
    }

    fn write_tokenizer(&self, folder: &str) -> Result<()> {
        let (file, bytes) = self.tokenizer.file();
        self.out.write(&format!("{folder}{file}"), bytes)
    }

    /// Moves the last document to the validation set if the random choice took none. Copies the rest of the
    /// last shard to another name, so that the old shard stays complete for another run that reads it.
    pub(super) fn move_last_to_validation(&self, records: &mut [InputGroupRecord]) -> Result<()> {
        let record = records.iter_mut().rfind(|record| !record.shards.is_empty());
        let record = record.expect("a record with documents names their shards");
        let (group, next) = (record.input_group, record.shards.len());
        let last = record.shards.pop().expect("this record has shards");
        create_folder(&self.out.validation())?;
        self.out.download(&last)?;
        let context = self.manifest(Vec::new());
        let shard = Shard::new(&self.out.dir, &context, &last);
        let mut remainder = DocumentWriter::new(&self.out.dir, group, next, self.spec.clone());
        let mut taken = DocumentWriter::new(&self.out.validation(), group, 0, self.spec.clone());
        for document in 0..last.num_documents {
            let to = if document + 1 < last.num_documents { &mut remainder } else { &mut taken };
            copy_document(&shard, document, to)?;
        }
        record.validation = taken.finish()?;
        record.shards.extend(remainder.finish()?);
        self.out.upload(record)
    }

    fn nothing_left(&self, records: &[InputGroupRecord]) -> Error {
        let empty = saturating_sum(records.iter().map(|record| record.empty_documents));
        let message = match records.iter().all(|record| record.validation.is_empty()) {
            true => format!("the corpus is empty: the input has no tokens ({empty} empty documents)"),
            false => {
                "the validation set took every document; choose a smaller --holdout or add text".to_owned()
            }
        };
        // This work cannot be resumed.
        let _ = clean_up(&self.out.place, &self.manifest(Vec::new()));
        let _ = std::fs::remove_dir(&self.out.out);
        Error::Input(message)
    }
}

fn copy_document(shard: &Shard, document: u64, to: &mut DocumentWriter) -> Result<()> {
    let ends = shard.document_ends()?;
    let index = document as usize;
    let mut at = if index == 0 { 0 } else { u64::from(ends[index - 1]) };
    for length in shard.line_lengths(document)? {
        let mut ids = vec![0; length as usize];
        shard.copy_tokens(at, &mut ids)?;
        to.push(&ids.iter().map(|&id| id as u32).collect::<Vec<_>>())?;
        to.end_line()?;
        at += u64::from(length);
    }
    to.end_document().map(drop)
}
