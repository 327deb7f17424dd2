//! Which text of an input that is too large is used: a sample that depends on the text and a seed alone.
//!
//! Each document (of a long one, each part of 1 MiB) has a level by the hash of the seed and its number:
//! 0 for half of them, 1 for a quarter, and so on. Whenever the text of all levels in use is more than
//! the limit, the lowest of them falls out. So the sample is known without knowing the input's size
//! first, and holds between about half the limit and the limit.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Parts of a document that are drawn by themselves have at least this many bytes.
const PART: u64 = 1 << 20;

/// What has been drawn so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drawn {
    /// Levels below this one are out.
    pub lowest_level: u8,
    /// Bytes of text that were drawn …
    pub bytes: u64,
    /// … out of so many.
    pub of_bytes: u64,
}

/// Draws text as it comes.
#[derive(Debug)]
pub(crate) struct Draw {
    seed: u64,
    limit: u64,
    drawn: Drawn,
    level_bytes: [u64; 65],
    part: u64,
    part_bytes: u64,
    level: u8,
}

impl Draw {
    /// Draws at most `limit` bytes of text.
    pub fn new(seed: u64, limit: u64) -> Self {
        let (drawn, level) = (Drawn::default(), level(seed, 0));
        Self { seed, limit, drawn, level_bytes: [0; 65], part: 0, part_bytes: 0, level }
    }

    /// Draws everything.
    pub fn all() -> Self {
        Self::new(0, u64::MAX)
    }

    /// The level of the next piece of text; `None` if it is not drawn.
    pub fn level_of(&mut self, piece: &str, ends_document: bool) -> Option<u8> {
        let (level, bytes) = (self.level, piece.len() as u64);
        self.drawn.of_bytes += bytes;
        self.level_bytes[usize::from(level)] += bytes;
        if level >= self.drawn.lowest_level {
            self.drawn.bytes += bytes;
        }
        while self.drawn.bytes > self.limit {
            self.drawn.bytes -= self.level_bytes[usize::from(self.drawn.lowest_level)];
            self.drawn.lowest_level += 1;
        }
        self.part_bytes += bytes;
        if ends_document || self.part_bytes >= PART {
            self.part += 1;
            self.part_bytes = 0;
            self.level = self::level(self.seed, self.part);
        }
        (level >= self.drawn.lowest_level).then_some(level)
    }

    /// How much has been drawn.
    pub fn drawn(&self) -> Drawn {
        self.drawn
    }
}

fn level(seed: u64, part: u64) -> u8 {
    xxh3_64_with_seed(&part.to_le_bytes(), seed).leading_zeros() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of the documents that are drawn in the end, and what the draw says of itself.
    fn sample(seed: u64, limit: u64, documents: usize) -> (Vec<usize>, Drawn) {
        let mut draw = Draw::new(seed, limit);
        let levels: Vec<_> = (0..documents).map(|_| draw.level_of("0123456789", true)).collect();
        let drawn = draw.drawn();
        let kept = |&n: &usize| levels[n].is_some_and(|level| level >= drawn.lowest_level);
        ((0..documents).filter(kept).collect(), drawn)
    }

    #[test]
    fn below_the_limit_all_is_drawn() {
        let (kept, drawn) = sample(3, 1_000, 100);
        assert_eq!((kept.len(), drawn), (100, Drawn { lowest_level: 0, bytes: 1_000, of_bytes: 1_000 }));
    }

    #[test]
    fn above_it_a_share_that_the_seed_decides() {
        let (kept, drawn) = sample(0, 5_000, 10_000);
        assert_eq!((kept.len() as u64 * 10, drawn.of_bytes), (drawn.bytes, 100_000));
        assert!((2_000..=5_000).contains(&drawn.bytes), "{drawn:?}");
        assert_eq!(sample(0, 5_000, 10_000).0, kept);
        assert_ne!(sample(1, 5_000, 10_000).0, kept);
    }

    #[test]
    fn a_single_endless_document_is_drawn_in_parts() {
        let (mut draw, line) = (Draw::new(0, 32 << 20), "x".repeat(1 << 16));
        for _ in 0..16 << 10 {
            draw.level_of(&line, false);
        }
        let drawn = draw.drawn();
        assert!((8 << 20..=32 << 20).contains(&drawn.bytes) && drawn.of_bytes == 1 << 30, "{drawn:?}");
    }
}
