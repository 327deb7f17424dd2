//! Counting the words of a text, or of a sample of it, in bounded memory: the first half of `vocab`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ahash::AHashMap;
use compact_str::CompactString;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use super::input_group::Progress;
use super::run::Source;
use crate::error::{Error, Result};
use crate::input::{
    Batch, Batcher, Cut, Draw, Drawn, Inputs, Intake, Mark, Reading, SkipLog, SkippedRecord, read_file, run,
};
use crate::tokenizer::{Characters, Meaning, Pieces};

/// BERT's tokenizer makes longer words unknown, so they teach nothing.
const LONGEST_WORD: usize = 100;
/// Distinct words held in memory; beyond it, words seen once are forgotten.
const MOST_WORDS: usize = 1 << 24;

type Read<'a> = Box<dyn FnOnce(&mut Batcher) -> Result<()> + Send + 'a>;
pub(super) type Counts = AHashMap<CompactString, u64>;

/// What to count words in.
pub(super) struct Counting<'a> {
    pub reading: &'a Reading,
    pub normalizer: BertNormalizer,
    pub threads: usize,
    /// Bytes of text that are counted at most.
    pub sample: u64,
    pub seed: u64,
}

/// What was counted.
pub(super) struct Counted {
    pub words: Counts,
    pub drawn: Drawn,
    pub skipped: Vec<SkippedRecord>,
}

/// What one batch holds: words by the level of their text.
struct BatchCounts {
    levels: Vec<Counts>,
    drawn: Drawn,
    skipped: Vec<SkippedRecord>,
}

impl Counting<'_> {
    /// Counts the words of the drawn part of a source; the result does not depend on the threads.
    pub fn count(&self, source: Source, progress: &mut dyn FnMut(Progress) -> bool) -> Result<Counted> {
        let (characters, no_pieces) = (Characters::new(self.normalizer), Pieces::none());
        let ends_word = |c| matches!(characters.meaning(c, &no_pieces), Meaning::Space | Meaning::Alone(_));
        let intake = Intake {
            cut: Cut::Words(&ends_word),
            skips: SkipLog::new(self.reading.skip_bad_records, 0),
            draw: Draw::new(self.seed, self.sample),
        };
        let done = AtomicU64::new(0);
        let mut total = 0;
        let read: Read = match source {
            Source::Files(paths) => {
                let inputs = Inputs::expand(&paths, None, self.reading.format)?;
                total = inputs.files.iter().map(|file| file.size).sum();
                let (done, reading) = (&done, self.reading);
                Box::new(move |to| inputs.files.iter().try_for_each(|f| read_file(f, reading, done, to)))
            }
            Source::Documents(mut documents) => {
                let done = &done;
                Box::new(move |to| {
                    documents.try_for_each(|text| {
                        let text = text?;
                        done.fetch_add(text.len() as u64, Ordering::Relaxed);
                        to.push_document(&text)
                    })
                })
            }
        };
        let read = |to: &mut Batcher| {
            read(to)?;
            to.end_unit()
        };
        let mut levels = Levels::default();
        let mut reported: Option<Instant> = None;
        let consume = |found: Option<BatchCounts>| {
            found.into_iter().for_each(|found| levels.add(found));
            if reported.is_none_or(|moment| moment.elapsed() > Duration::from_millis(100)) {
                reported = Some(Instant::now());
                let bytes_done = done.load(Ordering::Relaxed);
                if !progress(Progress { bytes_done, bytes_total: total, ..Progress::default() }) {
                    return Err(Error::Interrupted);
                }
            }
            Ok(())
        };
        run(self.threads, intake, read, || |batch| words_of(&batch, &self.normalizer), consume)?;
        Ok(levels.counted())
    }
}

/// The words so far. Levels are counted apart, because any of them may yet fall out of the sample.
#[derive(Default)]
struct Levels {
    levels: Vec<Counts>,
    drawn: Drawn,
    skipped: Vec<SkippedRecord>,
}

