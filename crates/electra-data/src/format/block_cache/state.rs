//! The state of a cache that all processes of a node share: which blocks are present, and which are in use.
//!
//! ```text
//! state   header 4 KiB | slots | one bit per block: present
//! header  magic | number of blocks | bytes present | where the last eviction ended
//! slot    number of ranges | first block, end | first block, end | …     the blocks that one reader has in use
//! lock    byte 0: the state · byte 16 + slot: its reader is alive · byte 2^40 + block: the block is being fetched, at
//!         n * 2^44 further by the nth reader that gave up waiting for the one before
//! ```
//! The file is mapped. Bits are set by the reader that has fetched and verified a block. Slots are written, and bits
//! are cleared, only with the state's lock held, so a reader whose slot names a block keeps it.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{MmapMut, MmapOptions};

use super::locks::{allocate, is_locked, lock, try_lock, unlock};
use crate::error::{Error, Result};
use crate::format::atomic_file::write_error;

/// Names of the two files.
pub(super) const STATE: &str = "state";
pub(super) const LOCK: &str = "lock";
const MAGIC: u64 = u64::from_le_bytes(*b"ELECACH1");
/// Words of the header.
const HEADER: usize = 512;
const NUM_BLOCKS: usize = 1;
const USED: usize = 2;
const HAND: usize = 3;
/// The most readers of a cache at the same time, on one node.
const SLOTS: usize = 256;
/// Ranges that one reader can have in use: those of more than 50 shuffle windows.
const MAX_RANGES: usize = 16_384;
const SLOT_WORDS: usize = 512 + 2 * MAX_RANGES;
const STATE_BYTE: u64 = 0;
const SLOT_BYTE: u64 = 16;
const FETCH_BYTE: u64 = 1 << 40;
const TURN_BYTES: u64 = 1 << 44;

/// Words of memory that threads or processes share, initially 0. Pages that were never touched take no memory.
#[derive(Debug)]
pub(in crate::format) struct Words(MmapMut);

impl Words {
    /// Words of this process only.
    pub fn private(count: usize) -> Result<Self> {
        let map = MmapMut::map_anon(8 * count.max(1)).map_err(|error| Error::io("memory", error))?;
        Ok(Self(map))
    }

    fn shared(file: &File, path: &Path, count: usize) -> Result<Self> {
        // SAFETY: the file is only ever accessed through such maps, as atomic words.
        let map = unsafe { MmapOptions::new().len(8 * count).map_mut(file) };
        Ok(Self(map.map_err(|error| Error::io(path, error))?))
    }

    /// The word with this number. Panics if there is none.
    #[inline]
    pub fn at(&self, number: usize) -> &AtomicU64 {
        assert!(8 * number + 8 <= self.0.len());
        // SAFETY: the word lies within the map, maps are page-aligned, and all accesses are atomic.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast::<u64>().cast_mut().add(number)) }
    }
}

/// The state of a cache, opened by one reader.
#[derive(Debug)]
pub(super) struct SharedState {
    words: Words,
    lock: File,
    /// The state's file and its inode, unless it is private. A reader must not touch the files of another cache that
    /// has taken its place.
    named: Option<(PathBuf, u64)>,
    slot: usize,
    num_blocks: u64,
    /// File locks do not exclude threads that share an open file.
    threads: Mutex<()>,
}

/// The state's lock, held.
pub(super) struct Held<'a> {
    state: &'a SharedState,
    _threads: MutexGuard<'a, ()>,
}

