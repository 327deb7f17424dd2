//! Sampling an input of unknown size: the sample depends only on the text and a seed.
//!
//! Each document (each part of 1 MiB of a long one) gets a level from a hash of the seed and its number: 0
//! for half of them, 1 for a quarter, and so on. Whenever the text of all remaining levels exceeds the limit,
//! the lowest of them is dropped. So the sample holds between about half the limit and the limit, and the
//! size of the input need not be known in advance.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Minimum size of the parts of a document that are sampled separately.
const PART: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sampled {
    /// Levels below this one have been dropped.
    pub lowest_level: u8,
    pub bytes: u64,
    pub total_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Sampler {
    seed: u64,
    limit: u64,
    pub sampled: Sampled,
    level_bytes: [u64; 65],
    part: u64,
    part_bytes: u64,
    level: u8,
}

impl Sampler {
    pub fn new(seed: u64, limit: u64) -> Self {
        let (sampled, level) = (Sampled::default(), level(seed, 0));
        Self { seed, limit, sampled, level_bytes: [0; 65], part: 0, part_bytes: 0, level }
    }

    pub fn everything() -> Self {
        Self::new(0, u64::MAX)
    }

    /// The level of the next text of the stream; `None` if it is not in the sample.
    pub fn level_of(&mut self, text: &str, ends_document: bool) -> Option<u8> {
        let (level, bytes) = (self.level, text.len() as u64);
        self.sampled.total_bytes += bytes;
        self.level_bytes[usize::from(level)] += bytes;
        if level >= self.sampled.lowest_level {
            self.sampled.bytes += bytes;
        }
        while self.sampled.bytes > self.limit {
            self.sampled.bytes -= self.level_bytes[usize::from(self.sampled.lowest_level)];
            self.sampled.lowest_level += 1;
        }
        self.part_bytes += bytes;
        if ends_document || self.part_bytes >= PART {
            self.part += 1;
            self.part_bytes = 0;
            self.level = self::level(self.seed, self.part);
        }
        (level >= self.sampled.lowest_level).then_some(level)
    }
}

fn level(seed: u64, part: u64) -> u8 {
    xxh3_64_with_seed(&part.to_le_bytes(), seed).leading_zeros() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of the documents in the final sample, and the sample's statistics.
    fn sample(seed: u64, limit: u64, documents: usize) -> (Vec<usize>, Sampled) {
        let mut sampler = Sampler::new(seed, limit);
        let levels: Vec<_> = (0..documents).map(|_| sampler.level_of("0123456789", true)).collect();
        let sampled = sampler.sampled;
        let in_sample = |&n: &usize| levels[n].is_some_and(|level| level >= sampled.lowest_level);
        ((0..documents).filter(in_sample).collect(), sampled)
    }

    #[test]
    fn sample_depends_on_the_seed_above_the_limit() {
        let (documents, sampled) = sample(3, 1_000, 100);
        let everything = Sampled { lowest_level: 0, bytes: 1_000, total_bytes: 1_000 };
        assert_eq!((documents.len(), sampled), (100, everything));
        let (documents, sampled) = sample(0, 5_000, 10_000);
        assert_eq!((documents.len() as u64 * 10, sampled.total_bytes), (sampled.bytes, 100_000));
        assert!((2_000..=5_000).contains(&sampled.bytes), "{sampled:?}");
        assert_eq!(sample(0, 5_000, 10_000).0, documents);
        assert_ne!(sample(1, 5_000, 10_000).0, documents);
        // A single very long document is sampled in parts.
        let (mut sampler, line) = (Sampler::new(0, 32 << 20), "x".repeat(1 << 16));
        for _ in 0..16 << 10 {
            sampler.level_of(&line, false);
        }
        let Sampled { bytes, total_bytes, .. } = sampler.sampled;
        assert!((8 << 20..=32 << 20).contains(&bytes) && total_bytes == 1 << 30, "{bytes}");
    }
}
