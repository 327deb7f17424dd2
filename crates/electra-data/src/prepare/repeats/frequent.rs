//! The most repeated lines with their text, in bounded memory (Anderson et al., "A High-Performance Algorithm for
//! Identifying Frequent Items in Data Streams", 2017): whenever there are too many lines, their median count is
//! subtracted from all counts, and lines without a count are forgotten. Such summaries can be added.

use ahash::AHashMap;
use serde::{Deserialize, Serialize};

use crate::input::character_boundary;

/// Lines that are kept at least, and half of those that are kept at most.
const KEPT: usize = 1 << 13;
/// Bytes of text that are kept of a line.
pub(super) const TEXT_BYTES: usize = 200;

/// A line that is repeated, with its beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub hash: u64,
    pub count: u64,
    pub text: Box<str>,
}

/// The most repeated lines.
#[derive(Debug, Default)]
pub(super) struct Frequent {
    counts: AHashMap<u64, u64>,
    /// Those of lines that have occurred again while they were counted.
    texts: AHashMap<u64, Box<str>>,
    /// A line has occurred at most so many times more than is counted.
    error: u64,
}

impl Frequent {
    /// Counts an occurrence of a line.
    pub fn add(&mut self, hash: u64, text: &str) {
        let count = self.counts.entry(hash).or_default();
        *count += 1;
        if *count > 1 {
            self.texts.entry(hash).or_insert_with(|| {
                let text = text.trim();
                text[..character_boundary(text, TEXT_BYTES)].into()
            });
        }
        self.reduce();
    }

    /// Adds the lines of an input group.
    pub fn merge(&mut self, lines: Vec<Line>, error: u64) {
        for Line { hash, count, text } in lines {
            *self.counts.entry(hash).or_default() += count;
            self.texts.entry(hash).or_insert(text);
        }
        self.error += error;
        self.reduce();
    }

    fn reduce(&mut self) {
        if self.counts.len() > 2 * KEPT {
            let mut counts: Vec<u64> = self.counts.values().copied().collect();
            let (_, &mut median, _) = counts.select_nth_unstable(KEPT);
            self.counts.retain(|_, count| {
                *count = count.saturating_sub(median);
                *count > 0
            });
            self.texts.retain(|hash, _| self.counts.contains_key(hash));
            self.error += median;
        }
    }

    /// The lines that are repeated, by hash, and how many times more they, and others, occur at most.
    pub fn repeated(&self) -> (Vec<Line>, u64) {
        let lines = self.texts.iter();
        let lines = lines.map(|(&hash, text)| Line { hash, count: self.counts[&hash], text: text.clone() });
        let mut lines: Vec<Line> = lines.collect();
        lines.sort_unstable_by_key(|line| line.hash);
        // Lines that have occurred once are not among them.
        (lines, self.error + 1)
    }
}
