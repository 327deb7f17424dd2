//! The files of a corpus as ranges of blocks, computed from the manifest without requests to the store.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::state::{LOCK, STATE};
use crate::error::Result;
use crate::format::atomic_file::is_temp;
use crate::format::damage::damaged;
use crate::format::header::{BLOCK_BYTES, Layout};
use crate::format::manifest::{FileEntry, MANIFEST, Manifest};

/// A file of the corpus. Its blocks have consecutive numbers over all files; the last one is the table of checksums.
#[derive(Clone, Debug)]
pub(in crate::format) struct FileGeometry {
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// Hash of the table of checksums, as in the manifest.
    pub hash: String,
    /// Number of its first block.
    pub first: u64,
    /// Blocks that have a checksum.
    pub num_blocks: u64,
    /// Offset of the table of documents.
    pub index: u64,
    /// Offset of the table of checksums.
    pub table: u64,
    /// Offset of the file in the single file of a private cache.
    pub base: u64,
}

/// More blocks than any corpus has: 70 PB.
const MAX_BLOCKS: u64 = 1 << 40;

/// All files, two per shard. Their names must be unique in the cache's folder, which also holds the cache's own files.
pub(super) fn files_of(manifest: &Manifest, url: &str) -> Result<Vec<FileGeometry>> {
    let mut files = Vec::with_capacity(2 * manifest.shards.len());
    let mut names = HashSet::from([STATE, LOCK, MANIFEST]);
    let mut claim = |name| match names.insert(name) && !is_temp(name) {
        true => Ok(()),
        false => Err(damaged(
            &Path::new(url).join(name),
            "no release gives a file of a corpus this name, or gives it twice".into(),
        )),
    };
    claim(&manifest.tokenizer.file)?;
    let (mut first, mut base) = (0, 0);
    for shard in &manifest.shards {
        for (entry, index_width) in [(&shard.tokens, 4), (&shard.lines, 8)] {
            claim(&entry.file)?;
            let file = FileGeometry::of(entry, (first, base), index_width * shard.num_documents, url)?;
            (first, base) = (file.blocks().end, base + file.bytes.next_multiple_of(BLOCK_BYTES as u64));
            files.push(file);
        }
    }
    Ok(files)
}

impl FileGeometry {
    fn of(entry: &FileEntry, (first, base): (u64, u64), index_bytes: u64, url: &str) -> Result<Self> {
        let layout = Layout::from_length(entry.bytes, index_bytes);
        let is_possible = |layout: &Layout| first + (layout.num_blocks as u64) < MAX_BLOCKS;
        let layout = layout.filter(is_possible).ok_or_else(|| {
            damaged(
                &Path::new(url).join(&entry.file),
                "its length contradicts its number of documents".into(),
            )
        })?;
        Ok(Self {
            name: entry.file.clone(),
            bytes: entry.bytes,
            hash: entry.hash.clone(),
            first,
            num_blocks: layout.num_blocks as u64,
            index: layout.index as u64,
            table: layout.table as u64,
            base,
        })
    }

    /// The offsets of its parts.
    pub fn layout(&self) -> Layout {
        Layout {
            index: self.index as usize,
            table: self.table as usize,
            num_blocks: self.num_blocks as usize,
            file_length: self.bytes as usize,
        }
    }

    /// The numbers of all blocks.
    pub fn blocks(&self) -> Range<u64> {
        self.first..self.first + self.num_blocks + 1
    }

    /// The number of the table of checksums.
    pub fn table_block(&self) -> u64 {
        self.first + self.num_blocks
    }

    /// The blocks of the tables of documents and checksums: what is needed before anything else can be read.
    pub fn tail(&self) -> Range<u64> {
        self.first + self.index / BLOCK_BYTES as u64..self.blocks().end
    }

    /// The blocks that a range of bytes before the table of checksums touches.
    pub fn blocks_of(&self, bytes: Range<u64>) -> Range<u64> {
        let block = BLOCK_BYTES as u64;
        let end = bytes.end.min(self.table).div_ceil(block);
        self.first + (bytes.start / block).min(end)..self.first + end
    }

    /// The bytes of a range of its blocks.
    pub fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let edge = |block: u64| match block - self.first {
            local if local <= self.num_blocks => self.table.min(local * BLOCK_BYTES as u64),
            _ => self.bytes,
        };
        edge(blocks.start)..edge(blocks.end)
    }
}
