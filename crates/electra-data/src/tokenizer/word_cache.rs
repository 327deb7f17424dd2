//! Short words and their ids, in memory that never grows: what one thread has seen lately.

use super::ascii::Key;

/// Ids that an entry holds; words of more pieces are split anew each time.
pub(super) const MOST_PIECES: usize = 3;
/// Two words each: 1 MiB in all.
const SETS: usize = 1 << 14;

/// The ids of a word; those after the first `count` mean nothing.
#[derive(Clone, Copy, Default)]
pub(super) struct Ids {
    pub ids: [u32; MOST_PIECES],
    pub count: u32,
}

/// One cache line: the word that was asked for again comes first, the other is the next to go.
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

    /// No cache, and no memory: nothing may be asked of it.
    pub fn none() -> Self {
        Self { sets: Box::default() }
    }

    /// The ids of a word that is still here.
    #[inline]
    pub fn get(&mut self, key: Key) -> Option<Ids> {
        let set = &mut self.sets[place(key)];
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

    /// Keeps a word's ids if there are few enough, in the place of one less in use.
    pub fn insert(&mut self, key: Key, ids: &[u32]) {
        if ids.len() > MOST_PIECES {
            return;
        }
        let mut kept = Ids { count: ids.len() as u32, ..Ids::default() };
        kept.ids[..ids.len()].copy_from_slice(ids);
        let set = &mut self.sets[place(key)];
        let way = usize::from(set.keys[0] != Key::default());
        (set.keys[way], set.ids[way]) = (key, kept);
    }
}

#[inline]
fn place(key: Key) -> usize {
    key.hash() as usize & (SETS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_was_put_there() {
        let mut cache = WordCache::new();
        let ids = |n: u32| vec![n; 1 + n as usize % MOST_PIECES];
        let key = |n: u32| Key::of(format!("word{n}").as_bytes()).unwrap();
        let mut found = 0;
        for n in 0..200_000 {
            cache.insert(key(n), &ids(n));
            let kept = cache.get(key(n)).unwrap();
            assert_eq!(kept.ids[..kept.count as usize], ids(n));
            if let Some(kept) = cache.get(key(n / 2)) {
                assert_eq!(kept.ids[..kept.count as usize], ids(n / 2));
                found += 1;
            }
        }
        assert!(found > 10_000, "{found}");
        cache.insert(key(1_000_000), &[1; MOST_PIECES + 1]);
        assert!(cache.get(key(1_000_000)).is_none());
    }
}
