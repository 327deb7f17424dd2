//! Arbitrary bytes as text, with options chosen by the first byte: the fast tokenizer must return the ids of
//! the `tokenizers` crate.
#![no_main]

use std::sync::LazyLock;

use electra_data::Tokenizer;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/electra-data/tests/strings/mod.rs"]
#[allow(dead_code, reason = "strings come from the fuzzer")]
mod strings;

static ALL: LazyLock<Vec<(String, Tokenizer)>> =
    LazyLock::new(|| strings::tokenizers(tempfile::tempdir().expect("a temporary folder").path()));

fuzz_target!(|bytes: &[u8]| {
    let Some((first, bytes)) = bytes.split_first() else { return };
    let (name, tokenizer) = &ALL[usize::from(*first) % ALL.len()];
    let text = String::from_utf8_lossy(bytes);
    let mut ids = Vec::new();
    let reference = tokenizer.encoder().encode_into(&text, &mut ids).and_then(|()| tokenizer.encode_by_crate(&text));
    assert_eq!(reference.ok(), Some(ids), "{name}: {text:?}");
});
