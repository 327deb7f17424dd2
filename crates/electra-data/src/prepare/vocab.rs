//! Training a WordPiece vocabulary, the same one whenever the text is the same.
//!
//! Words are counted in `word_counts`; the merges are the `tokenizers` crate's. Its trainer numbers the
//! continuing letters in the order of a hash map, so alphabet and counts are handed to it sorted out.

use std::collections::BTreeSet;
use std::path::Path;

use ahash::{AHashMap, AHashSet};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::BertNormalizer;

use super::input_group::Progress;
use super::run::Source;
use super::vocab_files::VocabFiles;
use super::word_counts::{Counted, Counting, Counts};
use crate::error::{Error, Result};
use crate::input::{Reading, SkippedRecord, default_threads};
use crate::threads::on_all_cores;

const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
/// Letters beyond these are left to [UNK].
const LARGEST_ALPHABET: usize = 1_000;
const SMALLEST: usize = 32;

/// How to train a vocabulary.
#[derive(Clone, Debug)]
pub struct VocabOptions {
    /// How text is found in files.
    pub reading: Reading,
    /// Entries, the five special tokens included.
    pub size: usize,
    /// Whether text is lowercased.
    pub lowercase: bool,
    /// Whether accents are stripped; as `lowercase` if not given.
    pub strip_accents: Option<bool>,
    /// A pair of pieces must occur this often to become one.
    pub min_frequency: u64,
    /// Threads that count words; all cores if not given.
    pub threads: Option<usize>,
    /// Bytes of text to count words in at most, drawn from all of it; `None` for all.
    pub sample: Option<u64>,
    /// Decides what is drawn.
    pub seed: u64,
}

/// What a vocabulary was made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VocabReport {
    /// Entries of the vocabulary; 0 as long as it is not trained.
    pub num_entries: usize,
    /// Distinct words that were counted.
    pub num_words: usize,
    /// Bytes of text that they were counted in …
    pub counted_bytes: u64,
    /// … out of so many.
    pub text_bytes: u64,
    /// Records that could not be read and were left out.
    pub skipped: Vec<SkippedRecord>,
}

/// Trains a vocabulary and writes it as `vocab.txt`, with a `tokenizer.json` beside it that tells its
/// case, or as a `tokenizer.json` alone (by the extension of `out`).
///
/// `progress` works as for [`crate::prepare::prepare`], while the text is read; `counted` is
/// told when all words are counted and the merges begin, and stops the run with `false`.
pub fn train_vocab(
    source: Source,
    out: &Path,
    options: &VocabOptions,
    progress: &mut dyn FnMut(Progress) -> bool,
    counted: &mut dyn FnMut(&VocabReport) -> bool,
) -> Result<VocabReport> {
    if options.size < SMALLEST {
        let size = options.size;
        return Err(Error::Input(format!(
            "a vocabulary of {size} entries is too small; at least {SMALLEST}"
        )));
    }
    let files = VocabFiles::claim(out, &source, options.reading.format)?;
    let counting = Counting {
        reading: &options.reading,
        normalizer: BertNormalizer::new(true, true, options.strip_accents, options.lowercase),
        threads: options.threads.unwrap_or_else(default_threads),
        sample: options.sample.unwrap_or(u64::MAX),
        seed: options.seed,
    };
    let Counted { words: counts, drawn, skipped } = counting.count(source, progress)?;
    let (num_words, counted_bytes, text_bytes) = (counts.len(), drawn.bytes, drawn.of_bytes);
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

/// Letters to spell with: the most frequent ones, sorted.
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
    let alphabet = alphabet_of(&counts, LARGEST_ALPHABET.min((options.size - SPECIAL.len()) / 3));
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
    let entries: Vec<String> = entries.into_iter().map(|(_, entry)| entry).collect();
    let distinct: AHashSet<&String> = entries.iter().collect();
    debug_assert_eq!(distinct.len(), entries.len());
    Ok(entries)
}

/// Scales counts down where a pair could occur more often than the trainer's i32 can count.
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
            reading: Reading::default(),
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
        let documents = Source::Documents(Box::new((0..9).map(|_| Ok(text()))));
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
        let empty = || Source::Documents(Box::new(std::iter::once(Ok(" \n".to_owned()))));
        let error = train_vocab(empty(), out, &options(100), &mut |_| true, &mut |_| true).unwrap_err();
        assert!(error.to_string().contains("no words"));
        assert!(train_vocab(empty(), out, &options(10), &mut |_| true, &mut |_| true).is_err());
    }
}
