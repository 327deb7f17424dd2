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

/// A line with its beginning, which is empty until the line is repeated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub hash: u64,
    pub count: u64,
    pub text: Box<str>,
}

/// The most repeated lines.
#[derive(Debug, Default)]
pub(super) struct Frequent {
    lines: AHashMap<u64, Line>,
    /// A line has occurred at most so many times more than its count, which is 0 for a line that is not kept.
    error: u64,
}

impl Frequent {
    /// Counts an occurrence of a line.
    pub fn add(&mut self, hash: u64, text: &str) {
        let line = self.lines.entry(hash).or_default();
        line.count += 1;
        if line.count > 1 && line.text.is_empty() {
            let text = text.trim();
            (line.hash, line.text) = (hash, text[..character_boundary(text, TEXT_BYTES)].into());
        }
        self.reduce();
    }

    /// Adds the lines of an input group.
    pub fn merge(&mut self, lines: Vec<Line>, error: u64) {
        self.error += error;
        for line in lines {
            self.lines.entry(line.hash).or_insert(Line { count: 0, ..line.clone() }).count += line.count;
        }
        self.reduce();
    }

    fn reduce(&mut self) {
        if self.lines.len() > 2 * KEPT {
            let mut counts: Vec<u64> = self.lines.values().map(|line| line.count).collect();
            let (_, &mut median, _) = counts.select_nth_unstable(KEPT);
            self.lines.values_mut().for_each(|line| line.count = line.count.saturating_sub(median));
            self.lines.retain(|_, line| line.count > 0);
            self.error += median;
        }
    }

    /// The lines that are repeated, by hash, and how many times more they, and others, occur at most.
    pub fn repeated(&self) -> (Vec<Line>, u64) {
        let repeated = self.lines.values().filter(|line| !line.text.is_empty());
        let mut lines: Vec<Line> = repeated.cloned().collect();
        lines.sort_unstable_by_key(|line| line.hash);
        // Lines that have occurred once are not among them.
        (lines, self.error + 1)
    }
}
