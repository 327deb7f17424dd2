//! `manifest.json`, which turns a folder into a corpus. It is written last, and rejected if any byte has changed.

use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::damage::{damaged, foreign};
use super::header::{FORMAT_VERSION, FileKind, HEADER_BYTES, Header, Layout, hash_hex, hex128};
use crate::error::{Error, Result};
use crate::regular_file;
use crate::store::Store;

pub(crate) const MANIFEST: &str = "manifest.json";
/// Upper bound on a manifest's length. A manifest has a few hundred bytes per shard of 2^27 tokens.
const MAX_BYTES: u64 = 1 << 30;
/// Upper bound on the tokenizer's file in a store. The largest ones in use have about 40 MB.
pub(super) const MAX_TOKENIZER_BYTES: u64 = 1 << 28;
/// The folder of records of finished input groups. Without a manifest, it indicates unfinished work.
pub(crate) const PARTS: &str = "parts";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialTokens {
    pub pad: u32,
    pub unk: u32,
    pub cls: u32,
    pub sep: u32,
    pub mask: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenizerEntry {
    /// `vocab.txt` or `tokenizer.json`.
    pub file: String,
    pub file_hash: String,
    pub hash: String,
    pub lowercase: Option<bool>,
    pub strip_accents: Option<bool>,
    pub vocab_size: u32,
    pub special_tokens: SpecialTokens,
}

impl TokenizerEntry {
    pub fn hash_value(&self) -> u64 {
        u64::from_str_radix(&self.hash, 16).expect("`Manifest::read` accepts 16 hexadecimal digits only")
    }

    pub fn check(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        if hash_hex(bytes) == self.file_hash { Ok(()) } else { Err(foreign(path)) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub file: String,
    pub bytes: u64,
    /// xxh3-128 of the file's table of block checksums, hexadecimal. It covers the whole content.
    pub hash: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardEntry {
    pub tokens: FileEntry,
    pub lines: FileEntry,
    pub num_tokens: u64,
    pub num_documents: u64,
}

impl ShardEntry {
    /// Whether names, counts and lengths agree, with `width` bytes per token id. Readers map and allocate
    /// by these counts, so they must be bounded by the lengths of the files.
    pub fn is_consistent(&self, width: u16) -> bool {
        let &Self { num_tokens, num_documents, .. } = self;
        let kind = FileKind::Tokens { width };
        let body_length = num_tokens.saturating_mul(width.into());
        let header = Header { kind, num_tokens, num_documents, tokenizer_hash: 0, body_length };
        let lines = Layout::from_length(self.lines.bytes, num_documents.saturating_mul(8));
        (1..=u64::from(u32::MAX)).contains(&num_tokens)
            && (1..=num_tokens).contains(&num_documents)
            && header.layout().is_some_and(|layout| layout.file_length as u64 == self.tokens.bytes)
            && lines.is_some_and(|layout| (layout.index - HEADER_BYTES) as u64 >= num_documents)
            && is_plain(&self.tokens.file)
            && is_plain(&self.lines.file)
    }
}

/// Whether this is a plain file name, which cannot lead out of the folder.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|last| last == name)
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub format_version: u32,
    pub written_by: String,
    pub content_hash: String,
    pub num_tokens: u64,
    pub num_documents: u64,
    pub empty_documents: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_records: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_hash: Option<String>,
    /// Documents dropped as duplicates …
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped_documents: u64,
    /// … or because all their lines were duplicates, …
    #[serde(default, skip_serializing_if = "is_zero")]
    pub emptied_documents: u64,
    /// … and lines dropped as duplicates.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped_lines: u64,
    pub token_bytes: u16,
    pub tokenizer: TokenizerEntry,
    /// Hash of the inputs' names and sizes and of every option that determines the content. A finished corpus with
    /// the same fingerprint need not be prepared again.
    #[serde(rename = "job")]
    pub fingerprint: String,
    pub options: serde_json::Value,
    #[serde(rename = "holdout")]
    pub has_validation: bool,
    pub shards: Vec<ShardEntry>,
    /// xxh3-128 of this file with the empty string here, hexadecimal.
    pub checksum: String,
}

impl Manifest {
    /// A manifest of these shards; `seal` computes the totals and hashes.
    pub fn new(token_bytes: u16, tokenizer: TokenizerEntry, shards: Vec<ShardEntry>) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            written_by: format!("electra-fast {}", env!("CARGO_PKG_VERSION")),
            token_bytes,
            tokenizer,
            options: serde_json::json!({}),
            shards,
            ..Self::default()
        }
    }

    pub fn seal(mut self) -> Self {
        self.num_tokens = saturating_sum(self.shards.iter().map(|shard| shard.num_tokens));
        self.num_documents = saturating_sum(self.shards.iter().map(|shard| shard.num_documents));
        self.content_hash = self.hash_content();
        self.checksum = String::new();
        self.checksum = hash_hex(self.canonical().as_bytes());
        self
    }

    pub fn canonical(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a manifest is plain data");
        text.push('\n');
        text
    }

    pub fn open(dir: &Path, store: Option<&Store>) -> Result<Self> {
        store.map_or_else(|| Self::read(dir), Self::fetch)
    }

    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let length = std::fs::metadata(&path).map_err(|error| no_manifest(dir, error))?.len();
        if length > MAX_BYTES {
            return Err(damaged(&path, format!("not a manifest ({length} bytes long)")));
        }
        let bytes = regular_file::read(&path).map_err(|error| no_manifest(dir, error))?;
        Self::parse(&path, &bytes)
    }

    pub fn fetch(store: &Store) -> Result<Self> {
        let bytes = store.read(MANIFEST, MAX_BYTES).map_err(|error| match error {
            Error::NotFound { path, hint } => Error::NotFound {
                path,
                hint: format!("{hint}; the URL must point to a folder that `electra-fast prepare` wrote"),
            },
            error => error,
        })?;
        Self::parse(&Path::new(store.url()).join(MANIFEST), &bytes)
    }

    /// Parses the bytes once and copies none of them: with thousands of shards, they are millions.
    fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let manifest: Self = match serde_json::from_slice(bytes) {
            Ok(manifest) => manifest,
            Err(error) => {
                refuse_version(path, bytes)?;
                return Err(damaged(path, format!("not a manifest ({error})")));
            }
        };
        if manifest.format_version != FORMAT_VERSION {
            refuse_version(path, bytes)?;
        }
        if !manifest.has_checksum_of(bytes) || manifest.content_hash != manifest.hash_content() {
            return Err(damaged(path, "wrong checksum: edited or damaged".into()));
        }
        match manifest.inconsistency() {
            Some(reason) => Err(damaged(path, format!("{reason}: not written by any electra-fast release"))),
            None => Ok(manifest),
        }
    }

    fn has_checksum_of(&self, bytes: &[u8]) -> bool {
        let end = |checksum: &str| format!("  \"checksum\": \"{checksum}\"\n}}\n");
        let Some(start) = bytes.strip_suffix(end(&self.checksum).as_bytes()) else { return false };
        let mut hash = Xxh3::new();
        hash.update(start);
        hash.update(end("").as_bytes());
        hex128(hash.digest128()) == self.checksum
    }

    /// Describes the first inconsistency of this manifest. A forged manifest may have a valid checksum.
    fn inconsistency(&self) -> Option<String> {
        let TokenizerEntry { file, hash, vocab_size, special_tokens: s, .. } = &self.tokenizer;
        if !matches!(self.token_bytes, 2 | 4) {
            return Some(format!("token_bytes = {}", self.token_bytes));
        }
        if [s.pad, s.unk, s.cls, s.sep, s.mask].iter().any(|id| id >= vocab_size) || *vocab_size > 1 << 31 {
            return Some(format!("the special tokens do not fit a vocabulary of {vocab_size} entries"));
        }
        if !is_plain(file) || hash.len() != 16 || u64::from_str_radix(hash, 16).is_err() {
            return Some("malformed tokenizer entry".to_owned());
        }
        let sums: [fn(&ShardEntry) -> u64; 2] = [|shard| shard.num_tokens, |shard| shard.num_documents];
        if sums.map(|count| saturating_sum(self.shards.iter().map(count)))
            != [self.num_tokens, self.num_documents]
        {
            return Some("the shards' counts do not add up to the corpus's".to_owned());
        }
        let wrong = self.shards.iter().position(|shard| !shard.is_consistent(self.token_bytes))?;
        Some(format!("the names, counts or lengths of shard {wrong} (from 0) are inconsistent"))
    }

    fn hash_content(&self) -> String {
        let mut hash = Xxh3::new();
        hash.update(&FORMAT_VERSION.to_le_bytes());
        hash.update(&self.token_bytes.to_le_bytes());
        hash.update(self.tokenizer.hash.as_bytes());
        for shard in &self.shards {
            hash.update(shard.tokens.hash.as_bytes());
            hash.update(shard.lines.hash.as_bytes());
        }
        hex128(hash.digest128())
    }
}