impl SharedState {
    /// Opens the state in `dir`, or a private one, which has no name. A reader that is alone counts the bytes that are
    /// present: `bytes_of` gives a block's length.
    pub fn open(dir: Option<&Path>, num_blocks: u64, bytes_of: impl Fn(u64) -> u64) -> Result<Self> {
        let path = dir.map_or_else(std::env::temp_dir, |dir| dir.join(STATE));
        let open = |name: &str| {
            let mut options = File::options();
            options.create(true).read(true).write(true).truncate(false);
            let file = dir.map_or_else(tempfile::tempfile, |dir| options.open(dir.join(name)));
            file.map_err(|error| write_error(&path, error))
        };
        let (file, locks) = (open(STATE)?, open(LOCK)?);
        lock(&locks, STATE_BYTE).map_err(lock_failed)?;
        let count = HEADER + SLOTS * SLOT_WORDS + num_blocks.div_ceil(64) as usize;
        let is_new = file.metadata().is_ok_and(|found| found.len() == 0);
        file.set_len(8 * count as u64).map_err(|error| write_error(&path, error))?;
        let words = Words::shared(&file, &path, count)?;
        let (mut slot, mut alone) = (None, true);
        for candidate in 0..SLOTS {
            if slot.is_none() && try_lock(&locks, one(SLOT_BYTE + candidate as u64)).map_err(lock_failed)? {
                slot = Some(candidate);
            } else {
                alone &= !is_locked(&locks, SLOT_BYTE + candidate as u64).map_err(lock_failed)?;
            }
        }
        let Some(slot) = slot else {
            let path = path.display();
            return Err(Error::Input(format!(
                "{path}: more than {SLOTS} readers share this cache; use several"
            )));
        };
        let ours = HEADER + slot * SLOT_WORDS;
        for words in [0..HEADER, ours..ours + SLOT_WORDS, HEADER + SLOTS * SLOT_WORDS..count] {
            let bytes = 8 * words.start as u64..8 * words.end as u64;
            if !bytes.is_empty() {
                allocate(&file, bytes).map_err(|error| write_error(&path, error))?;
            }
        }
        let inode = file.metadata().map_err(|error| Error::io(&path, error))?.ino();
        let named = dir.is_some().then_some((path, inode));
        let state = Self { words, lock: locks, named, slot, num_blocks, threads: Mutex::new(()) };
        state.slot_word(slot, 0).store(0, Ordering::Release);
        if alone {
            state.initialize(is_new, &bytes_of);
        }
        unlock(&state.lock, one(STATE_BYTE)).map_err(lock_failed)?;
        Ok(state)
    }

    /// Initializes the state of a new cache, or corrects what a killed process left incomplete.
    fn initialize(&self, is_new: bool, bytes_of: &impl Fn(u64) -> u64) {
        let header = [MAGIC, self.num_blocks];
        if is_new {
            // All words are 0, and those of a corpus of many terabytes would take half a second to touch.
            (0..).zip(header).for_each(|(at, word)| self.words.at(at).store(word, Ordering::Relaxed));
            return;
        }
        if [self.words.at(0), self.words.at(NUM_BLOCKS)].map(|word| word.load(Ordering::Relaxed)) != header {
            for word in 0..self.num_blocks.div_ceil(64) as usize {
                self.bits(word).store(0, Ordering::Relaxed);
            }
            self.words.at(0).store(MAGIC, Ordering::Relaxed);
            self.words.at(NUM_BLOCKS).store(self.num_blocks, Ordering::Relaxed);
            self.words.at(HAND).store(0, Ordering::Relaxed);
        }
        let used = self.present(0..self.num_blocks).map(bytes_of).sum();
        self.words.at(USED).store(used, Ordering::Relaxed);
    }

    /// Whether a block is present.
    pub fn is_present(&self, block: u64) -> bool {
        self.bits(block as usize / 64).load(Ordering::Acquire) >> (block % 64) & 1 == 1
    }

    /// The blocks of a range that are present, in order.
    pub fn present(&self, blocks: Range<u64>) -> impl Iterator<Item = u64> {
        let words = blocks.start / 64..blocks.end.div_ceil(64);
        words.flat_map(move |word| {
            let bits = self.bits(word as usize).load(Ordering::Acquire);
            let ours = (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| 64 * word + bit);
            let blocks = blocks.clone();
            ours.filter(move |block| blocks.contains(block))
        })
    }

