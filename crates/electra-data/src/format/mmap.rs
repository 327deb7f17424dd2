//! One mapped file of a corpus whose blocks are checked the first time they are touched.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::Mmap;

use super::header::{BLOCK, HEADER, Header, Kind, Layout, block_hash, read_u64};
use crate::error::{Error, Result};

/// Bytes that a processor fetches at once.
#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;
const REMEDY: &str = "restore the file from a copy or prepare the corpus again";

/// A read-only file with its header parsed, its length checked and its checksums at hand.
#[derive(Debug)]
pub(super) struct Mapped {
    path: PathBuf,
    map: Mmap,
    pub header: Header,
    pub layout: Layout,
    /// One bit a block: its checksum was compared and is right.
    verified: Box<[AtomicU64]>,
}

impl Mapped {
    /// Maps a file after comparing its length with what its header promises.
    pub fn open(path: &Path) -> Result<Self> {
        let file = open_existing(path)?;
        let length = file.metadata().map_err(|e| Error::io(path, e))?.len();
        if length < (HEADER + 8) as u64 {
            return Err(damaged(path, format!("{length} bytes are too few for a shard: it was cut off")));
        }
        // SAFETY: the map is read-only and private to this struct; finished shards are never written
        // to in place (they are replaced by rename), so the mapped bytes do not change under us.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        let start: &[u8; HEADER] =
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

    /// Refuses a file that is sound but not the one that the manifest means.
    pub fn expect(self, kind: Kind, num_tokens: u64, num_documents: u64, tokenizer: u64) -> Result<Self> {
        let header = &self.header;
        let found = (header.kind, header.num_tokens, header.num_documents, header.tokenizer_hash);
        if found == (kind, num_tokens, num_documents, tokenizer) {
            return Ok(self);
        }
        Err(damaged(&self.path, "block 0: it belongs to another corpus than the manifest".into()))
    }

    /// Refuses a file that something has cut since it was mapped: touching a page that is gone would end
    /// the process. What happens between this look and the touch nobody can prevent.
    pub fn expect_whole(&self) -> Result<()> {
        match std::fs::metadata(&self.path) {
            Ok(now) if now.len() < self.map.len() as u64 => {
                let (now, then) = (now.len(), self.map.len());
                Err(damaged(
                    &self.path,
                    format!("{now} bytes instead of {then}: cut off while it was in use"),
                ))
            }
            _ => Ok(()), // a file that grew is sound where it was, one that was removed stays readable through its map
        }
    }

    /// The bytes of a range, every block of which is known to be sound on return.
    #[inline]
    pub fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        if !range.is_empty() {
            for block in range.start / BLOCK..=(range.end - 1) / BLOCK {
                let bit = 1 << (block % 64);
                if self.verified[block / 64].load(Ordering::Relaxed) & bit == 0 {
                    self.check_block(block)?;
                }
            }
        }
        Ok(&self.map[range])
    }

    /// Asks the processor for a range's bytes ahead of their use, without waiting or checking.
    #[inline]
    pub fn prefetch(&self, range: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if let Some(bytes) = self.map.get(range) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            for line in bytes.chunks(CACHE_LINE) {
                // SAFETY: a prefetch is a hint that never faults, whatever the address; SSE, which
                // it belongs to, is part of every x86-64.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = range;
    }

    /// The hash of the block table, by which the manifest knows this file's whole content.
    pub fn table(&self) -> &[u8] {
        &self.map[self.layout.table..self.layout.file_length - 8]
    }

    /// Every block that is not what was written.
    pub fn damaged_blocks(&self) -> Vec<usize> {
        (0..self.layout.num_blocks).filter(|&block| self.check_block(block).is_err()).collect()
    }

    /// The file this is.
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
        let end = ((block + 1) * BLOCK).min(self.layout.table);
        let stored = read_u64(&self.table()[block * 8..]);
        if block_hash(&self.map[block * BLOCK..end]) != stored {
            let count = self.layout.num_blocks;
            return Err(damaged(&self.path, format!("block {block} of {count} is damaged")));
        }
        self.verified[block / 64].fetch_or(1 << (block % 64), Ordering::Relaxed);
        Ok(())
    }
}

/// An error about this file with the remedy that all of them share.
pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason: format!("{reason}; {REMEDY}") }
}

/// Opens a file that the manifest names; one that is gone counts as damage.
fn open_existing(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => damaged(path, "missing, though the manifest names it".into()),
        _ => Error::io(path, error),
    })
}
