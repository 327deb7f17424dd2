//! Words of ASCII letters and digits, scanned eight bytes at a time, and a fixed-size cache of short words and their ids,
//! one per thread.

/// Bytes of the longest word that fits into a key.
pub(super) const MAX_KEY_BYTES: usize = 15;
const LOW: u64 = 0x0101_0101_0101_0101;
const HIGH: u64 = 0x8080_8080_8080_8080;
/// The bit that distinguishes a lowercase ASCII letter from its uppercase; set in every digit.
pub(super) const CASE: u64 = 0x2020_2020_2020_2020;

/// A word of up to [`MAX_KEY_BYTES`] bytes, padded with zeros, with its length in the last byte. Different
/// words have different keys, and none has the key 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Key {
    low: u64,
    high: u64,
}

impl Key {
    pub fn of(word: &[u8]) -> Option<Self> {
        (1..=MAX_KEY_BYTES).contains(&word.len()).then(|| {
            let mut bytes = [0; 16];
            bytes[..word.len()].copy_from_slice(word);
            bytes[MAX_KEY_BYTES] = word.len() as u8;
            Self::from_bytes(bytes)
        })
    }

    pub fn bytes(self) -> ([u8; 16], usize) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.low.to_le_bytes());
        bytes[8..].copy_from_slice(&self.high.to_le_bytes());
        (bytes, usize::from(bytes[MAX_KEY_BYTES]))
    }

    /// A hash, every bit of which depends on the whole word.
    #[inline]
    pub fn hash(self) -> u64 {
        let product =
            u128::from(self.low ^ 0x9e37_79b9_7f4a_7c15) * u128::from(self.high ^ 0xc2b2_ae3d_27d4_eb4f);
        (product as u64) ^ ((product >> 64) as u64)
    }

    fn from_bytes(bytes: [u8; 16]) -> Self {
        let value = u128::from_le_bytes(bytes);
        Self { low: value as u64, high: (value >> 64) as u64 }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Window {
    low: u64,
    high: u64,
}

impl Window {
    /// Reads from `at`, which must not be after the end of the text.
    #[inline]
    pub fn new(text: &[u8], at: usize) -> Self {
        let mut bytes = [0; 16];
        match text.get(at..at + 16).and_then(|full| full.try_into().ok()) {
            Some(full) => bytes = full,
            None => bytes[..text.len() - at].copy_from_slice(&text[at..]),
        }
        let value = u128::from_le_bytes(bytes);
        Self { low: value as u64, high: (value >> 64) as u64 }
    }

    /// The number of ASCII letters and digits at the start of the window: 0 to 16.
    #[inline]
    pub fn word_length(self) -> usize {
        let low = !alphanumeric(self.low) & HIGH;
        if low != 0 {
            return low.trailing_zeros() as usize / 8;
        }
        8 + (!alphanumeric(self.high) & HIGH).trailing_zeros() as usize / 8
    }

    /// The key of the first `length` bytes (1 to 15), with the bits of `case` set.
    #[inline]
    pub fn key(self, length: usize, case: u64) -> Key {
        let (low, high) = MASKS[length & 15];
        let length = (length as u64) << 56;
        Key { low: (self.low | case) & low, high: ((self.high | case) & high) | length }
    }
}

const MASKS: [(u64, u64); 16] = {
    let (mut masks, mut length) = ([(0, 0); 16], 0);
    while length < 16 {
        let mask = (1_u128 << (8 * length)) - 1;
        masks[length] = (mask as u64, (mask >> 64) as u64);
        length += 1;
    }
    masks
};

/// The high bit of every byte that is an ASCII letter or digit.
#[inline]
fn alphanumeric(bytes: u64) -> u64 {
    // With the high bits cleared, adding 0x80 - k to a byte sets its high bit iff the byte is at least k,
    // and never carries into the next one.
    let seven = bytes & !HIGH;
    let at_least = |bytes: u64, k: u8| bytes.wrapping_add(LOW * u64::from(0x80 - k));
    let folded = seven | CASE;
    let letter = at_least(folded, b'a') & !at_least(folded, b'z' + 1);
    let digit = at_least(seven, b'0') & !at_least(seven, b'9' + 1);
    (letter | digit) & !bytes & HIGH
}

/// Ids per cache entry; words with more ids are split again each time.
pub(super) const MAX_IDS: usize = 3;
/// Sets of two words each: 1 MiB in total.
const SETS: usize = 1 << 14;

/// The ids of a word; only the first `count` are valid.
#[derive(Clone, Copy, Default)]
pub(super) struct Ids {
    pub ids: [u32; MAX_IDS],
    pub count: u32,
}

/// One cache line. The more recently used word comes first; the other is replaced next.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Set {
    keys: [Key; 2],
    ids: [Ids; 2],
}

pub(super) struct WordCache {
    sets: Box<[Set]>,
}

impl WordCache {
    pub fn new() -> Self {
        Self { sets: vec![Set::default(); SETS].into_boxed_slice() }
    }

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

    /// Caches a word's ids unless there are too many, replacing the less recently used word of its set.
    pub fn insert(&mut self, key: Key, ids: &[u32]) {
        if ids.len() > MAX_IDS {
            return;
        }
        let mut entry = Ids { count: ids.len() as u32, ..Ids::default() };
        entry.ids[..ids.len()].copy_from_slice(ids);
        let set = &mut self.sets[set_index(key)];
        let way = usize::from(set.keys[0] != Key::default());
        (set.keys[way], set.ids[way]) = (key, entry);
    }
}

#[inline]
fn set_index(key: Key) -> usize {
    key.hash() as usize & (SETS - 1)
}
