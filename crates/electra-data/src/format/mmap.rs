//! A memory-mapped file of a corpus. Each block is verified on first read, and readers check from time to time
//! whether the file has been modified.
//!
//! The file is on disk or in an object store. For a file in a store, runs of its blocks are mapped (see `block_cache`);
//! they are fetched on first read unless they have been prefetched.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::SystemTime;

use memmap2::Mmap;

use super::block_cache::{BlockCache, CachedFile, Pins};
use super::damage::{access_error, damaged, foreign, wrong_length};
use super::header::{BLOCK_BYTES, FileKind, HEADER_BYTES, Header, Layout, block_hash, hash_hex, read_u64};
use super::manifest::FileEntry;
use crate::error::{Error, Result};
use crate::regular_file;
use crate::store::Cancel;

static NUM_MAPPED: AtomicUsize = AtomicUsize::new(0);

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// A read-only mapping with a parsed header and a checked length.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    pub header: Header,
    pub layout: Layout,
    backing: Backing,
}

/// The source of the bytes. A local file has a bit per block, set once the block has been verified.
#[derive(Debug)]
enum Backing {
    Local { map: Mmap, verified: Box<[AtomicU64]>, modified: Option<SystemTime>, inode: u64 },
    Cached { cache: Arc<BlockCache>, file: Arc<CachedFile> },
}

impl MappedFile {
    /// Maps the file of an entry of the manifest, and checks its length, its header and its table of checksums.
    pub fn open(path: &Path, entry: &FileEntry) -> Result<Self> {
        let file = regular_file::open(path).map_err(|e| access_error(path, e))?;
        let metadata = file.metadata().map_err(|e| Error::io(path, e))?;
        let (length, modified, inode) = (metadata.len(), metadata.modified().ok(), metadata.ino());
        if length != entry.bytes {
            return Err(wrong_length(path, length, entry.bytes)); // a missing part must not be mapped
        }
        // SAFETY: the map is read-only and private to this struct; this crate never modifies finished shards in place
        // (they are replaced by rename). Other programs may: every read copies bytes before checking them,
        // `expect_unchanged` detects it soon, and a missing page ends the process.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        let start: &[u8; HEADER_BYTES] =
            map.first_chunk().ok_or_else(|| damaged(path, "truncated while being opened".into()))?;
        let header = Header::parse(start).map_err(|reason| damaged(path, format!("block 0: {reason}")))?;
        let layout = header
            .layout()
            .ok_or_else(|| damaged(path, "the lengths in the header are impossible".into()))?;
        if layout.file_length != map.len() {
            let expected = layout.file_length;
            return Err(damaged(path, format!("{} bytes instead of {expected}: truncated", map.len())));
        }
        let table_end = layout.file_length - 8;
        if block_hash(&map[layout.table..table_end]) != read_u64(&map[table_end..]) {
            return Err(damaged(path, "the checksum table is damaged".into()));
        }
        let verified = (0..layout.num_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let backing = Backing::Local { map, verified, modified, inode };
        let mapped = Self::new(path.to_owned(), header, layout, backing);
        mapped.check_block(0)?;
        if hash_hex(mapped.table()) != entry.hash {
            return Err(foreign(path));
        }
        Ok(mapped)
    }

    fn new(path: PathBuf, header: Header, layout: Layout, backing: Backing) -> Self {
        NUM_MAPPED.fetch_add(1, Ordering::Relaxed);
        Self { path, header, layout, backing }
    }

    /// Maps the tables of a file in an object store; they are fetched unless they are present. Its header must be
    /// `expected`, except that a line file's header gives the length of its body.
    pub fn cached(cache: &Arc<BlockCache>, number: usize, expected: Header) -> Result<Self> {
        let (file, path) = (cache.file(number), cache.url(number));
        cache.pin(&[(file.clone(), 0..0)], &Cancel::default())?;
        let layout = file.layout;
        let mut mapped = Self::new(path, expected, layout, Backing::Cached { cache: cache.clone(), file });
        if expected.kind == FileKind::Lines {
            let mut start = Vec::with_capacity(HEADER_BYTES);
            mapped.read(0..HEADER_BYTES, |bytes| start.extend_from_slice(bytes))?;
            mapped.header = Header::parse(start.first_chunk().expect("64 bytes"))
                .map_err(|reason| damaged(&mapped.path, format!("block 0: {reason}")))?;
        }
        if mapped.header.layout() != Some(layout) {
            return Err(damaged(&mapped.path, "its lengths do not match the manifest".into()));
        }
        Ok(mapped)
    }

    pub fn num_mapped() -> usize {
        NUM_MAPPED.load(Ordering::Relaxed)
    }

    pub fn expect(self, header: Header) -> Result<Self> {
        let expected = Header { body_length: self.header.body_length, ..header };
        if self.header == expected { Ok(self) } else { Err(foreign(&self.path)) }
    }

    /// Rejects a file that was modified after it was mapped, according to its length and modification time, because
    /// verified blocks are not verified again. Removing or replacing the file does not change the mapped bytes.
    pub fn expect_unchanged(&self) -> Result<()> {
        let Backing::Local { map, modified, inode, .. } = &self.backing else {
            return Ok(()); // the files of a cache do not change
        };
        let Some(now) = std::fs::metadata(&self.path).ok().filter(|now| now.ino() == *inode) else {
            return Ok(());
        };
        let (length, expected) = (now.len(), map.len());
        if length != expected as u64 {
            let change = if length < expected as u64 { "truncated" } else { "changed" };
            let reason = format!("{length} bytes instead of {expected}: {change} while in use");
            return Err(damaged(&self.path, reason));
        }
        if now.modified().ok() != *modified {
            return Err(damaged(&self.path, "written to while in use".into()));
        }
        Ok(())
    }

    /// Calls `read` with the bytes of a range, in one or more pieces, after verifying every block that it touches.
    #[inline]
    pub fn read(&self, range: Range<usize>, mut read: impl FnMut(&[u8])) -> Result<()> {
        match &self.backing {
            Backing::Local { .. } => self.bytes(range).map(read),
            Backing::Cached { cache, file } => cache.read(file, range, &mut read),
        }
    }

    /// The bytes of a range of a local file, or of a document table, after verifying every block that it touches.
    #[inline]
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        let (map, verified) = match &self.backing {
            Backing::Local { map, verified, .. } => (map, verified),
            Backing::Cached { file, .. } => return Ok(file.tail(range)),
        };
        if !range.is_empty() {
            for block in range.start / BLOCK_BYTES..(range.end - 1) / BLOCK_BYTES + 1 {
                if verified[block / 64].load(Ordering::Acquire) >> (block % 64) & 1 == 0 {
                    self.check_block(block)?;
                }
            }
        }
        Ok(&map[range])
    }

