//! Small corpora for this crate's own tests.

use std::path::Path;

use crate::durable::write_whole;
use crate::format::FORMAT_VERSION;
use crate::manifest::{MANIFEST, Manifest, SpecialTokens, TokenizerEntry};
use crate::writer::{ShardSpec, UnitWriter};

/// Writes documents (each a list of lines, each a list of ids) as a finished corpus whose shards
/// end after `max_tokens` tokens. Specials are 0 to 4 in the order pad, unk, cls, sep, mask.
pub(crate) fn write_corpus(dir: &Path, vocab_size: u32, documents: &[Vec<Vec<u32>>], max_tokens: u64) {
    let width = if vocab_size <= 1 << 16 { 2 } else { 4 };
    let spec = ShardSpec { width, tokenizer_hash: 7, tag: "test".into(), max_tokens, max_documents: 1 << 22 };
    std::fs::create_dir_all(dir).unwrap();
    let mut unit = UnitWriter::new(dir, 0, spec);
    for document in documents {
        for line in document {
            unit.push(line).unwrap();
            unit.end_line().unwrap();
        }
        unit.end_document().unwrap();
    }
    let manifest = Manifest {
        format_version: FORMAT_VERSION,
        written_by: "test".into(),
        content_hash: String::new(),
        num_tokens: 0,
        num_documents: 0,
        empty_documents: 0,
        skipped_records: 0,
        token_bytes: width,
        tokenizer: TokenizerEntry {
            file: "vocab.txt".into(),
            file_hash: String::new(),
            hash: format!("{:016x}", 7),
            lowercase: Some(true),
            strip_accents: Some(true),
            vocab_size,
            special_tokens: SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 },
        },
        job: String::new(),
        options: serde_json::json!({}),
        holdout: false,
        shards: unit.finish().unwrap(),
        checksum: String::new(),
    };
    write_whole(dir, MANIFEST, "test", manifest.seal().canonical().as_bytes()).unwrap();
}
