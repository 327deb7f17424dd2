//! Counting the words of a text, or of a sample, in bounded memory: the first half of `vocab`.

use std::sync::atomic::{AtomicU64, Ordering};

use ahash::AHashMap;
use compact_str::CompactString;
use tokenizers::normalizers::BertNormalizer;

use super::options::VocabOptions;
use super::progress::{Progress, ProgressReporter, Report};
use crate::error::Result;
use crate::input::{
    Batcher, Cut, Inputs, Intake, Mark, PassedOver, Sampled, Sampler, SkipLog, SkippedRecord, TextBatch,
    TextSource, default_threads, read_file, with_workers,
};
use crate::store::Cancel;
use crate::tokenizer::{Characters, Meaning, VocabTrie};

/// BERT's tokenizer maps longer words to [UNK], so they are not counted.
const MAX_WORD_CHARS: usize = 100;
/// Maximum number of distinct words in memory; then the rarest are dropped.
const MAX_WORDS: usize = 1 << 24;

type Read<'a> = Box<dyn FnOnce(&mut Batcher) -> Result<()> + Send + 'a>;
pub(super) type Counts = AHashMap<CompactString, u64>;

pub(super) struct WordCounts {
    pub words: Counts,
    pub sampled: Sampled,
    pub skipped: Vec<SkippedRecord>,
    pub passed_over: PassedOver,
}

impl WordCounts {
    /// Counts the words in a sample of a source; the result does not depend on the number of threads.
    pub fn of(source: TextSource, options: &VocabOptions, progress: &mut Report) -> Result<Self> {
        let normalizer = BertNormalizer::new(true, true, Some(options.strip_accents), options.lowercase);
        let (characters, no_entries) = (Characters::new(normalizer), VocabTrie::empty());
        let ends_word = |c| matches!(characters.meaning(c, &no_entries), Meaning::Space | Meaning::Alone(_));
        let intake = Intake {
            cut: Cut::Words(&ends_word),
            skips: SkipLog::new(options.reading.skip_bad_rows, 0),
            sampler: Sampler::new(options.seed, options.sample.unwrap_or(u64::MAX)),
            watch: None,
        };
        let done = AtomicU64::new(0);
        let (mut total, mut cancel, mut passed_over) = (0, Cancel::default(), PassedOver::default());
        let (counted, reading) = (&done, &options.reading);
        let read: Read = match source {
            TextSource::Files(paths) => {
                let inputs = Inputs::expand(&paths, None, reading)?;
                cancel = inputs.cancel.clone();
                passed_over = inputs.passed_over.clone();
                total = inputs.files.iter().map(|file| file.size).sum();
                Box::new(move |to| {
                    inputs.files.iter().try_for_each(|f| read_file(f, None, reading, counted, to))
                })
            }
            TextSource::Documents(mut documents) => Box::new(move |to| {
                documents.try_for_each(|text| {
                    let text = text?;
                    counted.fetch_add(text.len() as u64, Ordering::Relaxed);
                    to.push_document(&text)
                })
            }),
        };
        let read = |to: &mut Batcher| {
            read(to)?;
            to.end_input_group()
        };
        let mut levels = Levels::default();
        let mut reporter = ProgressReporter::new(progress);
        let consume = |counted: Option<Levels>| {
            counted.into_iter().for_each(|counted| levels.add(counted));
            let reported = reporter.report_if_due(|| {
                let bytes_done = done.load(Ordering::Relaxed);
                Progress { bytes_done, bytes_total: total, ..Progress::default() }
            });
            reported.inspect_err(|_| cancel.raise())
        };
        let worker = || |batch| words_of(&batch, &characters);
        with_workers(options.threads.unwrap_or_else(default_threads), 1, worker, |workers| {
            workers.run_pipeline(intake, read, consume)
        })?;
        Ok(WordCounts { passed_over, ..levels.counted() })
    }
}

/// The words so far, or of a batch, by the sampling level of their text: levels may still be dropped from the sample.
#[derive(Default)]
struct Levels {
    levels: Vec<Counts>,
    sampled: Sampled,
    skipped: Vec<SkippedRecord>,
}

impl Levels {
    fn add(&mut self, batch: Levels) {
        self.sampled = batch.sampled;
        self.skipped.extend(batch.skipped);
        if self.levels.len() < batch.levels.len() {
            self.levels.resize_with(batch.levels.len(), Counts::new);
        }
        for (level, words) in batch.levels.into_iter().enumerate() {
            merge(&mut self.levels[level], words);
        }
        self.drop_lowest();
        self.drop_rare(MAX_WORDS);
    }

