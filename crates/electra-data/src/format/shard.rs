//! Reading one shard: its tokens, the ends of its documents, and the lengths of their lines.
//!
//! A shard is two files (see `header`), mapped on first use, on disk or in the cache of an object store. `corpus`
//! opens the shards of a corpus.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::block_cache::BlockCache;
use super::damage::damaged;
use super::header::{FileKind, HEADER_BYTES, Header, read_u64};
use super::manifest::{FileEntry, Manifest, ShardEntry};
use super::mmap::MappedFile;
use crate::error::{Error, Result};

/// A sequence of documents on disk. Opened lazily: nothing is read until it is needed.
#[derive(Debug)]
pub struct Shard {
    files: [ShardFile; 2],
    num_tokens: u64,
    num_documents: u64,
    width: u16,
    vocab_size: u32,
    tokenizer_hash: u64,
    cache: Option<(Arc<BlockCache>, usize)>,
    ends_checked: OnceLock<()>,
}

#[derive(Debug)]
struct ShardFile {
    path: PathBuf,
    entry: FileEntry,
    mapped: OnceLock<MappedFile>,
}

impl Shard {
    pub(crate) fn new(dir: &Path, manifest: &Manifest, entry: &ShardEntry) -> Self {
        let file = |entry: &FileEntry| ShardFile {
            path: dir.join(&entry.file),
            entry: entry.clone(),
            mapped: OnceLock::new(),
        };
        Self {
            files: [file(&entry.tokens), file(&entry.lines)],
            num_tokens: entry.num_tokens,
            num_documents: entry.num_documents,
            width: manifest.token_bytes,
            vocab_size: manifest.tokenizer.vocab_size,
            tokenizer_hash: manifest.tokenizer.hash_value(),
            cache: None,
            ends_checked: OnceLock::new(),
        }
    }

    pub(super) fn cached(cache: &Arc<BlockCache>, number: usize, manifest: &Manifest) -> Self {
        let shard = Self::new(Path::new(cache.folder_url()), manifest, &manifest.shards[number]);
        Self { cache: Some((cache.clone(), number)), ..shard }
    }

    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Documents in this shard; each has at least one token.
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// The end of each document, in tokens from the shard's start: strictly ascending, the last one equal to
    /// [`Shard::num_tokens`]. Checked on first use.
    pub fn document_ends(&self) -> Result<&[u32]> {
        let file = self.tokens()?;
        file.expect_unchanged()?;
        let start = file.layout.index;
        let bytes = file.bytes(start..start + self.num_documents as usize * 4)?;
        // SAFETY: any four bytes are a valid u32. The prefix is empty because maps are page-aligned and
        // the index begins at a multiple of 8; this is checked below.
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

    pub(crate) fn expect_unchanged(&self) -> Result<()> {
        self.files.iter().filter_map(|file| file.mapped.get()).try_for_each(MappedFile::expect_unchanged)
    }

    /// Copies `out.len()` token ids starting at `start`, widened to i32. Blocks read for the first time are verified,
    /// and each id on every read: it indexes an embedding, and the file may have changed. A range outside the shard
    /// is an error.
    #[inline]
    pub fn copy_tokens(&self, start: u64, out: &mut [i32]) -> Result<()> {
        let file = self.tokens()?;
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.num_tokens);
        let Some(end) = end else { return Err(self.out_of_range(start, out.len())) };
        let width = usize::from(self.width);
        let (mut is_sound, mut used) = (true, 0);
        let range = self.token_bytes(&(start as u32..end as u32));
        // No piece ends within a token.
        file.read(range, |bytes| {
            let slots = out[used..].iter_mut();
            if width == 2 {
                for (slot, id) in slots.zip(bytes.as_chunks::<2>().0) {
                    *slot = i32::from(u16::from_le_bytes(*id));
                    is_sound &= (*slot as u32) < self.vocab_size;
                }
            } else {
                for (slot, id) in slots.zip(bytes.as_chunks::<4>().0) {
                    *slot = i32::from_le_bytes(*id);
                    is_sound &= (*slot as u32) < self.vocab_size;
                }
            }
            used += bytes.len() / width;
        })?;
        if is_sound { Ok(()) } else { Err(self.outside_vocabulary(start, out)) }
    }

    /// Prefetches tokens that will be copied soon: reading rows in random order mostly waits for
    /// memory. Does nothing if the range is invalid or the file is not open yet.
    #[inline]
    pub fn prefetch_tokens(&self, start: u64, count: u32) {
        if let Some(file) = self.files[0].mapped.get() {
            let (start, width) = (start as usize, usize::from(self.width));
            file.prefetch(HEADER_BYTES + start * width..HEADER_BYTES + (start + count as usize) * width);
        }
    }

    /// The number of tokens in each line of a document (0 for a blank line).
    pub fn line_lengths(&self, document: u64) -> Result<Vec<u32>> {
        let mut lengths = Vec::new();
        self.read_line_lengths(document, &mut lengths)?;
        Ok(lengths)
    }

    pub fn read_line_lengths(&self, document: u64, lengths: &mut Vec<u32>) -> Result<()> {
        let file = self.lines()?;
        if document >= self.num_documents {
            return Err(self.out_of_range(document, 1));
        }
        let body = file.header.body_length as usize;
        let start = self.line_offset(document)?;
        let end = if document + 1 < self.num_documents { self.line_offset(document + 1)? } else { body };
        if start > end || end > body {
            return Err(damaged(file.path(), format!("document {document}: offsets out of order")));
        }
        lengths.clear();
        let (mut state, mut is_sound) = ((0, 0), true);
        file.read(HEADER_BYTES + start..HEADER_BYTES + end, |bytes| {
            is_sound &= decode_lengths(bytes, &mut state, lengths).is_some();
        })?;
        if is_sound && state.1 == 0 {
            return Ok(());
        }
        Err(damaged(file.path(), format!("document {document}: unreadable line lengths")))
    }

