//! Corpora of any size that need almost no disk space: every token is 0 and lies in a hole of a sparse file.
//!
//! Used to measure the cost of opening and reading very large corpora; see `bench/`.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use super::atomic_file::write_atomically;
use super::checksum::{block_hash, hash_hex};
use super::header::{BLOCK_BYTES, FileKind, HEADER_BYTES, Header};
use super::manifest::{FileEntry, MANIFEST, Manifest, ShardEntry, SpecialTokens, TokenizerEntry};
use super::writer::leb128;
use crate::error::{Error, Result};
use crate::philox::{Purpose, Stream};

const SHARD_TOKENS: u64 = 1 << 27;
const TOKENIZER_HASH: u64 = 7;
const VOCAB: &[u8] = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";
const TAG: &str = "synthetic";

/// Writes a corpus of at least `num_tokens` tokens, all 0, into a new folder. Each document is one line, and
/// its length is uniform over `1..=2 * mean_document - 1` tokens. `mean_document` is at most 2^20.
///
/// The manifest lists each shard `copies` times, under names of which only the first has files: a server that gives the
/// same files for all names has a corpus larger than any disk.
pub fn write_sparse(dir: &Path, num_tokens: u64, mean_document: u32, copies: usize) -> Result<()> {
    if mean_document == 0 || mean_document > 1 << 20 {
        return Err(Error::Input(format!("mean_document = {mean_document}: must be from 1 to 1048576")));
    }
    std::fs::create_dir_all(dir).map_err(|error| Error::io(dir, error))?;
    let (mut shards, mut left) = (Vec::new(), num_tokens);
    while left > 0 {
        let shard = write_shard(dir, shards.len() as u32, left.min(SHARD_TOKENS), mean_document)?;
        left = left.saturating_sub(shard.num_tokens);
        shards.push(shard);
    }
    let named = |copy: usize| {
        let rename = move |file: &FileEntry| match copy {
            0 => file.clone(),
            _ => FileEntry { file: file.file.replacen("-000.", &format!("-000-{copy}."), 1), ..file.clone() },
        };
        move |shard: &ShardEntry| ShardEntry {
            tokens: rename(&shard.tokens),
            lines: rename(&shard.lines),
            ..shard.clone()
        }
    };
    let shards = (0..copies.max(1)).flat_map(|copy| shards.iter().map(named(copy))).collect();
    write_atomically(dir, "vocab.txt", TAG, VOCAB)?;
    let tokenizer = TokenizerEntry {
        file: "vocab.txt".into(),
        file_hash: hash_hex(VOCAB),
        hash: format!("{TOKENIZER_HASH:016x}"),
        lowercase: Some(true),
        strip_accents: Some(true),
        vocab_size: 5,
        special_tokens: SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 },
    };
    let manifest =
        Manifest { written_by: TAG.into(), fingerprint: TAG.into(), ..Manifest::new(2, tokenizer, shards) };
    write_atomically(dir, MANIFEST, TAG, manifest.seal().canonical().as_bytes())
}

fn write_shard(dir: &Path, number: u32, min_tokens: u64, mean: u32) -> Result<ShardEntry> {
    let mut lengths = Stream::new(0, Purpose::Cut, [number, 0, 0]);
    let (mut num_tokens, mut num_documents) = (0_u64, 0_u64);
    let (mut ends, mut lines, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    while num_tokens < min_tokens {
        let length = 1 + lengths.below(2 * mean - 1);
        num_tokens += u64::from(length);
        num_documents += 1;
        ends.extend((num_tokens as u32).to_le_bytes());
        offsets.extend((lines.len() as u64).to_le_bytes());
        lines.extend(leb128(length));
    }
    let header = |kind, body_length| Header {
        kind,
        num_tokens,
        num_documents,
        tokenizer_hash: TOKENIZER_HASH,
        body_length,
    };
    let tokens = header(FileKind::Tokens { width: 2 }, 2 * num_tokens);
    let body = header(FileKind::Lines, lines.len() as u64);
    lines.resize((HEADER_BYTES + lines.len()).next_multiple_of(8) - HEADER_BYTES, 0);
    lines.append(&mut offsets);
    let stem = format!("shard-{number:06}-000");
    let index = (HEADER_BYTES as u64 + 2 * num_tokens).next_multiple_of(8) as usize;
    Ok(ShardEntry {
        tokens: write_file(dir, format!("{stem}.tokens"), tokens, index, &ends)?,
        lines: write_file(dir, format!("{stem}.lines"), body, HEADER_BYTES, &lines)?,
        num_tokens,
        num_documents,
    })
}

/// Writes a file of zeros except for its header, `content` at byte `start`, and its table of checksums.
fn write_file(dir: &Path, file: String, header: Header, start: usize, content: &[u8]) -> Result<FileEntry> {
    let path = dir.join(&file);
    let too_large = || Error::Input(format!("{}: impossible lengths", path.display()));
    let layout = header.layout().ok_or_else(too_large)?;
    let zeros = block_hash(&[0; BLOCK_BYTES]);
    let hash = |block: usize| {
        let range = block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(layout.table);
        if block > 0 && range.len() == BLOCK_BYTES && range.end <= start {
            return zeros;
        }
        let mut bytes = vec![0; range.len()];
        if block == 0 {
            bytes[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        }
        let (from, to) = (range.start.max(start), range.end.min(start + content.len()));
        if from < to {
            bytes[from - range.start..to - range.start].copy_from_slice(&content[from - start..to - start]);
        }
        block_hash(&bytes)
    };
    let mut table: Vec<u8> = (0..layout.num_blocks).flat_map(|block| hash(block).to_le_bytes()).collect();
    let entry = FileEntry { file, bytes: layout.file_length as u64, hash: hash_hex(&table) };
    table.extend(block_hash(&table).to_le_bytes());
    let write = || {
        let mut output = File::create_new(&path)?;
        output.set_len(layout.file_length as u64)?;
        for (at, bytes) in [(0, &header.to_bytes()[..]), (start, content), (layout.table, &table[..])] {
            output.seek(SeekFrom::Start(at as u64))?;
            output.write_all(bytes)?;
        }
        Ok(())
    };
    write().map_err(|error| Error::io(&path, error))?;
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Corpus, verify};

    #[test]
    fn a_sparse_corpus_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        write_sparse(dir.path(), 300_000, 50, 1).unwrap();
        let corpus = Corpus::open(dir.path()).unwrap();
        assert!(corpus.num_tokens() >= 300_000);
        assert!(corpus.document(corpus.num_documents() - 1).unwrap().iter().all(|&id| id == 0));
        let shard = corpus.shard(0);
        let ends = shard.document_ends().unwrap();
        assert_eq!(shard.line_lengths(1).unwrap(), [ends[1] - ends[0]]);
        let verified = verify(dir.path());
        assert!(verified.is_ok(), "{verified:?}");
    }
}