    /// Marks a block of `bytes` bytes as present; its bytes must be in its file.
    pub fn set_present(&self, block: u64, bytes: u64) {
        let bit = 1 << (block % 64);
        if self.bits(block as usize / 64).fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            self.words.at(USED).fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Bytes of all blocks that are present.
    pub fn used(&self) -> u64 {
        self.words.at(USED).load(Ordering::Relaxed)
    }

    /// Takes the fetching locks of blocks for a turn; `false` if another reader fetches any of them in this turn.
    pub fn try_lock_fetch(&self, blocks: &Range<u64>, turn: u64) -> Result<bool> {
        try_lock(&self.lock, fetch_bytes(blocks, turn)).map_err(lock_failed)
    }

    /// Releases the fetching locks of blocks.
    pub fn unlock_fetch(&self, blocks: &Range<u64>, turn: u64) -> Result<()> {
        unlock(&self.lock, fetch_bytes(blocks, turn)).map_err(lock_failed)
    }

    /// Takes the lock of the state.
    pub fn hold(&self) -> Result<Held<'_>> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        lock(&self.lock, STATE_BYTE).map_err(lock_failed)?;
        let held = Held { state: self, _threads: threads };
        if let Some((path, inode)) = &self.named
            && std::fs::metadata(path).ok().map(|found| found.ino()) != Some(*inode)
        {
            let path = path.display();
            return Err(Error::Input(format!(
                "{path}: the cache was removed while it was in use; start again"
            )));
        }
        Ok(held)
    }

    fn bits(&self, word: usize) -> &AtomicU64 {
        self.words.at(HEADER + SLOTS * SLOT_WORDS + word)
    }

    fn slot_word(&self, slot: usize, word: usize) -> &AtomicU64 {
        self.words.at(HEADER + slot * SLOT_WORDS + word)
    }
}

impl Held<'_> {
    /// Writes which blocks this reader has in use.
    pub fn set_in_use<'r>(&self, ranges: impl ExactSizeIterator<Item = &'r Range<u64>>) -> Result<()> {
        let count = ranges.len();
        if count > MAX_RANGES {
            let reason = format!("a batch needs {count} parts of the corpus at once; give it fewer rows");
            return Err(Error::Input(reason));
        }
        for (number, range) in ranges.enumerate() {
            let word = |word: usize| self.state.slot_word(self.state.slot, 512 + 2 * number + word);
            word(0).store(range.start, Ordering::Relaxed);
            word(1).store(range.end, Ordering::Relaxed);
        }
        self.state.slot_word(self.state.slot, 0).store(count as u64, Ordering::Release);
        Ok(())
    }

    /// The blocks that readers have in use: sorted ranges, which may overlap.
    pub fn in_use(&self) -> Result<Vec<Range<u64>>> {
        let state = self.state;
        let mut ranges = Vec::new();
        for slot in 0..SLOTS {
            let lives = slot == state.slot || {
                let count = state.slot_word(slot, 0).load(Ordering::Acquire);
                count > 0 && is_locked(&state.lock, SLOT_BYTE + slot as u64).map_err(lock_failed)?
            };
            let count = if lives { state.slot_word(slot, 0).load(Ordering::Acquire) } else { 0 };
            for number in 0..(count as usize).min(MAX_RANGES) {
                let word =
                    |word: usize| state.slot_word(slot, 512 + 2 * number + word).load(Ordering::Relaxed);
                ranges.push(word(0)..word(1));
            }
        }
        ranges.sort_by_key(|range| range.start);
        Ok(ranges)
    }

    /// Marks a block as absent.
    pub fn clear_present(&self, block: u64, bytes: u64) {
        let bit = 1 << (block % 64);
        if self.state.bits(block as usize / 64).fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
            self.state.words.at(USED).fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Where the last eviction ended.
    pub fn hand(&self) -> u64 {
        self.state.words.at(HAND).load(Ordering::Relaxed).min(self.state.num_blocks)
    }

    /// Sets where this eviction ended.
    pub fn set_hand(&self, block: u64) {
        self.state.words.at(HAND).store(block, Ordering::Relaxed);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _ = unlock(&self.state.lock, one(STATE_BYTE)); // cannot fail for a lock that is held
    }
}

fn one(byte: u64) -> Range<u64> {
    byte..byte + 1
}

fn fetch_bytes(blocks: &Range<u64>, turn: u64) -> Range<u64> {
    let offset = FETCH_BYTE + turn * TURN_BYTES;
    offset + blocks.start..offset + blocks.end
}

fn lock_failed(error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::TimedOut {
        return Error::io("the cache's lock", error);
    }
    let advice = format!("{error}: the cache must lie on a local disk; choose another data.cache_dir");
    Error::io("the cache's lock", std::io::Error::new(error.kind(), advice))
}
