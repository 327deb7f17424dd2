//! Reading one shard: tokens, where documents end, and how long their lines are.
//!
//! A shard is two files (see `format`), mapped when first touched. `store` opens whole corpora.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::header::{HEADER, Kind, read_u64};
use super::manifest::{Manifest, ShardEntry};
use super::mmap::{Mapped, damaged};
use crate::error::{Error, Result};

/// A run of documents on disk. Cheap to hold: nothing is read before it is needed.
#[derive(Debug)]
pub struct Shard {
    tokens_path: PathBuf,
    lines_path: PathBuf,
    num_tokens: u64,
    num_documents: u64,
    width: u16,
    tokenizer_hash: u64,
    tokens: OnceLock<Mapped>,
    lines: OnceLock<Mapped>,
    ends_checked: OnceLock<()>,
}

impl Shard {
    /// A shard as the manifest in `dir` describes it.
    pub(crate) fn new(dir: &Path, manifest: &Manifest, entry: &ShardEntry) -> Self {
        Self {
            tokens_path: dir.join(&entry.tokens.file),
            lines_path: dir.join(&entry.lines.file),
            num_tokens: entry.num_tokens,
            num_documents: entry.num_documents,
            width: manifest.token_bytes,
            tokenizer_hash: manifest.tokenizer.hash_value(),
            tokens: OnceLock::new(),
            lines: OnceLock::new(),
            ends_checked: OnceLock::new(),
        }
    }

    /// Tokens in this shard, without any special tokens.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Documents in this shard; each has at least one token.
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// Where each document ends, in tokens from the shard's start: ascending, the last one
    /// [`Shard::num_tokens`].
    pub fn document_ends(&self) -> Result<&[u32]> {
        let file = self.tokens()?;
        file.expect_whole()?;
        let start = file.layout.index;
        let bytes = file.bytes(start..start + self.num_documents as usize * 4)?;
        // SAFETY: any four bytes are a u32; the prefix is empty because maps are page-aligned and
        // the index begins at a multiple of 8 (checked below all the same).
        let (prefix, ends, suffix) = unsafe { bytes.align_to::<u32>() };
        if !prefix.is_empty() || !suffix.is_empty() {
            return Err(damaged(file.path(), "the document table is not aligned".into()));
        }
        if self.ends_checked.get().is_none() {
            self.check_ends(file, ends)?;
            let _ = self.ends_checked.set(());
        }
        Ok(ends)
    }

