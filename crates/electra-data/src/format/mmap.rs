//! A memory-mapped file of a corpus. Each block is checked the first time it is read.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Mmap;

use super::header::{BLOCK_BYTES, FileKind, HEADER_BYTES, Header, Layout, block_hash, read_u64};
use crate::error::{Error, Result};

/// Bytes per cache line.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;
const REMEDY: &str = "restore the file from a copy or prepare the corpus again";

/// A read-only mapping with a parsed header and a checked length.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
    pub header: Header,
    pub layout: Layout,
    /// One bit per block: set once its checksum has been verified.
    verified: Box<[AtomicU64]>,
}

impl MappedFile {
    /// Maps a file and checks its header, its length and its table of checksums.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| access_error(path, e))?;
        let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
        if length < (HEADER_BYTES + 8) as u64 {
            return Err(damaged(path, format!("{length} bytes are too few for a shard: it was cut off")));
        }
        // SAFETY: the map is read-only and private to this struct; finished shards are never modified in
        // place (they are replaced by rename), so the mapped bytes do not change.
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
        let mapped = Self { path: path.to_owned(), map, header, layout, verified };
        mapped.check_table()?;
        mapped.check_block(0)?;
        Ok(mapped)
    }

    /// Rejects a sound file that is not the one named by the manifest.
    pub fn expect(self, kind: FileKind, num_tokens: u64, num_documents: u64, tokenizer: u64) -> Result<Self> {
        let header = &self.header;
        let found = (header.kind, header.num_tokens, header.num_documents, header.tokenizer_hash);
        if found == (kind, num_tokens, num_documents, tokenizer) {
            return Ok(self);
        }
        Err(damaged(&self.path, "block 0: it belongs to another corpus than the manifest".into()))
    }

    /// Rejects a file that was truncated after it was mapped: reading a page that is gone would kill the
    /// process. A truncation between this check and the read cannot be caught.
    pub fn expect_whole(&self) -> Result<()> {
        match std::fs::metadata(&self.path) {
            Ok(now) if now.len() < self.map.len() as u64 => {
                let (now, then) = (now.len(), self.map.len());
                Err(damaged(
                    &self.path,
                    format!("{now} bytes instead of {then}: cut off while it was in use"),
                ))
            }
            _ => Ok(()), // growth and removal do not change the mapped bytes
        }
    }

    /// The bytes of a range, after verifying every block that it touches.
    #[inline]
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        if !range.is_empty() {
            for block in range.start / BLOCK_BYTES..=(range.end - 1) / BLOCK_BYTES {
                let bit = 1 << (block % 64);
                if self.verified[block / 64].load(Ordering::Relaxed) & bit == 0 {
                    self.check_block(block)?;
                }
            }
        }
        Ok(&self.map[range])
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

    /// The numbers of all blocks whose checksum is wrong.
    pub fn damaged_blocks(&self) -> Vec<usize> {
        (0..self.layout.num_blocks).filter(|&block| self.check_block(block).is_err()).collect()
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
        self.expect_whole()?;
        let end = ((block + 1) * BLOCK_BYTES).min(self.layout.table);
        let stored = read_u64(&self.table()[block * 8..]);
        if block_hash(&self.map[block * BLOCK_BYTES..end]) != stored {
            let count = self.layout.num_blocks;
            return Err(damaged(&self.path, format!("block {block} of {count} is damaged")));
        }
        self.verified[block / 64].fetch_or(1 << (block % 64), Ordering::Relaxed);
        Ok(())
    }
}

/// An error about a damaged file, with the remedy that all of these share.
pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason: format!("{reason}; {REMEDY}") }
}

/// An error about accessing a file that the manifest names; a missing one counts as damage.
pub(super) fn access_error(path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => damaged(path, "missing, though the manifest names it".into()),
        _ => Error::io(path, error),
    }
}
