//! Corpora of any size that need almost no disk space: every token is 0 and lies in a hole of a sparse file.
//!
//! They measure the cost of opening and reading very large corpora; see `bench/`.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use electra_data::philox::{Purpose, Stream};
use serde_json::{Value, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use header::{BLOCK_BYTES, FORMAT_VERSION, FileKind, HEADER_BYTES, Header};

#[allow(dead_code, reason = "it is the crate's, which also reads")]
#[path = "../../src/format/header.rs"]
mod header;

const SHARD_TOKENS: u64 = 1 << 27;
const TOKENIZER_HASH: u64 = 7;
const VOCAB: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";

/// Writes a corpus of at least `num_tokens` tokens, all 0, into a new folder. Each document is one line, and
/// its length is uniform over `1..=2 * mean_document - 1` tokens. `mean_document` is at most 2^20.
///
/// The manifest lists each shard `copies` times, under names of which only the first has files: a server that gives the
/// same files for all names has a corpus larger than any disk.
pub fn write_sparse(
    dir: &Path,
    num_tokens: u64,
    mean_document: u32,
    copies: usize,
) -> Result<(), Box<dyn Error>> {
    std::fs::create_dir_all(dir)?;
    let (mut shards, mut left) = (Vec::new(), num_tokens);
    while left > 0 {
        let shard = write_shard(dir, shards.len() as u32, left.min(SHARD_TOKENS), mean_document)?;
        left = left.saturating_sub(shard["num_tokens"].as_u64().unwrap_or(left));
        shards.push(shard);
    }
    let named = |mut shard: Value, copy: usize| {
        for part in ["tokens", "lines"] {
            let name = shard[part]["file"].as_str().unwrap_or_default();
            shard[part]["file"] = name.replacen("-000.", &format!("-000-{copy}."), 1).into();
        }
        shard
    };
    let copied: Vec<_> =
        (1..copies).flat_map(|copy| shards.iter().map(move |shard| named(shard.clone(), copy))).collect();
    shards.extend(copied);
    std::fs::write(dir.join("vocab.txt"), VOCAB)?;
    Ok(std::fs::write(dir.join("manifest.json"), manifest(&shards))?)
}

/// The text of the manifest, which ends with its checksum.
fn manifest(shards: &[Value]) -> String {
    let tokenizer_hash = format!("{TOKENIZER_HASH:016x}");
    let hashes = shards.iter().flat_map(|shard| [&shard["tokens"]["hash"], &shard["lines"]["hash"]]);
    let mut content =
        [&FORMAT_VERSION.to_le_bytes()[..], &2_u16.to_le_bytes(), tokenizer_hash.as_bytes()].concat();
    hashes.for_each(|hash| content.extend(hash.as_str().unwrap_or_default().as_bytes()));
    let total = |count: &str| shards.iter().filter_map(|shard| shard[count].as_u64()).sum::<u64>();
    let fields = json!({
        "format_version": FORMAT_VERSION,
        "written_by": "sparse",
        "content_hash": hash_hex(&content),
        "num_tokens": total("num_tokens"),
        "num_documents": total("num_documents"),
        "empty_documents": 0,
        "token_bytes": 2,
        "tokenizer": {
            "file": "vocab.txt",
            "file_hash": hash_hex(VOCAB.as_bytes()),
            "hash": tokenizer_hash,
            "lowercase": true,
            "strip_accents": true,
            "vocab_size": 5,
            "special_tokens": {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4},
        },
        "job": "sparse",
        "options": {},
        "holdout": false,
        "shards": shards,
    });
    let text = format!("{fields:#}");
    let with =
        |checksum: &str| format!("{},\n  \"checksum\": \"{checksum}\"\n}}\n", text.trim_end_matches("\n}"));
    with(&hash_hex(with("").as_bytes()))
}

fn write_shard(dir: &Path, number: u32, min_tokens: u64, mean: u32) -> Result<Value, Box<dyn Error>> {
    let mut lengths = Stream::new(0, Purpose::Cut, [number, 0, 0]);
    let (mut num_tokens, mut num_documents) = (0_u64, 0_u64);
    let (mut ends, mut lines, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    while num_tokens < min_tokens {
        let mut length = 1 + lengths.below(2 * mean - 1);
        num_tokens += u64::from(length);
        num_documents += 1;
        ends.extend((num_tokens as u32).to_le_bytes());
        offsets.extend((lines.len() as u64).to_le_bytes());
        while length >= 0x80 {
            lines.push(length as u8 | 0x80);
            length >>= 7;
        }
        lines.push(length as u8);
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
    Ok(json!({
        "tokens": write_file(dir, format!("{stem}.tokens"), tokens, index, &ends)?,
        "lines": write_file(dir, format!("{stem}.lines"), body, HEADER_BYTES, &lines)?,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
    }))
}

/// Writes a file of zeros except for its header, `content` at byte `start`, and its table of checksums.
fn write_file(
    dir: &Path,
    file: String,
    header: Header,
    start: usize,
    content: &[u8],
) -> Result<Value, Box<dyn Error>> {
    let layout = header.layout().ok_or("impossible lengths")?;
    let zeros = xxh3_64(&[0; BLOCK_BYTES]);
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
        xxh3_64(&bytes)
    };
    let mut table: Vec<u8> = (0..layout.num_blocks).flat_map(|block| hash(block).to_le_bytes()).collect();
    let entry = json!({"file": file, "bytes": layout.file_length, "hash": hash_hex(&table)});
    table.extend(xxh3_64(&table).to_le_bytes());
    let output = File::create_new(dir.join(&file))?;
    output.set_len(layout.file_length as u64)?;
    for (at, bytes) in [(0, &header.to_bytes()[..]), (start, content), (layout.table, &table[..])] {
        output.write_all_at(bytes, at as u64)?;
    }
    Ok(entry)
}

fn hash_hex(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
