//! From finished units to a corpus: the last steps of `prepare`, the manifest the very last.

use std::collections::HashSet;
use std::path::Path;

use xxhash_rust::xxh3::xxh3_128;

use super::output_dir::{Folder, UnitRecord, remove_if_there};
use crate::error::{Error, Result};
use crate::format::{
    FORMAT_VERSION, HOLDOUT, MANIFEST, Manifest, Shard, ShardEntry, ShardSpec, TokenizerEntry, UnitWriter,
    create_folder, hex128, sum, write_whole,
};
use crate::input::{SKIPPED, SkippedRecord, to_lines};
use crate::tokenizer::Tokenizer;

/// What the manifest says beside the shards.
pub(super) struct Finish<'a> {
    pub folder: &'a Folder,
    pub tokenizer: &'a Tokenizer,
    pub spec: ShardSpec,
    pub options: serde_json::Value,
    /// Whether a part is to be held out.
    pub holdout: bool,
}

impl Finish<'_> {
    /// Turns the records of all units, in order, into a corpus.
    pub fn finish(&self, mut records: Vec<UnitRecord>) -> Result<Manifest> {
        let _lock = self.folder.finishing_lock()?;
        let dir = &self.folder.dir;
        if dir.join(MANIFEST).exists() {
            return Manifest::read(dir);
        }
        let documents = sum(records.iter().map(|record| record.documents));
        if self.holdout && documents > 1 && records.iter().all(|record| record.holdout.is_empty()) {
            self.hold_out_last(&mut records)?;
        }
        let collect = |shards: fn(&UnitRecord) -> &[ShardEntry]| -> Vec<ShardEntry> {
            records.iter().flat_map(shards).cloned().collect()
        };
        let (train, held_out) = (collect(|record| &record.shards), collect(|record| &record.holdout));
        if train.is_empty() {
            return Err(self.nothing_left(&records));
        }
        let empty = sum(records.iter().map(|record| record.empty_documents));
        let has_holdout = !held_out.is_empty();
        if has_holdout {
            self.write(&self.folder.holdout(), self.manifest(held_out, 0, false))?;
        } else if self.folder.holdout().exists() {
            std::fs::remove_dir_all(self.folder.holdout()).map_err(|e| Error::io(dir.join(HOLDOUT), e))?;
        }
        let skipped: Vec<SkippedRecord> = records.into_iter().flat_map(|record| record.skipped).collect();
        self.write_skipped(&skipped)?;
        let skipped_records = skipped.len() as u64;
        let unsealed = Manifest { skipped_records, ..self.manifest(train, empty, has_holdout) };
        let manifest = self.write(dir, unsealed.seal())?;
        self.folder.clear_up()?;
        Ok(manifest)
    }

    fn manifest(&self, shards: Vec<ShardEntry>, empty_documents: u64, holdout: bool) -> Manifest {
        let (file, bytes) = self.tokenizer.file();
        let (lowercase, strip_accents) = self.tokenizer.settings();
        let tokenizer = TokenizerEntry {
            file: file.to_owned(),
            file_hash: hex128(xxh3_128(bytes)),
            hash: format!("{:016x}", self.tokenizer.hash()),
            lowercase,
            strip_accents,
            vocab_size: self.tokenizer.vocab_size(),
            special_tokens: self.tokenizer.special_tokens(),
        };
        let unsealed = Manifest {
            format_version: FORMAT_VERSION,
            written_by: format!("electra-fast {}", env!("CARGO_PKG_VERSION")),
            content_hash: String::new(),
            num_tokens: 0,
            num_documents: 0,
            empty_documents,
            skipped_records: 0,
            token_bytes: self.spec.width,
            tokenizer,
            job: self.folder.job.clone(),
            options: self.options.clone(),
            holdout,
            shards,
            checksum: String::new(),
        };
        unsealed.seal()
    }

    fn write_skipped(&self, skipped: &[SkippedRecord]) -> Result<()> {
        let (dir, tag) = (&self.folder.dir, &self.folder.tag);
        if skipped.is_empty() {
            return remove_if_there(&dir.join(SKIPPED));
        }
        let lines = to_lines(skipped).map_err(|e| Error::io(dir.join(SKIPPED), e.into()))?;
        write_whole(dir, SKIPPED, tag, &lines)
    }

    fn write(&self, dir: &Path, manifest: Manifest) -> Result<Manifest> {
        remove_strays(dir, &manifest)?;
        let (file, bytes) = self.tokenizer.file();
        write_whole(dir, file, &self.folder.tag, bytes)?;
        write_whole(dir, MANIFEST, &self.folder.tag, manifest.canonical().as_bytes())?;
        Ok(manifest)
    }

    /// The draw took nobody, but a held-out part was asked for: it gets the last document. The
    /// unit's record goes first, so that an interruption leaves an unfinished unit, not a wrong one.
    fn hold_out_last(&self, records: &mut [UnitRecord]) -> Result<()> {
        let Some(record) = records.iter_mut().rfind(|record| !record.shards.is_empty()) else {
            return Ok(());
        };
        let Some(last) = record.shards.pop() else { return Ok(()) };
        self.folder.remove_record(record.unit)?;
        create_folder(&self.folder.holdout())?;
        let context = self.manifest(Vec::new(), 0, false);
        let shard = Shard::new(&self.folder.dir, &context, &last);
        let first = record.shards.len();
        let mut kept = UnitWriter::beginning_at(&self.folder.dir, record.unit, first, self.spec.clone());
        let mut taken = UnitWriter::new(&self.folder.holdout(), record.unit, self.spec.clone());
        for document in 0..last.num_documents {
            let to = if document + 1 < last.num_documents { &mut kept } else { &mut taken };
            copy_document(&shard, document, to)?;
        }
        record.holdout = taken.finish()?;
        record.shards.extend(kept.finish()?);
        self.folder.save_record(record)
    }

    fn nothing_left(&self, records: &[UnitRecord]) -> Error {
        let empty = sum(records.iter().map(|record| record.empty_documents));
        let message = if records.iter().any(|record| !record.holdout.is_empty()) {
            "the holdout took every document: choose a smaller fraction or add text".to_owned()
        } else {
            format!("the corpus is empty: no token in all the input ({empty} empty documents)")
        };
        // Nothing of this can be gone on with.
        let _ = self.folder.clear_up();
        let _ = std::fs::remove_dir_all(self.folder.holdout());
        let _ = std::fs::remove_dir(&self.folder.dir);
        Error::Input(message)
    }
}

fn copy_document(shard: &Shard, document: u64, to: &mut UnitWriter) -> Result<()> {
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

/// Removes shards of earlier, interrupted work that the manifest does not name.
fn remove_strays(dir: &Path, manifest: &Manifest) -> Result<()> {
    let named: HashSet<&str> = manifest
        .shards
        .iter()
        .flat_map(|shard| [shard.tokens.file.as_str(), shard.lines.file.as_str()])
        .collect();
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("shard-") && !named.contains(name.as_str()) {
            remove_if_there(&entry.path())?;
        }
    }
    Ok(())
}
