//! Training a WordPiece vocabulary, deterministically.
//!
//! `word_counts` counts words; the `tokenizers` crate learns the merges. Its trainer would number continuing
//! letters in the order of a hash map, so it is given the letters as entries in sorted order.

use std::collections::BTreeSet;
use std::path::Path;

use ahash::AHashMap;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::BertNormalizer;

use super::progress::Progress;
use super::vocab_files::VocabFiles;
use super::word_counts::{Counts, WordCounter, WordCounts};
use crate::error::{Error, Result};
use crate::input::{ReadOptions, SkippedRecord, TextSource, default_threads};
use crate::threads::on_all_cores;

const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
/// Rarer letters become [UNK].
const MAX_ALPHABET: usize = 1_000;
const MIN_SIZE: usize = 32;

/// How to train a vocabulary.
#[derive(Clone, Debug)]
pub struct VocabOptions {
    /// How files are read.
    pub reading: ReadOptions,
    /// Number of entries, the five special tokens included; at least 32.
    pub size: usize,
    /// Whether text is lowercased.
    pub lowercase: bool,
    /// Whether accents are stripped; as `lowercase` if `None`.
    pub strip_accents: Option<bool>,
    /// A pair of entries must occur this often to be merged.
    pub min_frequency: u64,
    /// Number of threads that count words; `None` for one per core.
    pub threads: Option<usize>,
    /// Count words in a sample of at most this many bytes of text; `None` for all of it.
    pub sample: Option<u64>,
    /// Seed of the sample.
    pub seed: u64,
}

/// What a vocabulary was made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VocabReport {
    /// Entries of the vocabulary; 0 before it is trained.
    pub num_entries: usize,
    /// Distinct words that were counted.
    pub num_words: usize,
    /// Bytes of text in the sample …
    pub counted_bytes: u64,
    /// … and in all of the input.
    pub text_bytes: u64,
    /// Unreadable records that were skipped.
    pub skipped: Vec<SkippedRecord>,
}

/// Trains a vocabulary. Writes a `vocab.txt` and beside it a `tokenizer.json`, which stores its case, or only
/// a `tokenizer.json` if `out` has that extension.
///
/// `progress` works as for [`crate::prepare()`] while text is read. `counted` is called once, after all words
/// are counted and before the merges are learned, and stops the run by returning `false`.
pub fn train_vocab(
    source: TextSource,
    out: &Path,
    options: &VocabOptions,
    progress: &mut dyn FnMut(Progress) -> bool,
    counted: &mut dyn FnMut(&VocabReport) -> bool,
) -> Result<VocabReport> {
    if options.size < MIN_SIZE {
        let size = options.size;
        return Err(Error::Input(format!(
            "a vocabulary of {size} entries is too small; at least {MIN_SIZE}"
        )));
    }
    let files = VocabFiles::claim(out, &source, options.reading.format)?;
    let counter = WordCounter {
        reading: &options.reading,
        normalizer: BertNormalizer::new(true, true, options.strip_accents, options.lowercase),
        threads: options.threads.unwrap_or_else(default_threads),
        sample: options.sample.unwrap_or(u64::MAX),
        seed: options.seed,
    };
    let WordCounts { words: counts, sampled, skipped } = counter.count(source, progress)?;
    let (num_words, counted_bytes, text_bytes) = (counts.len(), sampled.bytes, sampled.total_bytes);
    let report = VocabReport { num_entries: 0, num_words, counted_bytes, text_bytes, skipped };
    if !counted(&report) {
        return Err(Error::Interrupted);
    }
    if counts.is_empty() {
        return Err(Error::Input("the input holds no words: nothing to train a vocabulary on".to_owned()));
    }
    let entries = train(counts, options)?;
    files.write(&entries, options.lowercase, options.strip_accents)?;
    Ok(VocabReport { num_entries: entries.len(), ..report })
}

