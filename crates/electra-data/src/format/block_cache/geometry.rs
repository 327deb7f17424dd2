//! The files of a corpus as ranges of blocks, computed from the manifest without requests to the store.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::state::{LOCK, STATE};
use crate::error::Result;
use crate::format::atomic_file::is_temp;
use crate::format::damage::damaged;
use crate::format::header::{BLOCK_BYTES, Layout};
use crate::format::manifest::{FileEntry, MANIFEST, Manifest};

/// The files of a corpus: number 2 s is the `.tokens` of shard s, 2 s + 1 its `.lines`.
#[derive(Debug)]
pub(super) struct Files {
    manifest: Arc<Manifest>,
    /// The first block of each file, and the total at the end.
    first: Vec<u64>,
}

/// A file of the corpus. Its blocks have consecutive numbers over all files; the last one is the table of checksums.
#[derive(Clone, Copy, Debug)]
pub(in crate::format) struct FileGeometry {
    /// Length of the file.
    pub bytes: u64,
    /// Number of its first block.
    pub first: u64,
    /// Blocks that have a checksum.
    pub num_blocks: u64,
    /// Offset of the table of documents.
    pub index: u64,
    /// Offset of the table of checksums.
    pub table: u64,
}

/// More blocks than any corpus has: 70 PB.
const MAX_BLOCKS: u64 = 1 << 40;

impl Files {
    /// All files. Their names must be unique in the cache's folder, which also holds the cache's own files.
    pub fn new(manifest: &Arc<Manifest>, url: &str) -> Result<Self> {
        let mut names = HashSet::from([STATE, LOCK, MANIFEST]);
        let wrong = |name: &str, reason: &str| damaged(&Path::new(url).join(name), reason.into());
        let mut claim = |name| match names.insert(name) && !is_temp(name) {
            true => Ok(()),
            false => Err(wrong(name, "no release gives a file of a corpus this name, or gives it twice")),
        };
        claim(&manifest.tokenizer.file)?;
        let mut files = Self { manifest: manifest.clone(), first: vec![0] };
        for number in 0..2 * manifest.shards.len() {
            let entry = entry_of(manifest, number);
            claim(&entry.file)?;
            let first = files.num_blocks();
            match files.layout(number) {
                Some(layout) if first + (layout.num_blocks as u64) < MAX_BLOCKS => {
                    files.first.push(first + layout.num_blocks as u64 + 1);
                }
                _ => return Err(wrong(&entry.file, "its length contradicts its number of documents")),
            }
        }
        Ok(files)
    }

    /// The blocks of all files.
    pub fn num_blocks(&self) -> u64 {
        self.first[self.first.len() - 1]
    }

    /// The number of the file that has a block.
    pub fn of_block(&self, block: u64) -> usize {
        self.first.partition_point(|&first| first <= block) - 1
    }

    /// The name of a file, its length, and the hash of its table of checksums.
    pub fn entry(&self, number: usize) -> &FileEntry {
        entry_of(&self.manifest, number)
    }

    /// Where the parts of a file are.
    pub fn geometry(&self, number: usize) -> FileGeometry {
        let layout = self.layout(number).expect("checked when the cache was opened");
        FileGeometry {
            bytes: self.entry(number).bytes,
            first: self.first[number],
            num_blocks: layout.num_blocks as u64,
            index: layout.index as u64,
            table: layout.table as u64,
        }
    }

    fn layout(&self, number: usize) -> Option<Layout> {
        let index_width = if number.is_multiple_of(2) { 4 } else { 8 };
        Layout::from_length(
            self.entry(number).bytes,
            index_width * self.manifest.shards[number / 2].num_documents,
        )
    }
}

fn entry_of(manifest: &Manifest, number: usize) -> &FileEntry {
    let shard = &manifest.shards[number / 2];
    if number.is_multiple_of(2) { &shard.tokens } else { &shard.lines }
}

impl FileGeometry {
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
