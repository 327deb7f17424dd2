//! The most repeated lines with their text, in bounded memory (Anderson et al., "A High-Performance Algorithm for
//! Identifying Frequent Items in Data Streams", 2017): whenever there are too many lines, their median count is
//! subtracted from all counts, and lines with count zero are dropped. Such summaries can be added.

use ahash::AHashMap;
use serde::{Deserialize, Serialize};

use crate::input::character_boundary;

/// Minimum number of lines to keep, and half the maximum.
const KEPT: usize = 1 << 13;
/// Bytes of text kept of a line.
pub(super) const TEXT_BYTES: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub hash: u64,
    pub count: u64,
    pub text: Box<str>,
}

#[derive(Debug, Default)]
pub(super) struct Frequent {
    counts: AHashMap<u64, u64>,
    /// Texts of lines that occurred again while they were counted.
    texts: AHashMap<u64, Box<str>>,
    /// Upper bound on the uncounted occurrences of a line.
    error: u64,
}

impl Frequent {
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

    /// The repeated lines, by hash, and an upper bound on their, and other lines', uncounted occurrences.
    pub fn repeated(&self) -> (Vec<Line>, u64) {
        let lines = self.texts.iter();
        let lines = lines.map(|(&hash, text)| Line { hash, count: self.counts[&hash], text: text.clone() });
        let mut lines: Vec<Line> = lines.collect();
        lines.sort_unstable_by_key(|line| line.hash);
        // Without lines that occurred only once.
        (lines, self.error + 1)
    }
}

const MAX_PENDING: usize = 1 << 10;

/// Hashes up to a limit, with their counts.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub total: u64,
    /// 2^64 - 1, or half of it, a quarter, …
    pub limit: u64,
    counts: AHashMap<u64, u32>,
    capacity: usize,
    /// Hashes that are not counted yet: counted one by one, each would wait for memory.
    pending: Vec<u64>,
}

impl Sample {
    pub fn new(capacity: usize) -> Self {
        Self { total: 0, limit: u64::MAX, counts: AHashMap::new(), capacity, pending: Vec::new() }
    }

    /// Adds a hash. `finish` must be called after the last one.
    pub fn add(&mut self, hash: u64) {
        self.total += 1;
        if hash <= self.limit {
            self.pending.push(hash);
            if self.pending.len() == MAX_PENDING {
                self.finish();
            }
        }
    }

    pub fn finish(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        pending.drain(..).for_each(|hash| self.add_count(hash, 1));
        self.pending = pending;
    }

    fn add_count(&mut self, hash: u64, times: u32) {
        if hash <= self.limit {
            let count = self.counts.entry(hash).or_default();
            *count = count.saturating_add(times);
            while self.counts.len() > self.capacity {
                self.reduce(self.limit >> 1);
            }
        }
    }

    fn reduce(&mut self, limit: u64) {
        if limit < self.limit {
            self.limit = limit;
            self.counts.retain(|&hash, _| hash <= limit);
        }
    }

    /// Adds the hashes of another sample, with their counts.
    pub fn merge(&mut self, total: u64, limit: u64, hashes: impl Iterator<Item = (u64, u32)>) {
        self.total += total;
        self.reduce(limit);
        for (hash, count) in hashes {
            self.add_count(hash, count);
        }
    }

    /// N if one in N hashes is in the sample.
    pub fn one_of(&self) -> u64 {
        1 << self.limit.leading_zeros()
    }

    pub fn num_distinct(&self) -> u64 {
        (self.counts.len() as u64).saturating_mul(self.one_of()).min(self.total)
    }

    pub fn count(&self, hash: u64) -> u64 {
        self.counts.get(&hash).copied().unwrap_or(0).into()
    }

    pub fn sorted(&self) -> Vec<(u64, u32)> {
        let mut sorted: Vec<_> = self.counts.iter().map(|(&hash, &count)| (hash, count)).collect();
        sorted.sort_unstable();
        sorted
    }
}