/// The most frequent letters, sorted.
fn alphabet_of(counts: &Counts, limit: usize) -> BTreeSet<char> {
    let mut letters: AHashMap<char, u64> = AHashMap::new();
    for (word, count) in counts {
        for letter in word.chars() {
            *letters.entry(letter).or_default() += count;
        }
    }
    let mut letters: Vec<(char, u64)> = letters.into_iter().collect();
    letters.sort_unstable_by_key(|&(letter, count)| (std::cmp::Reverse(count), letter));
    letters.into_iter().take(limit).map(|(letter, _)| letter).collect()
}

fn train(mut counts: Counts, options: &VocabOptions) -> Result<Vec<String>> {
    let alphabet = alphabet_of(&counts, MAX_ALPHABET.min((options.size - SPECIAL.len()) / 3));
    counts.retain(|word, _| word.chars().all(|letter| alphabet.contains(&letter)));
    let inner: BTreeSet<char> = counts.keys().flat_map(|word| word.chars().skip(1)).collect();
    let letters = alphabet.iter().map(char::to_string).chain(inner.iter().map(|c| format!("##{c}")));
    let first: Vec<AddedToken> =
        SPECIAL.iter().map(|s| (*s).to_owned()).chain(letters).map(|s| AddedToken::from(s, true)).collect();
    limit_counts(&mut counts);
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(options.size)
        .min_frequency(options.min_frequency)
        .continuing_subword_prefix("##".to_owned())
        .special_tokens(first)
        .build();
    let mut model = BPE::default();
    on_all_cores(|| trainer.do_train(&counts, &mut model))?
        .map_err(|error| Error::Input(format!("the vocabulary cannot be trained: {error}")))?;
    let mut entries: Vec<(u32, String)> = model.get_vocab().into_iter().map(|(s, id)| (id, s)).collect();
    entries.sort_unstable();
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}

/// Scales counts down if the count of a pair could overflow the trainer's i32.
fn limit_counts(counts: &mut Counts) {
    let mut pairs: AHashMap<(char, char), u64> = AHashMap::new();
    for (word, count) in &*counts {
        for pair in word.chars().zip(word.chars().skip(1)) {
            *pairs.entry(pair).or_default() += count;
        }
    }
    let most = pairs.into_values().max().unwrap_or(0);
    let factor = most.div_ceil(1 << 30).max(1);
    if factor > 1 {
        counts.values_mut().for_each(|count| *count = count.div_ceil(factor));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(size: usize) -> VocabOptions {
        VocabOptions {
            reading: ReadOptions::default(),
            size,
            lowercase: true,
            strip_accents: None,
            min_frequency: 2,
            threads: None,
            sample: None,
            seed: 0,
        }
    }

    fn text() -> String {
        let words = ["Tokens", "tokenise", "ising", "shards", "sharding", "masked", "unmasked", "électra"];
        (0..4_000_usize).map(|i| words[(i * i + i / 7) % words.len()]).collect::<Vec<_>>().join(" ")
    }

    fn trained(size: usize) -> String {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("vocab.txt");
        let documents = TextSource::Documents(Box::new((0..9).map(|_| Ok(text()))));
        train_vocab(documents, &out, &options(size), &mut |_| true, &mut |_| true).unwrap();
        std::fs::read_to_string(out).unwrap()
    }

    #[test]
    fn the_same_text_gives_the_same_file() {
        let first = trained(120);
        assert!(first.starts_with("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nc"), "{first}");
        assert!(first.lines().any(|entry| entry == "masked"), "{first}");
        for _ in 0..5 {
            assert_eq!(trained(120), first);
        }
    }

    #[test]
    fn the_size_is_kept() {
        assert_eq!(trained(60).lines().count(), 60);
    }

    #[test]
    fn nothing_to_learn_is_an_error() {
        let out = Path::new("never.txt");
        let empty = || TextSource::Documents(Box::new(std::iter::once(Ok(" \n".to_owned()))));
        let error = train_vocab(empty(), out, &options(100), &mut |_| true, &mut |_| true).unwrap_err();
        assert!(error.to_string().contains("no words"));
        assert!(train_vocab(empty(), out, &options(10), &mut |_| true, &mut |_| true).is_err());
    }
}