    pub(crate) fn lines_mismatch(&self, document: usize) -> Error {
        let reason = format!("document {document}: its line lengths do not add up to its number of tokens");
        damaged(&self.files[1].path, reason)
    }

    /// The error for the first id outside the vocabulary; the ids begin at token `start`.
    #[cold]
    fn outside_vocabulary(&self, start: u64, ids: &[i32]) -> Error {
        let size = self.vocab_size;
        let outside = (start..).zip(ids).find(|&(_, &id)| id as u32 >= size);
        let (token, id) = outside.map_or((start, 0), |(token, &id)| (token, id as u32));
        damaged(&self.files[0].path, format!("token {token}: id {id} is not in the vocabulary of {size}"))
    }

    pub(super) fn tokens(&self) -> Result<&MappedFile> {
        self.open(0, FileKind::Tokens { width: self.width })
    }

    pub(super) fn lines(&self) -> Result<&MappedFile> {
        self.open(1, FileKind::Lines)
    }

    #[inline]
    fn open(&self, number: usize, kind: FileKind) -> Result<&MappedFile> {
        let ShardFile { path, entry, mapped } = &self.files[number];
        if let Some(file) = mapped.get() {
            return Ok(file);
        }
        let &Self { num_tokens, num_documents, tokenizer_hash, .. } = self;
        // The manifest does not give the length of a line file's body.
        let body_length = num_tokens * u64::from(self.width);
        let header = Header { kind, num_tokens, num_documents, tokenizer_hash, body_length };
        let file = match &self.cache {
            None => MappedFile::open(path, entry)?,
            Some((cache, shard)) => MappedFile::cached(cache, 2 * shard + number, header)?,
        };
        let file = file.expect(header)?;
        Ok(mapped.get_or_init(|| file))
    }

    pub(super) fn token_bytes(&self, tokens: &Range<u32>) -> Range<usize> {
        let at = |token: u32| HEADER_BYTES + token as usize * usize::from(self.width);
        at(tokens.start)..at(tokens.end)
    }

    /// Range of the line file with the line lengths of the documents that overlap these tokens.
    pub(super) fn line_bytes(&self, tokens: &Range<u32>) -> Result<Range<usize>> {
        let ends = self.document_ends()?;
        let first = ends.partition_point(|&end| end <= tokens.start);
        // One more document: the first one after the range may be read too.
        let last = (ends.partition_point(|&end| end < tokens.end) + 1).min(ends.len() - 1);
        let start = self.line_offset(first as u64)?;
        let end = if last + 1 < ends.len() {
            self.line_offset(last as u64 + 1)?
        } else {
            self.lines()?.header.body_length as usize
        };
        Ok(HEADER_BYTES + start..HEADER_BYTES + end.max(start))
    }

    fn line_offset(&self, document: u64) -> Result<usize> {
        let file = self.lines()?;
        let at = file.layout.index + document as usize * 8;
        file.bytes(at..at + 8).map(|bytes| read_u64(bytes) as usize)
    }

    fn check_ends(&self, file: &MappedFile, ends: &[u32]) -> Result<()> {
        let ascending = ends.first().is_none_or(|&first| first > 0) && ends.is_sorted_by(|a, b| a < b);
        if ascending && ends.last().map_or(0, |&end| u64::from(end)) == self.num_tokens {
            return Ok(());
        }
        Err(damaged(file.path(), "the document table does not match the number of tokens".into()))
    }

    fn out_of_range(&self, start: u64, count: usize) -> Error {
        let (tokens, documents) = (self.num_tokens, self.num_documents);
        let path = self.files[0].path.display();
        Error::Input(format!(
            "{path}: {count} from {start} is outside its {tokens} tokens and {documents} documents"
        ))
    }
}

/// Appends all unsigned LEB128 numbers in `bytes`; `None` if one is too large. The state belongs to a number that the
/// next bytes continue: its value so far, and its number of bits.
fn decode_lengths(bytes: &[u8], state: &mut (u32, u32), lengths: &mut Vec<u32>) -> Option<()> {
    let (mut value, mut shift) = *state;
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
    *state = (value, shift);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_lengths_are_decoded() {
        let bytes = [0, 5, 0x80, 1, 0xff, 0xff, 0xff, 0xff, 0x0f];
        for cut in 0..bytes.len() {
            let (mut lengths, mut state) = (vec![7], (0, 0));
            for piece in [&bytes[..cut], &bytes[cut..]] {
                decode_lengths(piece, &mut state, &mut lengths).unwrap();
            }
            assert_eq!((lengths, state.1), (vec![7, 0, 5, 128, u32::MAX], 0));
        }
        let (mut lengths, mut state) = (vec![], (0, 0));
        assert!(decode_lengths(&[0x80], &mut state, &mut lengths).is_some() && state.1 > 0);
        for long in [&[0x80; 9][..], &[0xff, 0xff, 0xff, 0xff, 0x1f]] {
            assert!(decode_lengths(long, &mut (0, 0), &mut lengths).is_none());
        }
    }
}