impl Levels {
    fn add(&mut self, batch: BatchCounts) {
        self.drawn = batch.drawn;
        self.skipped.extend(batch.skipped);
        if self.levels.len() < batch.levels.len() {
            self.levels.resize_with(batch.levels.len(), Counts::new);
        }
        for (level, words) in batch.levels.into_iter().enumerate() {
            merge(&mut self.levels[level], words);
        }
        self.drop_lowest();
        if self.levels.iter().map(|words| words.len()).sum::<usize>() > MOST_WORDS {
            self.levels.iter_mut().for_each(|words| words.retain(|_, count| *count > 1));
        }
    }

    fn drop_lowest(&mut self) {
        let lowest = usize::from(self.drawn.lowest_level).min(self.levels.len());
        self.levels[..lowest].iter_mut().for_each(|words| *words = Counts::new());
    }

    fn counted(mut self) -> Counted {
        let mut words = Counts::new();
        for level in self.levels.drain(..) {
            if words.is_empty() { words = level } else { merge(&mut words, level) }
        }
        Counted { words, drawn: self.drawn, skipped: self.skipped }
    }
}

fn merge(into: &mut Counts, words: Counts) {
    for (word, count) in words {
        *into.entry(word).or_default() += count;
    }
}

fn words_of(batch: &Batch, normalizer: &BertNormalizer) -> Result<BatchCounts> {
    let failed = |error: tokenizers::Error| Error::Input(format!("cannot split text into words: {error}"));
    let mut found = BatchCounts { levels: Vec::new(), drawn: batch.drawn, skipped: Vec::new() };
    for piece in batch.pieces() {
        if let Mark::Unit(skipped) = piece.mark {
            found.skipped.extend_from_slice(skipped);
        }
        if piece.text.is_empty() {
            continue;
        }
        let level = usize::from(piece.level);
        if found.levels.len() <= level {
            found.levels.resize_with(level + 1, Counts::new);
        }
        let mut normalized = NormalizedString::from(piece.text);
        normalizer.normalize(&mut normalized).map_err(failed)?;
        let mut words = PreTokenizedString::from(normalized);
        BertPreTokenizer.pre_tokenize(&mut words).map_err(failed)?;
        for (word, _, _) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            if word.chars().nth(LONGEST_WORD).is_none() {
                *found.levels[level].entry(CompactString::from(word)).or_default() += 1;
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(documents: &[String], sample: u64, threads: usize) -> Counted {
        let normalizer = BertNormalizer::new(true, true, None, true);
        let reading = Reading::default();
        let counting = Counting { reading: &reading, normalizer, threads, sample, seed: 5 };
        let documents = documents.iter().cloned().map(Ok);
        counting.count(Source::Documents(Box::new(documents)), &mut |_| true).unwrap()
    }

    #[test]
    fn text_without_blanks_is_counted_to_the_last_word() {
        let (sentence, repeats) = ("日本人です、Été。", 40_000);
        let long = "x".repeat(1 << 20);
        let text = format!("{}{long}。{long}日{long}", sentence.repeat(repeats));
        let found = count(&[text], u64::MAX, 2).words;
        let repeats = repeats as u64;
        let expected =
            [("日", repeats + 1), ("本", repeats), ("人", repeats), ("てす", repeats), ("、", repeats)];
        for (word, count) in expected {
            assert_eq!(found.get(word), Some(&count), "{word}");
        }
        assert_eq!((found["ete"], found["。"], found.len()), (repeats, repeats + 1, 7));
    }

    #[test]
    fn a_sample_does_not_depend_on_the_threads() {
        let documents: Vec<String> =
            (0..20_000).map(|n| format!("word{} every and word{}", n % 977, n % 31)).collect();
        let first = count(&documents, 100_000, 1);
        assert!((50_000..=100_000).contains(&first.drawn.bytes), "{:?}", first.drawn);
        let sampled = first.words["every"];
        assert!((2_000..6_000).contains(&sampled), "{sampled}");
        for threads in [2, 5] {
            let again = count(&documents, 100_000, threads);
            assert_eq!((again.words, again.drawn), (first.words.clone(), first.drawn));
        }
        assert_eq!(count(&documents, u64::MAX, 3).words["every"], 20_000);
    }
}
