//! A local cache of a corpus in an object store: one sparse file per file of the corpus, filled block by block.
//!
//! A block is what a checksum covers (64 KiB), or the table of checksums at the end of a file. A reader pins the blocks
//! that it is about to use (`BlockCache::pin`) and fetches those that are absent (`fetch`). Each is verified before it
//! counts as present. When the cache is full, blocks that no reader on the node has pinned are evicted by punching
//! holes in the files. Nothing on disk is trusted: every process verifies each block again on first use, because a
//! machine crash may lose blocks that the state lists as present.

mod fetch;
mod geometry;
#[cfg_attr(not(target_os = "linux"), path = "unshared.rs")]
mod locks;
mod state;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{Mmap, MmapOptions};

use self::locks::punch_hole;
use self::state::SharedState;
use super::atomic_file::write_error;
use super::damage::damaged;
use super::header::BLOCK_BYTES;
use super::manifest::Manifest;
use crate::error::{Error, Result};
use crate::store::{Cancel, Store};

pub(super) use self::geometry::FileGeometry;
use self::geometry::Files;
pub(super) use self::state::Words;

/// How many ranges that were read without being pinned first stay pinned.
const MAX_UNANNOUNCED: usize = 4_096;

/// Where a corpus in a store is cached, and how much of it.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The folder of all caches, on a local disk; each corpus has a folder in it.
    pub dir: PathBuf,
    /// The most bytes of a corpus that are kept.
    pub bytes: u64,
}

/// The cache of one corpus, opened by one reader.
#[derive(Debug)]
pub(super) struct BlockCache {
    storage: Storage,
    store: Store,
    files: Files,
    state: SharedState,
    limit: u64,
    /// How often each range of blocks is pinned by this reader.
    pins: Mutex<BTreeMap<(u64, u64), usize>>,
    /// Ranges that were read without being pinned first, which stay pinned until many others have been.
    unannounced: Mutex<VecDeque<(u64, u64)>>,
    /// One bit per block: set once this process has verified it, and cleared when it is no longer pinned.
    pub verified: Words,
}

/// Where the blocks are kept.
#[derive(Debug)]
enum Storage {
    /// A folder with one sparse file per file of the corpus, shared by the readers of this node.
    Folder(PathBuf),
    /// An unnamed file that holds all of them: the system removes it when its only reader ends, however that ends.
    /// Each file of the corpus gets a place when it is first used, because all together may exceed what a file can have.
    Private(File, Mutex<Places>),
}

/// Where files of the corpus begin in a private cache, and where the next one will.
#[derive(Debug, Default)]
struct Places {
    begin: HashMap<usize, u64>,
    end: u64,
}

/// Blocks that are not evicted until this is dropped.
#[derive(Debug)]
pub(crate) struct Pins {
    cache: Arc<BlockCache>,
    ranges: Vec<Range<u64>>,
}

impl BlockCache {
    /// The cache of a corpus in a store: shared by all readers on this node, or private without options.
    pub fn open(store: Store, manifest: &Arc<Manifest>, options: Option<&CacheOptions>) -> Result<Self> {
        let files = Files::new(manifest, store.url())?;
        let num_blocks = files.num_blocks();
        let (storage, limit) = match options {
            Some(_) if cfg!(not(target_os = "linux")) => {
                let url = store.url();
                return Err(Error::Input(format!(
                    "{url}: the cache of a corpus in an object store needs Linux; copy the corpus to a local folder"
                )));
            }
            Some(options) => {
                // The checksum of the manifest, because the content hash does not cover lengths.
                let dir = options.dir.join(&manifest.checksum);
                std::fs::create_dir_all(&dir).map_err(|error| write_error(&dir, error))?;
                (Storage::Folder(dir), options.bytes)
            }
            None => {
                let file = tempfile::tempfile().map_err(|error| write_error(&std::env::temp_dir(), error))?;
                (Storage::Private(file, Mutex::default()), u64::MAX)
            }
        };
        let state = SharedState::open(storage.dir(), num_blocks, |block| {
            let bytes = files.geometry(files.of_block(block)).bytes_of(&(block..block + 1));
            bytes.end - bytes.start
        })?;
        let verified = Words::private(num_blocks.div_ceil(64) as usize)?;
        let (pins, unannounced) = (Mutex::default(), Mutex::default());
        Ok(Self { storage, store, files, state, limit, pins, unannounced, verified })
    }

    /// The geometry of a file: number 2 s is the `.tokens` of shard s, 2 s + 1 its `.lines`.
    pub fn geometry(&self, file: usize) -> FileGeometry {
        self.files.geometry(file)
    }