    #[inline]
    pub fn prefetch(&self, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let prefetch = |bytes: &[u8]| {
                for line in bytes.chunks(CACHE_LINE) {
                    // SAFETY: a prefetch is a hint that never faults, whatever the address, and every x86-64 has SSE.
                    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
                }
            };
            match &self.backing {
                Backing::Local { map, .. } => map.get(range).into_iter().for_each(prefetch),
                Backing::Cached { file, .. } => {
                    for (run, part) in file.parts(range) {
                        let _ = file.read(run, &part, prefetch); // an absent block is not prefetched
                    }
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = range;
    }

    pub fn table(&self) -> &[u8] {
        let range = self.layout.table..self.layout.file_length - 8;
        match &self.backing {
            Backing::Local { map, .. } => &map[range],
            Backing::Cached { file, .. } => file.tail(range),
        }
    }

    /// The numbers of all blocks with a wrong checksum. A file in a store is fetched completely, and stays mapped until the
    /// pins are dropped; there, damage is an error.
    pub fn damaged_blocks(&self) -> Result<(Vec<usize>, Option<Pins>)> {
        match &self.backing {
            Backing::Local { .. } => {
                let blocks = 0..self.layout.num_blocks;
                Ok((blocks.filter(|&block| self.check_block(block).is_err()).collect(), None))
            }
            Backing::Cached { cache, file } => {
                let whole = (file.clone(), 0..self.layout.table);
                Ok((Vec::new(), Some(cache.pin(&[whole], &Cancel::default())?)))
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    #[cold]
    fn check_block(&self, block: usize) -> Result<()> {
        let Backing::Local { map, verified, .. } = &self.backing else { return Ok(()) };
        self.expect_unchanged()?;
        let end = ((block + 1) * BLOCK_BYTES).min(self.layout.table);
        if block_hash(&map[block * BLOCK_BYTES..end]) != read_u64(&self.table()[block * 8..]) {
            let count = self.layout.num_blocks;
            return Err(damaged(&self.path, format!("block {block} of {count} is damaged")));
        }
        verified[block / 64].fetch_or(1 << (block % 64), Ordering::Release);
        Ok(())
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        NUM_MAPPED.fetch_sub(1, Ordering::Relaxed);
    }
}
