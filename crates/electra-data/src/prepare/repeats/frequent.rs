//! The most repeated lines with their text, in bounded memory, by SpaceSaving (Metwally, Agrawal and El Abbadi, 2005).
//!
//! In an input group, the hash assigns a line to one of 1,024 buckets of eight lines, each a cache line long: a new line
//! replaces the one that has occurred least. Such summaries can be added, with the bounds of their errors.

use ahash::AHashMap;
use serde::{Deserialize, Serialize};

use crate::input::character_boundary;

/// Number of buckets: a power of 2.
const BUCKETS: usize = 1 << 10;
/// Number of lines in a bucket.
const WAYS: usize = 8;
/// Number of lines that are kept of several input groups.
const KEPT: usize = BUCKETS * WAYS;
/// Bytes of text that are kept of a line.
pub(super) const TEXT_BYTES: usize = 200;

/// Lines whose hashes end in the same bits.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
struct Bucket {
    /// The first half of each hash; 0 if there is no line.
    tags: [u32; WAYS],
    /// How often each has occurred at most.
    most: [u32; WAYS],
}

/// The most repeated lines of an input group.
#[derive(Clone, Debug)]
pub(super) struct GroupFrequent {
    buckets: Vec<Bucket>,
    /// A bit for each line of a bucket: whether it is in `repeated`.
    are_repeated: Vec<u8>,
    /// Lines that have occurred again while they were in a bucket, by bucket and way. Their `count` is that in the
    /// bucket, less `missed`.
    repeated: AHashMap<usize, Line>,
    /// Lines that are in no bucket occur at most so often.
    error: u32,
}

impl Default for GroupFrequent {
    fn default() -> Self {
        let (buckets, are_repeated) = (vec![Bucket::default(); BUCKETS], vec![0; BUCKETS]);
        Self { buckets, are_repeated, repeated: AHashMap::new(), error: 0 }
    }
}

impl GroupFrequent {
    /// Counts an occurrence of a line.
    pub fn add(&mut self, hash: u64, text: &str) {
        let (number, tag) = (hash as usize % BUCKETS, ((hash >> 32) as u32).max(1));
        let (bucket, are_repeated) = (&mut self.buckets[number], &mut self.are_repeated[number]);
        if let Some(way) = bucket.tags.iter().position(|&known| known == tag) {
            if *are_repeated & 1 << way == 0 {
                *are_repeated |= 1 << way;
                let missed = u64::from(bucket.most[way]) - 1;
                self.repeated
                    .insert(number * WAYS + way, Line { hash, count: 0, missed, text: beginning(text) });
            }
            bucket.most[way] = bucket.most[way].saturating_add(1);
            return;
        }
        let way =
            (1..WAYS).fold(0, |least, way| if bucket.most[way] < bucket.most[least] { way } else { least });
        let missed = bucket.most[way];
        (bucket.tags[way], bucket.most[way]) = (tag, missed.saturating_add(1));
        self.error = self.error.max(missed);
        if *are_repeated & 1 << way != 0 {
            *are_repeated &= !(1 << way);
            self.repeated.remove(&(number * WAYS + way));
        }
    }

    /// The lines that have occurred again, by hash, and how often others occur at most.
    pub fn lines(&self) -> (Vec<Line>, u64) {
        let count = |number: usize| u64::from(self.buckets[number / WAYS].most[number % WAYS]);
        let with_count =
            |(&number, line): (&usize, &Line)| Line { count: count(number) - line.missed, ..line.clone() };
        let mut lines: Vec<Line> = self.repeated.iter().map(with_count).collect();
        lines.sort_unstable_by_key(|line| line.hash);
        // A line in a bucket that has not occurred again may have occurred once more than those in none.
        (lines, u64::from(self.error) + 1)
    }
}

/// A line that occurs at least `count` times, and at most `missed` times more, with its beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Line {
    pub hash: u64,
    pub count: u64,
    pub missed: u64,
    pub text: Box<str>,
}

/// The most repeated lines of several input groups.
#[derive(Debug, Default)]
pub(super) struct Frequent {
    lines: AHashMap<u64, Line>,
    /// Other lines occur at most so often.
    pub error: u64,
}

impl Frequent {
    /// Adds the lines of an input group, in which others occur at most `error` times.
    pub fn merge(&mut self, lines: Vec<Line>, error: u64) {
        let before = self.error;
        self.error += error;
        self.lines.values_mut().for_each(|line| line.missed += error);
        for other in lines {
            match self.lines.get_mut(&other.hash) {
                Some(line) => {
                    line.count += other.count;
                    line.missed = line.missed - error + other.missed;
                }
                None => {
                    self.lines.insert(other.hash, Line { missed: before + other.missed, ..other });
                }
            }
        }
        self.prune_if_full();
    }

    fn prune_if_full(&mut self) {
        if self.lines.len() <= 2 * KEPT {
            return;
        }
        // The hash decides between equals, so that the outcome does not depend on the order in the table.
        let rank = |line: &Line| (line.count + line.missed, line.hash);
        let mut ranks: Vec<(u64, u64)> = self.lines.values().map(rank).collect();
        let (_, &mut last, _) = ranks.select_nth_unstable_by(KEPT, |a, b| b.cmp(a));
        self.lines.retain(|_, line| rank(line) > last);
        self.error = self.error.max(last.0);
    }

    /// All lines that are kept.
    pub fn lines(&self) -> impl Iterator<Item = &Line> {
        self.lines.values()
    }
}

fn beginning(text: &str) -> Box<str> {
    let text = text.trim();
    text[..character_boundary(text, TEXT_BYTES)].into()
}