fn refuse_version(path: &Path, bytes: &[u8]) -> Result<()> {
    #[derive(Deserialize)]
    struct Version {
        format_version: u32,
    }
    match serde_json::from_slice(bytes) {
        Ok(Version { format_version: version }) if version != FORMAT_VERSION => {
            let reason = format!(
                "format version {version}, but this release reads {FORMAT_VERSION}: prepare it again"
            );
            Err(Error::Damaged { path: path.to_owned(), reason })
        }
        _ => Ok(()),
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A sum of counts from a file, which may be forged and must not panic on overflow.
pub(crate) fn saturating_sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

fn no_manifest(dir: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::NotFound {
        return Error::io(dir.join(MANIFEST), error);
    }
    if !dir.exists() {
        let hint = "; `electra-fast prepare` makes a corpus".to_owned();
        return Error::NotFound { path: dir.to_owned(), hint };
    }
    let reason = if dir.join(PARTS).exists() {
        "; it is an unfinished corpus: run the same `electra-fast prepare` again"
    } else {
        "; it is not a corpus: `electra-fast prepare` makes one"
    };
    Error::NotFound { path: dir.join(MANIFEST), hint: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::testing::write_corpus;

    #[test]
    fn every_flipped_bit_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 1);
        let path = dir.path().join(MANIFEST);
        let sound = std::fs::read(&path).unwrap();
        assert!(Manifest::read(dir.path()).is_ok());
        for bit in 0..sound.len() * 8 {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::parse(&path, &flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn other_version_is_not_reported_as_damage() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MANIFEST), "{\"format_version\": 9}").unwrap();
        let error = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("format version 9, but this release reads 1"), "{error}");
    }
}