    /// Copies `out.len()` tokens beginning with the `start`-th, widened to i32.
    ///
    /// Blocks touched for the first time are compared with their checksums.
    #[inline]
    pub fn copy_tokens(&self, start: u64, out: &mut [i32]) -> Result<()> {
        let file = self.tokens()?;
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.num_tokens);
        let Some(end) = end else { return Err(self.out_of_range(start, out.len())) };
        let width = usize::from(self.width);
        let bytes = file.bytes(HEADER + start as usize * width..HEADER + end as usize * width)?;
        if width == 2 {
            for (slot, id) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *slot = i32::from(u16::from_le_bytes(*id));
            }
        } else {
            for (slot, id) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *slot = i32::from_le_bytes(*id);
            }
        }
        Ok(())
    }

    /// Begins to fetch tokens that will be copied soon: reading rows in random order is mostly waiting
    /// for memory. Does nothing where the range is wrong or the file not open yet.
    #[inline]
    pub fn prefetch_tokens(&self, start: u64, count: u32) {
        if let Some(file) = self.tokens.get() {
            let (start, width) = (start as usize, usize::from(self.width));
            file.prefetch(HEADER + start * width..HEADER + (start + count as usize) * width);
        }
    }

    /// Token counts of the lines of one document (0 for a blank line), adding up to its length.
    pub fn line_lengths(&self, document: u64) -> Result<Vec<u32>> {
        let mut lengths = Vec::new();
        self.read_line_lengths(document, &mut lengths)?;
        Ok(lengths)
    }

    /// The same into memory that is used again from document to document.
    pub fn read_line_lengths(&self, document: u64, lengths: &mut Vec<u32>) -> Result<()> {
        let file = self.lines()?;
        if document >= self.num_documents {
            return Err(self.out_of_range(document, 1));
        }
        let offset = |d: u64| {
            let at = file.layout.index + d as usize * 8;
            file.bytes(at..at + 8).map(|bytes| read_u64(bytes) as usize)
        };
        let body = file.header.body_length as usize;
        let start = offset(document)?;
        let end = if document + 1 < self.num_documents { offset(document + 1)? } else { body };
        if start > end || end > body {
            return Err(damaged(file.path(), format!("document {document}: offsets out of order")));
        }
        lengths.clear();
        decode_lengths(file.bytes(HEADER + start..HEADER + end)?, lengths)
            .ok_or_else(|| damaged(file.path(), format!("document {document}: unreadable line lengths")))
    }

    /// What to say when the lines of a document do not add up to it.
    pub(crate) fn contradicted(&self, document: usize) -> Error {
        let reason = format!("document {document}: its lines do not add up to its tokens");
        damaged(&self.lines_path, reason)
    }

    /// The token file, opened and checked on first use.
    pub(super) fn tokens(&self) -> Result<&Mapped> {
        let kind = Kind::Tokens { width: self.width };
        self.open(&self.tokens, &self.tokens_path, kind)
    }

    /// The line file, opened and checked on first use.
    pub(super) fn lines(&self) -> Result<&Mapped> {
        self.open(&self.lines, &self.lines_path, Kind::Lines)
    }

    #[inline]
    fn open<'a>(&self, cell: &'a OnceLock<Mapped>, path: &Path, kind: Kind) -> Result<&'a Mapped> {
        if let Some(file) = cell.get() {
            return Ok(file);
        }
        let (tokens, documents) = (self.num_tokens, self.num_documents);
        let file = Mapped::open(path)?.expect(kind, tokens, documents, self.tokenizer_hash)?;
        Ok(cell.get_or_init(|| file))
    }

    fn check_ends(&self, file: &Mapped, ends: &[u32]) -> Result<()> {
        let ascending = ends.first().is_none_or(|&first| first > 0) && ends.is_sorted_by(|a, b| a < b);
        if ascending && ends.last().map_or(0, |&end| u64::from(end)) == self.num_tokens {
            return Ok(());
        }
        Err(damaged(file.path(), "the document table contradicts the number of tokens".into()))
    }

    fn out_of_range(&self, start: u64, count: usize) -> Error {
        let (tokens, documents) = (self.num_tokens, self.num_documents);
        let path = self.tokens_path.display();
        Error::Input(format!(
            "{path}: {count} from {start} is outside its {tokens} tokens in {documents} documents"
        ))
    }
}

/// Appends unsigned LEB128 numbers until the bytes end; `None` if they end inside a number.
fn decode_lengths(bytes: &[u8], lengths: &mut Vec<u32>) -> Option<()> {
    let (mut value, mut shift) = (0_u32, 0);
    for &byte in bytes {
        let bits = u32::from(byte & 0x7f);
        let shifted = bits.checked_shl(shift)?;
        if shifted >> shift != bits {
            return None;
        }
        value |= shifted;
        shift += 7;
        if byte & 0x80 == 0 {
            lengths.push(value);
            (value, shift) = (0, 0);
        }
    }
    (shift == 0).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_lengths_decode() {
        let mut lengths = vec![7];
        decode_lengths(&[0, 5, 0x80, 1, 0xff, 0xff, 0xff, 0xff, 0x0f], &mut lengths).unwrap();
        assert_eq!(lengths, [7, 0, 5, 128, u32::MAX]);
        assert!(decode_lengths(&[0x80], &mut lengths).is_none());
        assert!(decode_lengths(&[0x80; 9], &mut lengths).is_none());
        assert!(decode_lengths(&[0xff, 0xff, 0xff, 0xff, 0x1f], &mut lengths).is_none());
    }
}
