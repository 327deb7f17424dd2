//! Counts how many hashes are distinct: exactly while they fit, then in a sample.
//!
//! The sample consists of the hashes up to a limit, with all their occurrences. Whenever it holds too many, the limit
//! is halved. So it depends on the set of hashes alone, not on their order, and samples can be merged.

use ahash::AHashMap;

const MAX_PENDING: usize = 1 << 10;

/// Hashes up to a limit, with how often each occurs.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Number of hashes added, in the sample or not.
    pub total: u64,
    /// 2^64 - 1, or half of it, a quarter, …
    pub limit: u64,
    counts: AHashMap<u64, u32>,
    capacity: usize,
    /// Hashes that are not counted yet: one after the other, each would wait for memory.
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

    /// Counts the hashes that were added.
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

    /// Adds the hashes of another sample, in which each was added as often as is said.
    pub fn merge(&mut self, total: u64, limit: u64, hashes: impl Iterator<Item = (u64, u32)>) {
        self.total += total;
        self.reduce(limit);
        for (hash, count) in hashes {
            self.add_count(hash, count);
        }
    }

    /// One in how many hashes is in the sample.
    pub fn one_of(&self) -> u64 {
        1 << self.limit.leading_zeros()
    }

    /// The number of distinct hashes: exact, or an unbiased estimate.
    pub fn num_distinct(&self) -> u64 {
        (self.counts.len() as u64).saturating_mul(self.one_of()).min(self.total)
    }

    pub fn count(&self, hash: u64) -> u64 {
        self.counts.get(&hash).copied().unwrap_or(0).into()
    }

    /// The sample by hash.
    pub fn sorted(&self) -> Vec<(u64, u32)> {
        let mut sorted: Vec<_> = self.counts.iter().map(|(&hash, &count)| (hash, count)).collect();
        sorted.sort_unstable();
        sorted
    }
}
