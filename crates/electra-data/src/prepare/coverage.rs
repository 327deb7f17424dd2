//! Coverage of text by a vocabulary: unknown tokens and words, in a sample of the input or in a corpus.
//!
//! With a vocabulary of another language, `prepare` would write a corpus of [UNK] only. So coverage is
//! measured on a sample of the input before, and on the corpus afterwards. `inspect` shows the same figures.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use ahash::AHashMap;
use rayon::prelude::*;

use super::input_group::line_cut;
use super::options::refuse_vocabulary;
use crate::error::{Error, Result};
use crate::format::Corpus;
use crate::input::{Compression, Cut, InputFile, InputFormat, Inputs, ReadOptions, character_boundary};
use crate::input::{read_beginning, read_file};
use crate::store::Cancel;
use crate::threads::on_all_cores;
use crate::tokenizer::Tokenizer;

/// Size of the sample of the input, and the number of sampled files.
const SAMPLE_BYTES: usize = 1 << 20;
const SAMPLE_FILES: usize = 16;
/// Part of the sample that is searched for unknown words; smaller, because the `tokenizers` crate is slow at it.
const SEARCHED_BYTES: usize = 1 << 18;
const MAX_LISTED: usize = 1_000;
/// Number of a corpus's tokens that are counted, in stretches spread evenly over it.
const COUNTED_TOKENS: u64 = 1 << 24;
const STRETCH: u64 = 1 << 15;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub tokens: u64,
    pub unknown: u64,
    /// Number of tokens that begin a word; `None` if the vocabulary does not mark words.
    pub words: Option<u64>,
    pub unknown_words: Vec<(String, u64)>,
}

/// A sample of files: the beginnings of at most 16 files, 1 MiB of text in total. `run`: the tokenizer and the
/// output folder of the run that will read the files; neither may be an input.
///
/// Errors in a file end its part of the sample; the run that reads everything reports them.
pub fn text_sample(
    paths: &[PathBuf],
    run: Option<(&Tokenizer, &Path)>,
    reading: &ReadOptions,
) -> Result<Vec<String>> {
    let inputs = Inputs::expand(paths, run.map(|(_, out)| out), reading)?;
    let mut cut = Cut::Blanks;
    if let Some((tokenizer, _)) = run {
        refuse_vocabulary(&inputs, tokenizer.path())?;
        cut = line_cut(tokenizer);
    } // A pipe can be read only once, and a compressed Parquet file must be decompressed as a whole.
    let is_sampled = |file: &&InputFile| {
        file.regular && (file.format != InputFormat::Parquet || file.compression == Compression::None)
    };
    let files: Vec<_> = inputs.files.iter().filter(is_sampled).collect();
    let (count, bytes) = (files.len().min(SAMPLE_FILES), AtomicU64::new(0));
    let read = |number: usize| {
        let file = files[number * files.len() / count];
        read_beginning(SAMPLE_BYTES / count, cut, |to| read_file(file, None, reading, &bytes, to))
    };
    Ok((0..count).map(read).collect())
}

impl Coverage {
    pub fn of_texts(texts: &[impl AsRef<str>], tokenizer: &Tokenizer) -> Result<Self> {
        let lines = texts.iter().flat_map(|text| text.as_ref().lines());
        let (counter, mut encoder) = (Counter::new(tokenizer), tokenizer.encoder());
        let (mut coverage, mut ids, mut spotted) = (counter.nothing(), Vec::new(), Vec::new());
        for line in lines {
            ids.clear();
            encoder.encode_into(line, &mut ids)?;
            let counts = counter.count(ids.iter().map(|&id| id as usize));
            if counts.unknown > 0 {
                spotted.push(line);
            }
            coverage.add(&counts);
        }
        coverage.unknown_words = unknown_words(&spotted, tokenizer)?;
        Ok(coverage)
    }

