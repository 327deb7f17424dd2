//! A keyed permutation of `0..n`, computed element by element instead of stored.
//!
//! It orders the blocks of an epoch and the rows of a window, so shuffling a corpus of any size needs no
//! memory, and any position of the order is reached in constant time.

use crate::philox::{Purpose, Stream};

const ROUNDS: usize = 8;

/// A permutation of `0..len`: a Feistel network over the next power of two, applied repeatedly until the
/// result is in range (cycle walking; Black and Rogaway 2002), on average less than twice.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    pub len: u64,
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    pub fn new(len: u64, seed: u64, purpose: Purpose, counter: [u32; 3]) -> Self {
        let bits = u64::BITS - len.saturating_sub(1).leading_zeros();
        let low_bits = bits / 2;
        let mut stream = Stream::new(seed, purpose, counter);
        Self {
            len,
            low_bits,
            low_mask: (1 << low_bits) - 1,
            high_mask: (1 << (bits - low_bits)) - 1,
            keys: std::array::from_fn(|_| stream.word64()),
        }
    }

    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mut value = self.scramble(index);
        while value >= self.len {
            value = self.scramble(value);
        }
        value
    }

    /// One pass of the network: each half in turn is XORed with a function of the other. This is a bijection
    /// for any function and any sizes of the halves.
    #[inline]
    fn scramble(&self, value: u64) -> u64 {
        let (mut high, mut low) = (value >> self.low_bits, value & self.low_mask);
        for keys in self.keys.chunks_exact(2) {
            high ^= mix(low, keys[0]) & self.high_mask;
            low ^= mix(high, keys[1]) & self.low_mask;
        }
        high << self.low_bits | low
    }
}

/// A keyed hash of a half (multiplicative mixing of Stafford's variant 13); the keys are Philox words.
#[inline]
fn mix(half: u64, key: u64) -> u64 {
    let mut x = half.wrapping_add(key);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn whole(len: u64, seed: u64) -> Vec<u64> {
        let order = Permutation::new(len, seed, Purpose::RowOrder, [0, 1, 2]);
        (0..len).map(|index| order.at(index)).collect()
    }

    #[test]
    fn all_orders_of_four_are_equally_likely() {
        let mut counts: HashMap<Vec<u64>, f64> = HashMap::new();
        for seed in 0..24_000 {
            *counts.entry(whole(4, seed)).or_default() += 1.0;
        }
        assert_eq!(counts.len(), 24);
        let chi2: f64 = counts.values().map(|n| (n - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi2 < 52.0, "{chi2}"); // 23 degrees of freedom: p = 0.0005
    }

    #[test]
    fn indices_and_neighbors_are_uncorrelated() {
        let n = 10_007;
        let order = whole(n, 3);
        let (center, variance) = ((n - 1) as f64 / 2.0, (n * n - 1) as f64 / 12.0);
        let after = |lag| order.iter().cycle().skip(lag).take(order.len()).copied().collect();
        for others in [(0..n).collect::<Vec<_>>(), after(1), after(2)] {
            let pairs = order.iter().zip(others);
            let sum: f64 = pairs.map(|(&a, b)| (a as f64 - center) * (b as f64 - center)).sum();
            let correlation = sum / (n as f64 * variance);
            assert!(correlation.abs() < 0.04, "{correlation}"); // 4 standard deviations
        }
    }

    proptest! {
        #[test]
        fn every_length_is_permuted_and_seeds_differ(len in prop_oneof![0_u64..300, 0_u64..5_000], seed: u64) {
            let order = whole(len, seed);
            prop_assert!(len < 200 || order != whole(len, seed ^ 1));
            let sorted: std::collections::BTreeSet<_> = order.into_iter().collect();
            prop_assert!(sorted.into_iter().eq(0..len));
            let (huge, most) = (Permutation::new(len << 26, seed, Purpose::BlockOrder, [0; 3]), (len << 26).min(100));
            let values: std::collections::HashSet<_> = (0..most).map(|index| huge.at(index)).collect();
            prop_assert!(values.len() as u64 == most && values.into_iter().all(|value| value < len << 26));
        }
    }
}
