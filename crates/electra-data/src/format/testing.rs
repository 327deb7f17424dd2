//! Small corpora for this crate's tests, and ways to forge them.

use std::path::Path;

use super::atomic_file::write_atomically;
pub(crate) use super::header::HEADER_BYTES;
use super::header::{BLOCK_BYTES, Header, block_hash, hash_hex, read_u64};
use super::manifest::{MANIFEST, Manifest, SpecialTokens, TokenizerEntry};
use super::writer::{DocumentWriter, ShardSpec};

/// Writes documents (lists of lines, which are lists of ids) as a finished corpus whose shards end after
/// `max_tokens` tokens. The special tokens are 0 to 4, in the order pad, unk, cls, sep, mask.
pub(crate) fn write_corpus(dir: &Path, vocab_size: u32, documents: &[Vec<Vec<u32>>], max_tokens: u64) {
    let width = if vocab_size <= 1 << 16 { 2 } else { 4 };
    let spec = ShardSpec { width, tokenizer_hash: 7, tag: "test".into(), max_tokens, max_documents: 1 << 22 };
    std::fs::create_dir_all(dir).unwrap();
    let mut writer = DocumentWriter::new(dir, 0, 0, spec);
    for document in documents {
        for line in document {
            writer.push(line).unwrap();
            writer.end_line().unwrap();
        }
        writer.end_document().unwrap();
    }
    let tokenizer = TokenizerEntry {
        file: "vocab.txt".into(),
        file_hash: String::new(),
        hash: format!("{:016x}", 7),
        lowercase: Some(true),
        strip_accents: Some(true),
        vocab_size,
        special_tokens: SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 },
    };
    let manifest = Manifest::new(width, tokenizer, writer.finish().unwrap());
    write_atomically(dir, MANIFEST, "test", manifest.seal().canonical().as_bytes()).unwrap();
}

pub(crate) fn rewrite_manifest(dir: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut manifest: Manifest = serde_json::from_slice(&std::fs::read(dir.join(MANIFEST)).unwrap()).unwrap();
    change(&mut manifest);
    std::fs::write(dir.join(MANIFEST), manifest.seal().canonical()).unwrap();
}

/// Changes a shard's file and recomputes its checksums, also in the manifest.
pub(crate) fn forge(dir: &Path, shard: usize, lines: bool, change: impl FnOnce(&mut [u8])) {
    rewrite_manifest(dir, |manifest| {
        let entry = &mut manifest.shards[shard];
        let file = if lines { &mut entry.lines } else { &mut entry.tokens };
        let path = dir.join(&file.file);
        let mut bytes = std::fs::read(&path).unwrap();
        let table = Header::parse(bytes.first_chunk().unwrap()).unwrap().layout().unwrap().table;
        change(&mut bytes[..table]);
        let hashes: Vec<u8> =
            bytes[..table].chunks(BLOCK_BYTES).flat_map(|b| block_hash(b).to_le_bytes()).collect();
        bytes.truncate(table);
        bytes.extend_from_slice(&hashes);
        bytes.extend_from_slice(&block_hash(&hashes).to_le_bytes());
        file.hash = hash_hex(&hashes);
        std::fs::write(&path, &bytes).unwrap();
        if !lines {
            // The manifest takes its counts from the header.
            (entry.num_tokens, entry.num_documents) = (read_u64(&bytes[16..]), read_u64(&bytes[24..]));
        }
    });
}