    /// With more words than `max`, drops the rarest until at most half of `max` are left, so that the next call is far
    /// away. Returns the number of scans over all words.
    fn drop_rare(&mut self, max: usize) -> u32 {
        let mut scans = 0;
        if self.len() > max {
            while self.len() > max / 2 {
                self.levels.iter_mut().for_each(|words| words.retain(|_, count| *count > 1 << scans));
                scans += 1;
            }
        }
        scans
    }

    fn len(&self) -> usize {
        self.levels.iter().map(|words| words.len()).sum()
    }

    fn drop_lowest(&mut self) {
        let lowest = usize::from(self.sampled.lowest_level).min(self.levels.len());
        self.levels[..lowest].iter_mut().for_each(|words| *words = Counts::new());
    }

    fn counted(mut self) -> WordCounts {
        let mut words = Counts::new();
        for level in self.levels.drain(..) {
            if words.is_empty() { words = level } else { merge(&mut words, level) }
        }
        WordCounts { words, sampled: self.sampled, skipped: self.skipped, passed_over: PassedOver::default() }
    }
}

fn merge(into: &mut Counts, words: Counts) {
    for (word, count) in words {
        *into.entry(word).or_default() += count;
    }
}

fn words_of(batch: &TextBatch, characters: &Characters) -> Result<Levels> {
    let mut levels = Levels { sampled: batch.sampled, ..Levels::default() };
    for marked in batch.texts() {
        if let Mark::InputGroup(end) = marked.mark {
            levels.skipped.extend_from_slice(&end.skipped);
        }
        if marked.text.is_empty() {
            continue;
        }
        let level = usize::from(marked.level);
        if levels.levels.len() <= level {
            levels.levels.resize_with(level + 1, Counts::new);
        }
        characters.words(marked.text, |word| {
            if word.chars().nth(MAX_WORD_CHARS).is_none() {
                *levels.levels[level].entry(CompactString::from(word)).or_default() += 1;
            }
        })?;
    }
    Ok(levels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(documents: &[String], sample: Option<u64>, seed: u64, threads: usize) -> WordCounts {
        let options =
            VocabOptions { lowercase: true, strip_accents: true, sample, seed, ..Default::default() };
        let source = TextSource::Documents(Box::new(documents.iter().cloned().map(Ok)));
        WordCounts::of(source, &VocabOptions { threads: Some(threads), ..options }, &mut |_| true).unwrap()
    }

    #[test]
    fn text_without_spaces_is_counted_completely() {
        let long = "x".repeat(1 << 20);
        let text = format!("{}{long}。{long}日{long}", "日本人です、Été。".repeat(40_000));
        let words = count(&[text], None, 5, 2).words;
        for (word, more) in [("日", 1), ("本", 0), ("人", 0), ("てす", 0), ("、", 0), ("ete", 0), ("。", 1)]
        {
            assert_eq!(words.get(word), Some(&(40_000 + more)), "{word}");
        }
        assert_eq!(words.len(), 7);
    }

    #[test]
    fn sample_depends_on_seed_not_on_threads() {
        let documents: Vec<String> =
            (0..20_000).map(|n| format!("word{} every and word{}", n % 977, n % 31)).collect();
        let first = count(&documents, Some(100_000), 5, 1);
        assert!((50_000..=100_000).contains(&first.sampled.bytes), "{:?}", first.sampled);
        let sampled = first.words["every"];
        assert!((2_000..6_000).contains(&sampled), "{sampled}");
        for threads in [2, 5] {
            let again = count(&documents, Some(100_000), 5, threads);
            assert_eq!((again.words, again.sampled), (first.words.clone(), first.sampled));
        }
        assert_ne!(count(&documents, Some(100_000), 6, 1).words, first.words);
        assert_eq!(count(&documents, None, 5, 3).words["every"], 20_000);
    }

    #[test]
    fn many_words_need_bounded_memory_and_few_scans() {
        let (mut levels, mut scans) = (Levels { levels: vec![Counts::new()], ..Levels::default() }, 0);
        for batch in 0..200 {
            let rare = (0..50).map(|word| (CompactString::from(format!("{batch} {word}")), 2));
            merge(&mut levels.levels[0], rare.chain([("frequent".into(), 100)]).collect());
            scans += levels.drop_rare(1_000);
            assert!(levels.len() <= 1_000);
        }
        assert_eq!(levels.levels[0]["frequent"], 20_000);
        assert!(scans <= 2 * 200 * 50 / 500, "{scans}");
    }
}
