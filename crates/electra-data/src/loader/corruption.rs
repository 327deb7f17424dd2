//! Corrupted corpora: flipped bits, truncated files, and forged counts with correct checksums. Each must give a one-line error or a sound result.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::LoaderOptions;
use super::batch_loader::Loader;
use super::tests::named;
use crate::format::testing::{HEADER_BYTES, forge, rewrite_manifest, write_corpus};
use crate::format::{Corpus, MANIFEST, Manifest, Shard, hash_hex, verify};
use crate::store::test_server::TestServer;

/// Seven documents, one with a blank line and one with a long line, in two shards.
fn small_corpus() -> tempfile::TempDir {
    let mut documents: Vec<Vec<Vec<u32>>> = (5..10).map(|id| vec![vec![id; 4], vec![id + 1]]).collect();
    documents.push(vec![vec![20], vec![], vec![21, 22]]);
    documents.push(vec![vec![30; 200]]);
    corpus_of(&documents)
}

fn tiny_corpus() -> tempfile::TempDir {
    corpus_of(&[vec![vec![5, 6], vec![7]], vec![vec![8]]])
}

fn corpus_of(documents: &[Vec<Vec<u32>>]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_corpus(dir.path(), 100, documents, 25);
    std::fs::write(dir.path().join("vocab.txt"), "the words").unwrap();
    rewrite_manifest(dir.path(), |manifest| manifest.tokenizer.file_hash = hash_hex(b"the words"));
    dir
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

fn options() -> LoaderOptions {
    LoaderOptions { sequence_length: 16, batch_size: 4, epochs: Some(2), ..LoaderOptions::default() }
}

fn read_all(dir: &Path) -> Vec<String> {
    let corpus = match Corpus::open(dir) {
        Ok(corpus) => Arc::new(corpus),
        Err(error) => return vec![error.to_string()],
    };
    let documents = (0..corpus.num_documents()).find_map(|d| corpus.document(d).err());
    let lines =
        |shard: &Shard| (0..shard.num_documents()).find_map(|document| shard.line_lengths(document).err());
    let lines = corpus.shards().find_map(|shard| lines(&shard));
    let counts = corpus.token_counts().err();
    let batches = |packing: &str, cut_at: &str| {
        let options = LoaderOptions { packing: named(packing), cut_at: named(cut_at), ..options() };
        match Loader::new(corpus.clone(), &options) {
            Ok(mut loader) => loader.num_rows().err().or_else(|| loader.find_map(Result::err)),
            Err(error) => Some(error),
        }
    };
    let batches = [("best-fit", "token"), ("best-fit", "line"), ("examples", "token")]
        .map(|(packing, cut_at)| batches(packing, cut_at));
    let all = [documents, counts, lines].into_iter().chain(batches);
    all.flatten().map(|error| error.to_string()).collect()
}

fn complaints(dir: &Path) -> Vec<String> {
    verify(dir).map_or_else(|error| vec![error.to_string()], |verified| verified.damaged)
}

/// The errors of reading and verifying: one line each, with a file name; none for a sound corpus.
fn all_errors(dir: &Path) -> Vec<String> {
    let (errors, complaints) = (read_all(dir), complaints(dir));
    for error in errors.iter().chain(&complaints) {
        assert!(!error.contains('\n') && !error.contains("unexpectedly"), "{error}");
        assert!(error.contains('/') || error.contains("no tokens"), "names no file: {error}");
        assert!(!complaints.is_empty() || error.contains("no tokens"), "{error}");
    }
    [errors, complaints].concat()
}

#[test]
fn every_flipped_bit_and_wrong_length_is_detected() {
    let dir = tiny_corpus();
    for path in files(dir.path()) {
        // Loading reads neither the vocabulary nor, with best-fit packing, the line lengths.
        let loaded = path.extension().is_some_and(|kind| kind == "tokens" || kind == "json");
        let sound = std::fs::read(&path).unwrap();
        // In the manifest, every 61st bit: a test of the manifest flips all bits.
        let step = if path.ends_with(MANIFEST) { 61 } else { 1 };
        for bit in (0..sound.len() * 8).step_by(step) {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &flipped).unwrap();
            assert!(!complaints(dir.path()).is_empty(), "{}: bit {bit}", path.display());
            assert!(!loaded || !read_all(dir.path()).is_empty(), "{}: bit {bit}", path.display());
        }
        let longer = [&sound[..], b"\0"].concat();
        for data in (0..sound.len()).map(|length| &sound[..length]).chain([&longer[..]]) {
            std::fs::write(&path, data).unwrap();
            assert!(!complaints(dir.path()).is_empty(), "{}: {} bytes", path.display(), data.len());
            let is_vocab = path.ends_with("vocab.txt");
            assert!(is_vocab || Corpus::open(dir.path()).is_err(), "{}: {}", path.display(), data.len());
        }
        std::fs::write(&path, &sound).unwrap();
    }
}

