//! Philox4x32-10, the counter-based generator behind everything random in the loader.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A number is a pure
//! function of a key (the seed) and a counter (the number's purpose), so threads, ranks and resumed runs do
//! not depend on the numbers drawn before.

const MULTIPLIER_0: u32 = 0xD251_1F53;
const MULTIPLIER_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;
const ROUNDS: u32 = 10;
/// Counters computed together: independent chains of multiplications fill the pipeline.
const LANES: usize = 4;

/// The purpose of a stream of numbers. Streams with different purposes never share a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Mask = 0,
    Cut = 1,
    Tie = 2,
    BlockOrder = 3,
    RowOrder = 4,
    /// Division of lines as in the published example builder.
    Example = 5,
    /// The order of the shards of an epoch, if the rows of a batch are divided into lanes.
    ShardOrder = 6,
}

pub(crate) const fn probability(p: f64) -> u32 {
    (p * 4_294_967_296.0) as u32
}

// Always inlined: otherwise `Stream::refill` would not compute four counters in parallel.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut x0, mut x1, mut x2, mut x3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let (p0, p1) = (product(MULTIPLIER_0, x0), product(MULTIPLIER_1, x2));
        (x0, x1, x2, x3) = (high(p1) ^ x1 ^ k0, p1 as u32, high(p0) ^ x3 ^ k1, p0 as u32);
        (k0, k1) = (k0.wrapping_add(WEYL_0), k1.wrapping_add(WEYL_1));
    }
    [x0, x1, x2, x3]
}

fn product(a: u32, b: u32) -> u64 {
    u64::from(a) * u64::from(b)
}

fn high(product: u64) -> u32 {
    (product >> 32) as u32
}

/// An endless stream of random words for one purpose and counter.
#[derive(Clone, Debug)]
pub struct Stream {
    key: [u32; 2],
    counter: [u32; 3],
    /// Fourth word of the next counter: the purpose in the top byte, a running number below it.
    next: u32,
    words: [u32; 4 * LANES],
    used: usize,
}

impl Stream {
    pub fn new(seed: u64, purpose: Purpose, counter: [u32; 3]) -> Self {
        let key = [seed as u32, (seed >> 32) as u32];
        let next = (purpose as u32) << 24;
        Self { key, counter, next, words: [0; 4 * LANES], used: 4 * LANES }
    }

    #[inline]
    pub fn word(&mut self) -> u32 {
        if self.used == self.words.len() {
            self.refill();
        }
        let word = self.words[self.used];
        self.used += 1;
        word
    }

    pub fn word64(&mut self) -> u64 {
        u64::from(self.word()) << 32 | u64::from(self.word())
    }

    /// An unbiased integer, uniform over `0..bound` (Lemire 2019); 0 if `bound` is 0.
    #[inline]
    pub fn below(&mut self, bound: u32) -> u32 {
        let mut product = product(self.word(), bound);
        if (product as u32) < bound {
            // 2^32 modulo bound: the number of low values that would occur once too often.
            let surplus = bound.wrapping_neg() % bound;
            while (product as u32) < surplus {
                product = u64::from(self.word()) * u64::from(bound);
            }
        }
        high(product)
    }

    /// True with probability `numerator / 2^32`.
    #[inline]
    pub fn happens(&mut self, numerator: u32) -> bool {
        self.word() < numerator
    }

    #[inline(never)]
    fn refill(&mut self) {
        let [c0, c1, c2] = self.counter;
        for lane in 0..LANES {
            let counter = [c0, c1, c2, self.next.wrapping_add(lane as u32)];
            let block = philox4x32(counter, self.key);
            self.words[4 * lane..4 * lane + 4].copy_from_slice(&block);
        }
        self.next = self.next.wrapping_add(LANES as u32);
        debug_assert!(self.next & 0x00ff_ffff != 0, "2^26 words: the next words belong to another purpose");
        self.used = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_match_random123() {
        let zero = philox4x32([0; 4], [0; 2]);
        assert_eq!(zero, [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        let digits = philox4x32(pi, [0xa4093822, 0x299f31d0]);
        assert_eq!(digits, [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn stream_yields_the_words_of_its_counters() {
        let mut stream = Stream::new(7 << 32 | 5, Purpose::Tie, [1, 2, 3]);
        for number in 0..9 {
            for word in philox4x32([1, 2, 3, 2 << 24 | number], [5, 7]) {
                assert_eq!(stream.word(), word);
            }
        }
    }

    #[test]
    fn bounded_integers_are_uniform() {
        // 3 * 2^30 rejects a quarter of all words, so a biased method would fail.
        let bound = 3 << 30;
        let mut stream = Stream::new(1, Purpose::Mask, [0; 3]);
        let mut counts = [0_u32; 3];
        for _ in 0..30_000 {
            counts[(stream.below(bound) >> 30) as usize] += 1;
        }
        assert!(counts.iter().all(|&count| count.abs_diff(10_000) < 400), "{counts:?}");
        assert_eq!((stream.below(0), stream.below(1)), (0, 0));
    }
}