    /// The hash of a file's table of checksums, as in the manifest.
    pub fn hash(&self, file: usize) -> &str {
        &self.files.entry(file).hash
    }

    fn geometry_at(&self, block: u64) -> FileGeometry {
        self.geometry(self.file_of(block))
    }

    /// The folder of the cached files; a private cache has none.
    pub fn dir(&self) -> Option<&Path> {
        self.storage.dir()
    }

    /// The most bytes that are kept; a private cache has no limit.
    pub fn limit(&self) -> Option<u64> {
        self.dir().map(|_| self.limit)
    }

    /// Where the bytes of a file are kept.
    fn path(&self, file: usize) -> PathBuf {
        self.dir().map_or_else(std::env::temp_dir, |dir| dir.join(&self.files.entry(file).file))
    }

    /// The URL of a file.
    pub fn url(&self, file: usize) -> PathBuf {
        PathBuf::from(format!("{}/{}", self.store.url(), self.files.entry(file).file))
    }

    /// A read-only map of a file's cached copy.
    pub fn map(&self, number: usize) -> Result<Mmap> {
        let (geometry, (file, begin)) = (self.geometry(number), self.local_file(number)?);
        let length = usize::try_from(geometry.bytes).unwrap_or(usize::MAX);
        // SAFETY: the file has this length. Its bytes change only when blocks are fetched or evicted, and blocks are
        // read only while they are pinned and after they were verified.
        let map = unsafe { MmapOptions::new().offset(begin).len(length).map(&file) };
        map.map_err(|error| Error::io(self.path(number), error))
    }

    /// The sparse file that holds the cached blocks of a file, and where in it that file begins.
    fn local_file(&self, number: usize) -> Result<(File, u64)> {
        let (geometry, path) = (self.geometry(number), self.path(number));
        if let Storage::Private(file, places) = &self.storage {
            let mut places = places.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = places.begin.get(&number).copied().unwrap_or(places.end);
            if begin == places.end {
                let end = begin + geometry.bytes.next_multiple_of(BLOCK_BYTES as u64);
                file.set_len(end).map_err(|error| write_error(&path, error))?;
                (_, places.end) = (places.begin.insert(number, begin), end);
            }
            return Ok((file.try_clone().map_err(|error| Error::io(path, error))?, begin));
        }
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(|error| write_error(&path, error))?;
        let length = || file.metadata().map(|found| found.len()).map_err(|error| Error::io(&path, error));
        if length()? != geometry.bytes {
            let held = self.state.hold()?;
            // It is new or was removed, unless another reader has just created it.
            if length()? != geometry.bytes {
                self.state.present(geometry.blocks()).for_each(|block| self.clear(&held, block));
                file.set_len(geometry.bytes).map_err(|error| write_error(&path, error))?;
            }
        }
        Ok((file, 0))
    }

    /// Protects blocks from eviction until the result is dropped.
    pub fn pin(self: &Arc<Self>, ranges: Vec<Range<u64>>) -> Result<Pins> {
        self.change_pins(|pins| {
            ranges.iter().for_each(|range| *pins.entry((range.start, range.end)).or_default() += 1);
        })?;
        Ok(Pins { cache: self.clone(), ranges })
    }

    /// Fetches blocks that are read without being pinned first, if they are absent, and pins them until thousands of
    /// others have been read in the same way.
    ///
    /// The table that verifies them stays pinned too, because this process verifies them on first use.
    pub fn require(&self, blocks: Range<u64>) -> Result<()> {
        let table = self.geometry_at(blocks.start).table_block();
        for range in [table..table + 1, blocks.clone()] {
            if self.dir().is_some() && !self.is_pinned(&range) {
                self.pin_unannounced((range.start, range.end))?;
            }
        }
        self.fetch(std::slice::from_ref(&blocks), &Cancel::default())
    }

    fn pin_unannounced(&self, key: (u64, u64)) -> Result<()> {
        self.change_pins(|pins| *pins.entry(key).or_default() += 1)?;
        let mut ranges = self.unannounced.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.push_back(key);
        let oldest = (ranges.len() > MAX_UNANNOUNCED).then(|| ranges.pop_front()).flatten();
        drop(ranges);
        oldest.map_or(Ok(()), |(start, end)| self.unpin(std::slice::from_ref(&(start..end))))
    }

    fn is_pinned(&self, blocks: &Range<u64>) -> bool {
        let pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        pins.keys().any(|&(start, end)| start <= blocks.start && blocks.end <= end)
    }

