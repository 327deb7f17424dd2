//! Corpora of any size that take next to no disk: every token is 0 and lies in a hole of the file.
//!
//! For measuring what it costs to open and read a corpus that would not fit; see `bench/`.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_128;

use super::atomic_file::write_whole;
use super::header::{BLOCK, FORMAT_VERSION, HEADER, Header, Kind, block_hash};
use super::manifest::{FileEntry, MANIFEST, Manifest, ShardEntry, SpecialTokens, TokenizerEntry, hex128};
use crate::error::{Error, Result};
use crate::philox::{Purpose, Stream};

const SHARD_TOKENS: u64 = 1 << 27;
const TOKENIZER_HASH: u64 = 7;
const VOCAB: &[u8] = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";
const TAG: &str = "synthetic";

/// Writes a corpus of at least `num_tokens` tokens into a new folder, in documents of one line whose
/// lengths are drawn evenly from 1 to twice `mean_document`, less one.
pub fn write_sparse(dir: &Path, num_tokens: u64, mean_document: u32) -> Result<()> {
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
    write_whole(dir, "vocab.txt", TAG, VOCAB)?;
    write_whole(dir, MANIFEST, TAG, manifest(shards).seal().canonical().as_bytes())
}

fn manifest(shards: Vec<ShardEntry>) -> Manifest {
    Manifest {
        format_version: FORMAT_VERSION,
        written_by: TAG.into(),
        content_hash: String::new(),
        num_tokens: 0,
        num_documents: 0,
        empty_documents: 0,
        skipped_records: 0,
        token_bytes: 2,
        tokenizer: TokenizerEntry {
            file: "vocab.txt".into(),
            file_hash: hex128(xxh3_128(VOCAB)),
            hash: format!("{TOKENIZER_HASH:016x}"),
            lowercase: Some(true),
            strip_accents: Some(true),
            vocab_size: 5,
            special_tokens: SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 },
        },
        job: TAG.into(),
        options: serde_json::json!({}),
        holdout: false,
        shards,
        checksum: String::new(),
    }
}

fn write_shard(dir: &Path, number: u32, least: u64, mean: u32) -> Result<ShardEntry> {
    let mut lengths = Stream::new(0, Purpose::Cut, [number, 0, 0]);
    let (mut num_tokens, mut num_documents) = (0_u64, 0_u64);
    let (mut ends, mut lines, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    while num_tokens < least {
        let length = 1 + lengths.below(2 * mean - 1);
        num_tokens += u64::from(length);
        num_documents += 1;
        ends.extend((num_tokens as u32).to_le_bytes());
        offsets.extend((lines.len() as u64).to_le_bytes());
        push_leb128(&mut lines, length);
    }
    let header = |kind, body_length| Header {
        kind,
        num_tokens,
        num_documents,
        tokenizer_hash: TOKENIZER_HASH,
        body_length,
    };
    let tokens = header(Kind::Tokens { width: 2 }, 2 * num_tokens);
    let body = header(Kind::Lines, lines.len() as u64);
    lines.resize((HEADER + lines.len()).next_multiple_of(8) - HEADER, 0);
    lines.append(&mut offsets);
    let stem = format!("shard-{number:06}-000");
    let index = (HEADER as u64 + 2 * num_tokens).next_multiple_of(8) as usize;
    Ok(ShardEntry {
        tokens: write_file(dir, format!("{stem}.tokens"), tokens, index, &ends)?,
        lines: write_file(dir, format!("{stem}.lines"), body, HEADER, &lines)?,
        num_tokens,
        num_documents,
    })
}

fn push_leb128(bytes: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Writes a file that holds zeros but for its header, `content` from byte `start` on, and its table.
fn write_file(dir: &Path, file: String, header: Header, start: usize, content: &[u8]) -> Result<FileEntry> {
    let path = dir.join(&file);
    let too_large = || Error::Input(format!("{}: impossible lengths", path.display()));
    let layout = header.layout().ok_or_else(too_large)?;
    let zeros = block_hash(&[0; BLOCK]);
    let hash = |block: usize| {
        let range = block * BLOCK..((block + 1) * BLOCK).min(layout.table);
        if block > 0 && range.len() == BLOCK && range.end <= start {
            return zeros;
        }
        let mut bytes = vec![0; range.len()];
        if block == 0 {
            bytes[..HEADER].copy_from_slice(&header.to_bytes());
        }
        let (from, to) = (range.start.max(start), range.end.min(start + content.len()));
        if from < to {
            bytes[from - range.start..to - range.start].copy_from_slice(&content[from - start..to - start]);
        }
        block_hash(&bytes)
    };
    let mut table: Vec<u8> = (0..layout.num_blocks).flat_map(|block| hash(block).to_le_bytes()).collect();
    let entry = FileEntry { file, bytes: layout.file_length as u64, hash: hex128(xxh3_128(&table)) };
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
    use super::super::corpus::Corpus;
    use super::super::verify::verify;
    use super::*;

    #[test]
    fn a_sparse_corpus_is_a_sound_one() {
        let dir = tempfile::tempdir().unwrap();
        write_sparse(dir.path(), 300_000, 50).unwrap();
        let corpus = Corpus::open(dir.path()).unwrap();
        assert!(corpus.num_tokens() >= 300_000);
        assert!(corpus.document(corpus.num_documents() - 1).unwrap().iter().all(|&id| id == 0));
        let shard = &corpus.shards()[0];
        let ends = shard.document_ends().unwrap();
        assert_eq!(shard.line_lengths(1).unwrap(), [ends[1] - ends[0]]);
        let verified = verify(dir.path());
        assert!(verified.is_ok(), "{verified:?}");
    }
}