    /// Coverage of a corpus: of all its tokens, or of 2^24 tokens spread evenly over it.
    pub fn of_corpus(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<Self> {
        let starts = |shard| (0..corpus.shard_size(shard).1).step_by(STRETCH as usize);
        let stretches = (0..corpus.num_shards()).flat_map(|shard| starts(shard).map(move |at| (shard, at)));
        let stretches: Vec<(usize, u64)> = stretches.collect();
        let count = stretches.len().min((COUNTED_TOKENS / STRETCH) as usize);
        let (counter, cancel) = (Counter::new(tokenizer), Cancel::default());
        let count_stretch = |number: usize| {
            if cancel.is_raised() {
                return Err(Error::Interrupted);
            }
            let (shard, start) = stretches[number * stretches.len() / count];
            let shard = corpus.shard(shard);
            let mut ids = vec![0; STRETCH.min(shard.num_tokens() - start) as usize];
            cancel.carry(|| shard.copy_tokens(start, &mut ids))?;
            Ok(counter.count(ids.iter().map(|&id| id as usize)))
        };
        let add = |mut sum: Self, counts| {
            sum.add(&counts);
            Ok(sum)
        };
        on_all_cores(|| (0..count).into_par_iter().map(count_stretch).try_reduce(|| counter.nothing(), add))?
    }

    fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.unknown += other.unknown;
        self.words = self.words.zip(other.words).map(|(a, b)| a + b);
    }
}

struct Counter {
    unknown: usize,
    /// For each id, 1 if it continues a word; `None` if the vocabulary does not mark words.
    continues: Option<Vec<u8>>,
}

impl Counter {
    fn new(tokenizer: &Tokenizer) -> Self {
        let continues = tokenizer.word_starts();
        let continues = continues.map(|starts| starts.into_iter().map(|begins| u8::from(!begins)).collect());
        Self { unknown: tokenizer.special_tokens().unk as usize, continues }
    }

    fn nothing(&self) -> Coverage {
        Coverage { words: self.continues.as_ref().map(|_| 0), ..Coverage::default() }
    }

    fn count(&self, ids: impl ExactSizeIterator<Item = usize> + Clone) -> Coverage {
        let tokens = ids.len() as u64;
        let unknown = ids.clone().filter(|&id| id == self.unknown).count() as u64;
        let words = self.continues.as_ref().map(|continues| {
            // An id outside the vocabulary is damage, which `verify` reports.
            let is_inner = |id: usize| continues.get(id).copied().unwrap_or(0);
            tokens - ids.map(|id| u64::from(is_inner(id))).sum::<u64>()
        });
        Coverage { tokens, unknown, words, unknown_words: Vec::new() }
    }
}

fn unknown_words(lines: &[&str], tokenizer: &Tokenizer) -> Result<Vec<(String, u64)>> {
    let total: usize = lines.iter().map(|line| line.len()).sum();
    let mut counts: AHashMap<String, u64> = AHashMap::new();
    for line in lines.iter().step_by(total.div_ceil(SEARCHED_BYTES).max(1)) {
        let line = &line[..character_boundary(line, SEARCHED_BYTES)];
        for word in tokenizer.unknown_words(line)? {
            *counts.entry(word).or_default() += 1;
        }
    }
    let mut words: Vec<(String, u64)> = counts.into_iter().collect();
    words.sort_unstable_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    words.truncate(MAX_LISTED);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::tests::tokenizer;

    #[test]
    fn large_corpus_is_sampled_evenly() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer(dir.path(), "##a b");
        // The second half of 2^25 tokens is unknown, and half of the tokens are counted.
        let line = |id| vec![vec![id; 1 << 16]];
        let documents: Vec<_> = (0..512).map(|n| line(if n < 256 { 5 } else { 1 })).collect();
        crate::format::testing::write_corpus(dir.path(), 7, &documents, 1 << 22);
        let corpus = Corpus::open(dir.path()).unwrap();
        let coverage = Coverage::of_corpus(&corpus, &tokenizer).unwrap();
        assert_eq!((coverage.tokens, coverage.unknown, coverage.words), (1 << 24, 1 << 23, Some(1 << 23)));
    }
}
