//! A cache of short words and their ids, of fixed size, one per thread.

use super::ascii::Key;

/// Ids per cache entry; words with more are split again each time.
pub(super) const MAX_IDS: usize = 3;
/// Sets of two words each: 1 MiB in total.
const SETS: usize = 1 << 14;

/// The ids of a word; only the first `count` are valid.
#[derive(Clone, Copy, Default)]
pub(super) struct Ids {
    pub ids: [u32; MAX_IDS],
    pub count: u32,
}

/// One cache line. The most recently found word comes first; the other is replaced next.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Set {
    keys: [Key; 2],
    ids: [Ids; 2],
}

/// A two-way set-associative cache from words to ids.
pub(super) struct WordCache {
    sets: Box<[Set]>,
}

impl WordCache {
    pub fn new() -> Self {
        Self { sets: vec![Set::default(); SETS].into_boxed_slice() }
    }

    /// The ids of a word, if it is cached.
    #[inline]
    pub fn get(&mut self, key: Key) -> Option<Ids> {
        let set = &mut self.sets[set_index(key)];
        if set.keys[0] == key {
            return Some(set.ids[0]);
        }
        if set.keys[1] == key {
            set.keys.swap(0, 1);
            set.ids.swap(0, 1);
            return Some(set.ids[0]);
        }
        None
    }

    /// Caches a word's ids unless there are too many, replacing the less recently found word of its set.
    pub fn insert(&mut self, key: Key, ids: &[u32]) {
        if ids.len() > MAX_IDS {
            return;
        }
        let mut kept = Ids { count: ids.len() as u32, ..Ids::default() };
        kept.ids[..ids.len()].copy_from_slice(ids);
        let set = &mut self.sets[set_index(key)];
        let way = usize::from(set.keys[0] != Key::default());
        (set.keys[way], set.ids[way]) = (key, kept);
    }
}

#[inline]
fn set_index(key: Key) -> usize {
    key.hash() as usize & (SETS - 1)
}
