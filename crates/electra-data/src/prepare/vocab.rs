//! Training a WordPiece vocabulary, deterministically.
//!
//! `word_counts` counts words; the `tokenizers` crate learns the merges. Its trainer would number continuing
//! letters in the order of a hash map, so the letters are passed as entries in sorted order.

use std::collections::BTreeSet;
use std::path::Path;

use ahash::AHashMap;
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use super::options::VocabOptions;
use super::progress::Report;
use super::vocab_files::VocabFiles;
use super::word_counts::{Counts, WordCounts};
use crate::error::{Error, Result};
use crate::input::{PassedOver, SkippedRecord, TextSource};
use crate::threads::on_all_cores;

const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
const MIN_SIZE: usize = 32;
const MAX_LISTED: usize = 10;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VocabReport {
    /// Entries of the vocabulary; 0 before it is trained.
    pub num_entries: usize,
    pub num_words: usize,
    pub alphabet: Alphabet,
    /// Bytes of text in the sample …
    pub counted_bytes: u64,
    /// … and in the whole input.
    pub text_bytes: u64,
    pub skipped: Vec<SkippedRecord>,
    pub passed_over: PassedOver,
}

/// The characters of a vocabulary, and the characters dropped as too rare.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Alphabet {
    letters: BTreeSet<char>,
    pub text_letters: u64,
    /// Number of dropped distinct characters, which turn words into [UNK] …
    pub num_dropped: usize,
    /// … their number of occurrences, …
    pub dropped_letters: u64,
    /// … the number of running words with one of them, and of all running words, …
    pub dropped_words: (u64, u64),
    /// … and the most frequent ones.
    pub most_dropped: String,
}

/// Trains a vocabulary. Writes a `vocab.txt` and a `tokenizer.json` with its case in the same folder, or only
/// a `tokenizer.json` if `out` has that extension.
///
/// `progress` works as in [`crate::prepare()`] while text is read. `counted` is called once, after all words
/// are counted and before the merges are learned, and stops the run by returning `false`.
pub fn train_vocab(
    source: TextSource,
    out: &Path,
    options: &VocabOptions,
    progress: &mut Report,
    counted: &mut dyn FnMut(&VocabReport) -> bool,
) -> Result<VocabReport> {
    let (size, coverage) = (options.size, options.character_coverage);
    if size < MIN_SIZE {
        let message = format!("size (--size) = {size}: must be at least {MIN_SIZE}");
        return Err(Error::Input(message));
    }
    if !(coverage > 0.0 && coverage <= 1.0) {
        return Err(Error::Input(format!(
            "character_coverage (--character-coverage) = {coverage}: must be above 0 and at most 1"
        )));
    }
    let files = VocabFiles::claim(out, &source, &options.reading)?;
    let WordCounts { words: mut counts, sampled, skipped, passed_over } =
        WordCounts::of(source, options, progress)?;
    let (num_words, counted_bytes, text_bytes) = (counts.len(), sampled.bytes, sampled.total_bytes);
    let alphabet = Alphabet::of(&mut counts, coverage);
    let report =
        VocabReport { num_entries: 0, num_words, alphabet, counted_bytes, text_bytes, skipped, passed_over };
    if !counted(&report) {
        return Err(Error::Interrupted);
    }
    if counts.is_empty() {
        return Err(Error::Input("the input has no words to train a vocabulary on".to_owned()));
    }
    let entries = train(counts, &report.alphabet.letters, options)?;
    files.write(&entries, options.lowercase, options.strip_accents)?;
    Ok(VocabReport { num_entries: entries.len(), ..report })
}

impl Alphabet {
    /// The most frequent characters, including all of ASCII. Removes words with any other character from the counts.
    fn of(counts: &mut Counts, coverage: f64) -> Self {
        let mut occurrences: AHashMap<char, u64> = AHashMap::new();
        for (word, count) in &*counts {
            word.chars().for_each(|letter| *occurrences.entry(letter).or_default() += count);
        }
        let mut sorted: Vec<(char, u64)> = occurrences.into_iter().collect();
        sorted
            .sort_unstable_by_key(|&(letter, count)| (!letter.is_ascii(), std::cmp::Reverse(count), letter));
        let text_letters = sorted.iter().map(|(_, count)| count).sum::<u64>();
        let wanted = (coverage * text_letters as f64).ceil() as u64;
        let mut covered = 0;
        let is_enough = |&(letter, count): &(char, u64)| {
            covered += count;
            !letter.is_ascii() && covered - count >= wanted
        };
        let num_frequent = sorted.iter().position(is_enough).unwrap_or(sorted.len());
        let dropped = sorted.split_off(num_frequent);
        let letters: BTreeSet<char> = sorted.into_iter().map(|(letter, _)| letter).collect();
        let words_before = counts.values().sum::<u64>();
        counts.retain(|word, _| word.chars().all(|letter| letters.contains(&letter)));
        Self {
            letters,
            text_letters,
            num_dropped: dropped.len(),
            dropped_letters: dropped.iter().map(|(_, count)| count).sum(),
            dropped_words: (words_before - counts.values().sum::<u64>(), words_before),
            most_dropped: dropped.iter().take(MAX_LISTED).map(|(letter, _)| letter).collect(),
        }
    }

    pub fn num_letters(&self) -> usize {
        self.letters.len()
    }
}

fn train(mut counts: Counts, letters: &BTreeSet<char>, options: &VocabOptions) -> Result<Vec<String>> {
    let inner: BTreeSet<char> = counts.keys().flat_map(|word| word.chars().skip(1)).collect();
    let (size, needed) = (options.size, SPECIAL.len() + letters.len() + inner.len());
    if needed > size {
        let (all, inner) = (letters.len(), inner.len());
        return Err(Error::Input(format!(
            "size (--size) = {size}: must be at least {needed} for the text's {all} characters, {inner} of which also \
             continue words (##), and the 5 special tokens; raise it, or lower --character-coverage"
        )));
    }
    let letters = letters.iter().map(char::to_string).chain(inner.iter().map(|c| format!("##{c}")));
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
