//! `manifest.json`: what makes a folder a corpus. Written last, refused when a single byte is off.

use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::error::{Error, Result};
use crate::format::FORMAT_VERSION;
use crate::mapped::damaged;

/// The manifest's name inside a corpus.
pub(crate) const MANIFEST: &str = "manifest.json";

/// Ids of the five tokens that training needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialTokens {
    /// Fills rows up.
    pub pad: u32,
    /// Stands for what the vocabulary cannot spell.
    pub unk: u32,
    /// Opens a piece.
    pub cls: u32,
    /// Closes a piece.
    pub sep: u32,
    /// Hides a token.
    pub mask: u32,
}

/// The tokenizer that wrote the corpus; its file lies beside the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenizerEntry {
    /// `vocab.txt` or `tokenizer.json`.
    pub file: String,
    /// xxh3-128 of that file's bytes, hexadecimal.
    pub file_hash: String,
    /// What shards carry in their header: vocabulary and settings, hexadecimal.
    pub hash: String,
    pub lowercase: Option<bool>,
    pub strip_accents: Option<bool>,
    pub vocab_size: u32,
    pub special_tokens: SpecialTokens,
}

impl TokenizerEntry {
    /// The hash as shards carry it.
    pub fn hash_value(&self) -> u64 {
        u64::from_str_radix(&self.hash, 16).unwrap_or(0)
    }
}

/// One file of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub file: String,
    pub bytes: u64,
    /// xxh3-128 of the file's block table (the checksums of all that comes before), hexadecimal.
    pub hash: String,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardEntry {
    pub tokens: FileEntry,
    pub lines: FileEntry,
    pub num_tokens: u64,
    pub num_documents: u64,
}

/// The whole manifest, fields in the order in which they are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub format_version: u32,
    /// Version of electra-fast that wrote it.
    pub written_by: String,
    pub content_hash: String,
    pub num_tokens: u64,
    pub num_documents: u64,
    /// Documents that had no token and were left out.
    pub empty_documents: u64,
    /// 2 or 4.
    pub token_bytes: u16,
    pub tokenizer: TokenizerEntry,
    /// Hash of the inputs' names and sizes and of every option: is this the corpus that was asked for?
    pub job: String,
    pub options: serde_json::Value,
    /// Whether `holdout/` is part of this corpus.
    pub holdout: bool,
    pub shards: Vec<ShardEntry>,
    /// xxh3-128 of this file with the empty string here, hexadecimal.
    pub checksum: String,
}

impl Manifest {
    /// Adds up the shards and computes both hashes.
    pub fn seal(mut self) -> Self {
        self.num_tokens = self.shards.iter().map(|shard| shard.num_tokens).sum();
        self.num_documents = self.shards.iter().map(|shard| shard.num_documents).sum();
        self.content_hash = self.hash_content();
        self.checksum = String::new();
        self.checksum = hex128(xxh3_128(self.canonical().as_bytes()));
        self
    }

    /// The one way to spell this manifest.
    pub fn canonical(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reads and checks `dir/manifest.json`.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let bytes = std::fs::read(&path).map_err(|error| no_manifest(dir, error))?;
        let newer = |version: u64| {
            format!("format version {version}, but this release reads {FORMAT_VERSION}: prepare it again")
        };
        let value: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(&path, format!("not a manifest ({error})")))?;
        match value["format_version"].as_u64() {
            Some(version) if version != u64::from(FORMAT_VERSION) => {
                return Err(Error::Damaged { path, reason: newer(version) });
            }
            _ => {}
        }
        let manifest: Self = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(&path, format!("not a manifest ({error})")))?;
        let sealed = manifest.clone().seal();
        if sealed != manifest || manifest.canonical().as_bytes() != bytes {
            return Err(damaged(&path, "its checksum does not hold: it was edited or damaged".into()));
        }
        Ok(manifest)
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

/// 128 bits as 32 hexadecimal digits.
pub(crate) fn hex128(hash: u128) -> String {
    format!("{hash:032x}")
}

fn no_manifest(dir: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::NotFound {
        return Error::io(dir.join(MANIFEST), error);
    }
    if !dir.exists() {
        let hint = "; `electra-fast prepare` makes a corpus".to_owned();
        return Error::NotFound { path: dir.to_owned(), hint };
    }
    let reason = if dir.join(crate::job::PARTS).exists() {
        "; it is an unfinished corpus: run the same `electra-fast prepare` again"
    } else {
        "; it is not a corpus: `electra-fast prepare` makes one"
    };
    Error::NotFound { path: dir.join(MANIFEST), hint: reason.to_owned() }
}