    fn unpin(&self, ranges: &[Range<u64>]) -> Result<()> {
        ranges.iter().for_each(|range| self.forget(range.clone()));
        self.change_pins(|pins| {
            for range in ranges {
                let key = (range.start, range.end);
                if let Some(count) = pins.get_mut(&key) {
                    *count -= 1;
                    if *count == 0 {
                        pins.remove(&key);
                    }
                }
            }
        })?;
        // Once more: another thread may have verified one while it was still pinned.
        ranges.iter().for_each(|range| self.forget(range.clone()));
        Ok(())
    }

    fn change_pins(&self, change: impl FnOnce(&mut BTreeMap<(u64, u64), usize>)) -> Result<()> {
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut pins);
        if self.dir().is_none() {
            return Ok(()); // a private cache evicts nothing
        }
        let ranges: Vec<Range<u64>> = pins.keys().map(|&(start, end)| start..end).collect();
        self.state.hold()?.set_in_use(ranges.iter())
    }

    /// Fetches a block again whose bytes on disk have changed.
    pub fn restore(&self, block: u64) -> Result<()> {
        self.clear(&self.state.hold()?, block);
        self.fetch(std::slice::from_ref(&(block..block + 1)), &Cancel::default())
    }

    /// Evicts blocks that no reader uses until there is room for this many bytes, tables last. If all are in use, the
    /// cache exceeds its limit for a while.
    fn make_room(&self, bytes: u64) -> Result<()> {
        if self.state.used().saturating_add(bytes) <= self.limit {
            return Ok(());
        }
        let held = self.state.hold()?;
        let in_use = held.in_use()?;
        let (num_blocks, hand) = (self.files.num_blocks(), held.hand());
        for spare_tables in [true, false] {
            for part in [hand..num_blocks, 0..hand] {
                let mut next = 0; // the first range in use that may contain the block
                for block in self.state.present(part) {
                    if self.state.used().saturating_add(bytes) <= self.limit {
                        held.set_hand(block);
                        return Ok(());
                    }
                    while next < in_use.len() && in_use[next].end <= block {
                        next += 1;
                    }
                    let mut near = in_use[next..].iter().take_while(|range| range.start <= block);
                    let is_spared = spare_tables && self.is_table(block);
                    if !is_spared && !near.any(|range| range.contains(&block)) {
                        self.evict(&held, block)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether a block has what many blocks of tokens need: tables, or line lengths.
    fn is_table(&self, block: u64) -> bool {
        let file = self.file_of(block);
        !file.is_multiple_of(2) || self.geometry(file).tail().contains(&block)
    }

    fn evict(&self, held: &state::Held, block: u64) -> Result<()> {
        self.clear(held, block);
        let number = self.file_of(block);
        let (geometry, path) = (self.geometry(number), self.path(number));
        let file = File::options().write(true).open(&path).map_err(|error| Error::io(&path, error))?;
        punch_hole(&file, geometry.bytes_of(&(block..block + 1))).map_err(|error| {
            let advice =
                format!("{error}: no holes in files; put data.cache_dir on a local disk (ext4, xfs, btrfs)");
            Error::io(&path, std::io::Error::new(error.kind(), advice))
        })
    }

    fn clear(&self, held: &state::Held, block: u64) {
        let bytes = self.geometry_at(block).bytes_of(&(block..block + 1));
        held.clear_present(block, bytes.end - bytes.start);
        self.forget(block..block + 1);
    }

    /// Makes this process verify blocks again on their next use.
    fn forget(&self, blocks: Range<u64>) {
        for block in blocks {
            let word = self.verified.at(block as usize / 64);
            word.fetch_and(!(1 << (block % 64)), std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn file_of(&self, block: u64) -> usize {
        self.files.of_block(block)
    }

    fn damaged(&self, file: usize, reason: String) -> Error {
        damaged(&self.url(file), reason)
    }

    fn cannot_write(&self, path: &Path, error: std::io::Error) -> Error {
        if !matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
            return Error::io(path, error);
        }
        let limit = self.limit;
        let advice =
            format!("{error}: lower data.cache_bytes ({limit} now) or choose another data.cache_dir");
        Error::io(path, std::io::Error::new(error.kind(), advice))
    }
}

impl Storage {
    fn dir(&self) -> Option<&Path> {
        match self {
            Self::Folder(dir) => Some(dir),
            Self::Private(..) => None,
        }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        // If the state cannot be written, the blocks stay in use, which is safe.
        let _ = self.cache.unpin(&self.ranges);
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests;
