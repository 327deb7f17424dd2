//! A memory-mapped file of a corpus. Each block is verified when it is first read, and readers check now and then
//! whether the file has been written to since. If a file is truncated while it is mapped, `bus_error` explains the
//! crash, on Linux.
//!
//! The file is on disk, or it is the sparse local copy of one in an object store (see `block_cache`), whose blocks are
//! fetched when they are first read unless they have been prefetched.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::SystemTime;

use memmap2::Mmap;

use super::block_cache::BlockCache;
#[cfg(target_os = "linux")]
use super::bus_error;
use super::checksum::{block_hash, hash_hex};
use super::damage::{access_error, damaged};
use super::header::{BLOCK_BYTES, FileKind, HEADER_BYTES, Header, Layout, read_u64};
use crate::error::{Error, Result};
use crate::regular_file;

/// Files that this process has mapped.
static NUM_MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Bytes per cache line.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// A read-only mapping with a parsed header and a checked length.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
    pub header: Header,
    pub layout: Layout,
    backing: Backing,
}

/// Where the bytes come from, and which blocks have been verified: one bit each.
#[derive(Debug)]
enum Backing {
    Local { verified: Box<[AtomicU64]>, modified: Option<SystemTime>, inode: u64 },
    Cached { cache: Arc<BlockCache>, first: u64 },
}

impl MappedFile {
    /// Maps a file and checks its header, its length and its table of checksums.
    pub fn open(path: &Path) -> Result<Self> {
        let file = regular_file::open(path).map_err(|e| access_error(path, e))?;
        let metadata = file.metadata().map_err(|e| Error::io(path, e))?;
        let (length, modified, inode) = (metadata.len(), metadata.modified().ok(), metadata.ino());
        if length < (HEADER_BYTES + 8) as u64 {
            return Err(damaged(path, format!("{length} bytes are too few for a shard: it was cut off")));
        }
        #[cfg(target_os = "linux")]
        bus_error::explain();
        // SAFETY: the map is read-only and private to this struct; this crate never modifies finished shards in place
        // (they are replaced by rename). Other programs may: every read copies what it then checks, `expect_unchanged`
        // notices soon, and a missing page ends the process with a message.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        let start: &[u8; HEADER_BYTES] =
            map.first_chunk().ok_or_else(|| damaged(path, "it was cut off while being opened".into()))?;
        let header = Header::parse(start).map_err(|reason| damaged(path, format!("block 0: {reason}")))?;
        let layout = header.layout().ok_or_else(|| damaged(path, "impossible lengths".into()))?;
        if layout.file_length != map.len() {
            let expected = layout.file_length;
            return Err(damaged(path, format!("{} bytes instead of {expected}: truncated", map.len())));
        }
        let verified = (0..layout.num_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let backing = Backing::Local { verified, modified, inode };
        let mapped = Self::new(path.to_owned(), map, header, layout, backing);
        mapped.check_table()?;
        mapped.check_block(0)?;
        Ok(mapped)
    }

    fn new(path: PathBuf, map: Mmap, header: Header, layout: Layout, backing: Backing) -> Self {
        NUM_MAPPED.fetch_add(1, Ordering::Relaxed);
        Self { path, map, header, layout, backing }
    }

    /// Maps the cached copy of a file in an object store. Its header must be `expected`, except that a line file's
    /// header gives the length of its body. Fetches the tables at the file's end unless they are present.
    pub fn cached(cache: &Arc<BlockCache>, file: usize, expected: Header) -> Result<Self> {
        let (geometry, path) = (cache.geometry(file), cache.url(file));
        cache.require(geometry.tail())?;
        let map = cache.map(file)?;
        let layout = geometry.layout();
        let backing = Backing::Cached { cache: cache.clone(), first: geometry.first };
        let mut mapped = Self::new(path, map, expected, layout, backing);
        mapped.check_cached_table(cache, file)?;
        if expected.kind == FileKind::Lines {
            let start: [u8; HEADER_BYTES] = *mapped.bytes(0..HEADER_BYTES)?.first_chunk().expect("64 bytes");
            mapped.header = Header::parse(&start)
                .map_err(|reason| damaged(&mapped.path, format!("block 0: {reason}")))?;
        }
        if mapped.header.layout() != Some(layout) {
            return Err(damaged(&mapped.path, "its lengths contradict the manifest".into()));
        }
        Ok(mapped)
    }

    /// The number of files that this process has mapped, in all corpora.
    pub fn num_mapped() -> usize {
        NUM_MAPPED.load(Ordering::Relaxed)
    }

    /// Rejects an intact file that is not the one that the manifest names.
    pub fn expect(self, kind: FileKind, num_tokens: u64, num_documents: u64, tokenizer: u64) -> Result<Self> {
        let header = &self.header;
        let found = (header.kind, header.num_tokens, header.num_documents, header.tokenizer_hash);
        if found == (kind, num_tokens, num_documents, tokenizer) {
            return Ok(self);
        }
        Err(damaged(&self.path, "block 0: it belongs to another corpus than the manifest".into()))
    }

    /// Rejects a file that was written to after it was mapped, judging by its length and modification time, because
    /// verified blocks are not verified again. Removing or replacing the file does not change the mapped bytes.
    pub fn expect_unchanged(&self) -> Result<()> {
        let Backing::Local { modified, inode, .. } = &self.backing else {
            return Ok(()); // nobody but this crate writes to the cache
        };
        let Some(now) = std::fs::metadata(&self.path).ok().filter(|now| now.ino() == *inode) else {
            return Ok(());
        };
        let (length, expected) = (now.len(), self.map.len());
        if length != expected as u64 {
            let what = if length < expected as u64 { "cut off" } else { "changed" };
            let reason = format!("{length} bytes instead of {expected}: {what} while it was in use");
            return Err(damaged(&self.path, reason));
        }
        if now.modified().ok() != *modified {
            return Err(damaged(&self.path, "written to while it was in use".into()));
        }
        Ok(())
    }

    /// The bytes of a range, after verifying every block that it touches.
    #[inline]
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        if !range.is_empty() {
            let blocks = range.start / BLOCK_BYTES..(range.end - 1) / BLOCK_BYTES + 1;
            for block in blocks.clone() {
                let (word, bit) = self.verified(block);
                if word.load(Ordering::Relaxed) & bit == 0 {
                    self.require(block..blocks.end)?;
                    self.check_block(block)?;
                }
            }
        }
        Ok(&self.map[range])
    }