/// An interrupted copy: every file is sound, but one belongs to another corpus with the same counts.
#[test]
fn file_of_another_corpus_is_refused_by_all_readers() {
    let (dir, other) = (tiny_corpus(), corpus_of(&[vec![vec![5], vec![6, 9]], vec![vec![8]]]));
    let holdout = |dir: &Path, fingerprint: &str| {
        std::fs::create_dir(dir.join("holdout")).unwrap();
        files(dir).iter().filter(|path| path.is_file()).for_each(|path| {
            std::fs::copy(path, dir.join("holdout").join(path.file_name().unwrap())).unwrap();
        });
        for (dir, has_validation) in [(dir, true), (&dir.join("holdout"), false)] {
            rewrite_manifest(dir, |manifest| {
                (manifest.fingerprint, manifest.has_validation) = (fingerprint.into(), has_validation);
            });
        }
    };
    holdout(dir.path(), "one");
    holdout(other.path(), "two");
    std::fs::write(other.path().join("vocab.txt"), "more words").unwrap();
    rewrite_manifest(other.path(), |manifest| manifest.tokenizer.file_hash = hash_hex(b"more words"));
    for dir in [&dir, &other] {
        assert_eq!(all_errors(dir.path()), [""; 0]);
    }
    for (to, from) in [(&dir, &other), (&other, &dir)] {
        for (name, num_readers) in [
            ("shard-000000-000.tokens", 5),
            ("shard-000000-000.lines", 3),
            ("vocab.txt", 0),
            ("holdout/manifest.json", 0),
        ] {
            let (to, from) = (to.path().join(name), from.path().join(name));
            let original = std::fs::read(&to).unwrap();
            std::fs::copy(&from, &to).unwrap();
            let dir = to.ancestors().find(|dir| dir.join("holdout").is_dir()).unwrap();
            let errors = read_all(dir);
            assert_eq!(errors.len(), num_readers, "{name}: {errors:?}");
            let complaints = complaints(dir);
            for error in errors.iter().chain(&complaints) {
                assert!(error.starts_with(&format!("{}: not the file that", to.display())), "{error}");
                assert!(
                    error.ends_with("copy the corpus again, and check it with `electra-fast verify`"),
                    "{error}"
                );
            }
            assert_eq!(complaints.len(), 1, "{complaints:?}");
            assert_eq!(read_all(&dir.join("holdout")).is_empty(), !name.starts_with("holdout"), "{name}");
            std::fs::write(&to, original).unwrap();
        }
    }
}

fn odd_number() -> impl Strategy<Value = u64> {
    let corner = prop::sample::select(vec![0, 1, 2, 7, 8, 1 << 31, u64::from(u32::MAX), 1 << 62, u64::MAX]);
    prop_oneof![corner, any::<u64>(), 0_u64..400]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn forgeries_with_valid_checksums_are_rejected_or_consistent(
        shard in 0_usize..2, lines: bool,
        words in prop::collection::vec((1_usize..HEADER_BYTES / 8, odd_number()), 0..3),
        others in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        number in prop::option::weighted(0.2, (0_usize..64, odd_number())),
    ) {
        let dir = small_corpus();
        forge(dir.path(), shard, lines, |bytes| {
            for (word, value) in words {
                bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_le_bytes());
            }
            for (at, value) in others {
                bytes[HEADER_BYTES + at.index(bytes.len() - HEADER_BYTES)] = value;
            }
        });
        if let Some((which, value)) = number {
            let path = dir.path().join(MANIFEST);
            let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            let mut numbers = Vec::new();
            numbers_of(&mut json, &mut numbers);
            let count = numbers.len();
            *numbers[which % count] = value.into();
            let sealed = serde_json::from_value(json.clone()).map(|manifest: Manifest| manifest.seal().canonical());
            std::fs::write(&path, sealed.unwrap_or_else(|_| json.to_string())).unwrap();
        }
        all_errors(dir.path());
    }
}

fn numbers_of<'a>(value: &'a mut Value, numbers: &mut Vec<&'a mut Value>) {
    match value {
        Value::Number(_) => numbers.push(value),
        Value::Array(items) => items.iter_mut().for_each(|item| numbers_of(item, numbers)),
        Value::Object(fields) => fields.values_mut().for_each(|field| numbers_of(field, numbers)),
        _ => {}
    }
}

#[test]
fn damage_with_valid_checksums_is_detected() {
    for (lines, at, value, message) in [
        (false, 28, 100, "token 14: id 100 is not in the vocabulary of 100"),
        (true, 0, 1, "document 0: its line lengths do not add up to its number of tokens"),
    ] {
        let dir = small_corpus();
        assert_eq!(all_errors(dir.path()), [""; 0]);
        forge(dir.path(), 0, lines, |bytes| bytes[HEADER_BYTES + at] = value);
        let (read, complaints_found) = (read_all(dir.path()), complaints(dir.path()));
        assert!(
            complaints_found.len() == 1 && read.len() == if lines { 2 } else { 5 },
            "{read:?} {complaints_found:?}"
        );
        assert!(
            read.iter().chain(&complaints_found).all(|error| error.contains(message)),
            "{read:?} {complaints_found:?}"
        );
        let server = TestServer::start(dir.path());
        let remote = read_all(Path::new(&server.url));
        let is_named = |error: &String| error.starts_with(&server.url) && error.contains(message);
        assert!(remote.len() == read.len() && remote.iter().all(is_named), "{remote:?}");
    }
}

#[test]
fn file_names_cannot_lead_out_of_the_folder() {
    for name in ["../vocab.txt", "/etc/hostname", "a/b", "..", ""] {
        let dir = small_corpus();
        rewrite_manifest(dir.path(), |manifest| manifest.tokenizer.file = name.to_owned());
        assert!(complaints(dir.path())[0].contains("malformed tokenizer entry"), "{name}");
        let dir = small_corpus();
        rewrite_manifest(dir.path(), |manifest| manifest.shards[1].lines.file = name.to_owned());
        assert!(complaints(dir.path())[0].contains("of shard 1 (from 0) are inconsistent"), "{name}");
    }
}