    /// The word and the bit that say whether a block has been verified.
    #[inline]
    fn verified(&self, block: usize) -> (&AtomicU64, u64) {
        match &self.backing {
            Backing::Local { verified, .. } => (&verified[block / 64], 1 << (block % 64)),
            Backing::Cached { cache, first, .. } => {
                let block = first + block as u64;
                (cache.verified.at(block as usize / 64), 1 << (block % 64))
            }
        }
    }

    /// Fetches absent blocks.
    fn require(&self, blocks: Range<usize>) -> Result<()> {
        match &self.backing {
            Backing::Local { .. } => Ok(()),
            Backing::Cached { cache, first, .. } => {
                cache.require(first + blocks.start as u64..first + blocks.end as u64)
            }
        }
    }

    /// Prefetches a range into the processor's cache, without waiting and without verifying it.
    #[inline]
    pub fn prefetch(&self, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(bytes) = self.map.get(range) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for line in bytes.chunks(CACHE_LINE) {
                // SAFETY: a prefetch is a hint that never faults, whatever the address, and every x86-64
                // has SSE.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = range;
    }

    /// The checksums of all blocks. The manifest stores their hash, which covers the whole content.
    pub fn table(&self) -> &[u8] {
        &self.map[self.layout.table..self.layout.file_length - 8]
    }

    /// The numbers of all blocks whose checksum is wrong. Fetches the whole file if it is in a store.
    pub fn damaged_blocks(&self) -> Result<Vec<usize>> {
        self.require(0..self.layout.num_blocks)?;
        Ok((0..self.layout.num_blocks).filter(|&block| self.check_block(block).is_err()).collect())
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_table(&self) -> Result<()> {
        let stored = read_u64(&self.map[self.layout.file_length - 8..]);
        if block_hash(self.table()) == stored {
            return Ok(());
        }
        Err(damaged(&self.path, "the table of checksums is damaged".into()))
    }

    #[cold]
    fn check_block(&self, block: usize) -> Result<()> {
        self.expect_unchanged()?;
        if !self.is_sound(block) {
            if let Backing::Cached { cache, first, .. } = &self.backing {
                cache.restore(first + block as u64)?; // a machine crash lost what had been written
            }
            if !self.is_sound(block) {
                let count = self.layout.num_blocks;
                return Err(damaged(&self.path, format!("block {block} of {count} is damaged")));
            }
        }
        let (word, bit) = self.verified(block);
        word.fetch_or(bit, Ordering::Relaxed);
        Ok(())
    }

    fn is_sound(&self, block: usize) -> bool {
        let end = ((block + 1) * BLOCK_BYTES).min(self.layout.table);
        block_hash(&self.map[block * BLOCK_BYTES..end]) == read_u64(&self.table()[block * 8..])
    }

    /// The table of checksums must be the one that the manifest names.
    fn check_cached_table(&self, cache: &BlockCache, file: usize) -> Result<()> {
        if hash_hex(self.table()) != cache.hash(file) {
            cache.restore(cache.geometry(file).table_block())?;
        }
        if hash_hex(self.table()) == cache.hash(file) {
            return Ok(());
        }
        Err(damaged(&self.path, "the table of checksums is damaged".into()))
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        NUM_MAPPED.fetch_sub(1, Ordering::Relaxed);
    }
}
