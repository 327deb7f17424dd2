//! Writing shards: documents stream in, pairs of checksummed files come out (layout: `header`).

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::atomic_file::{AtomicFile, write_error};
use super::header::{BLOCK_BYTES, FileKind, HEADER_BYTES, Header, block_hash, hash_hex};
use super::manifest::{FileEntry, ShardEntry};
use crate::error::{Error, Result};

#[derive(Clone, Debug)]
pub(crate) struct ShardSpec {
    pub width: u16,
    pub tokenizer_hash: u64,
    pub tag: String,
    /// A shard ends at the first document boundary after `max_tokens` tokens …
    pub max_tokens: u64,
    /// … or `max_documents` documents, which bounds the tables kept in memory while writing.
    pub max_documents: usize,
}

pub(crate) struct DocumentWriter {
    dir: PathBuf,
    input_group: usize,
    first: usize,
    spec: ShardSpec,
    current: Option<ShardWriter>,
    shards: Vec<ShardEntry>,
}

impl DocumentWriter {
    /// A writer whose first shard has the number `first` in the group. It creates nothing before the first token.
    pub fn new(dir: &Path, input_group: usize, first: usize, spec: ShardSpec) -> Self {
        Self { dir: dir.to_owned(), input_group, first, spec, current: None, shards: Vec::new() }
    }

    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let shard = match &mut self.current {
            Some(shard) => shard,
            empty => {
                let stem = format!("shard-{:06}-{:03}", self.input_group, self.first + self.shards.len());
                empty.insert(ShardWriter::create(&self.dir, stem, &self.spec)?)
            }
        };
        shard.push(ids)
    }

    pub fn end_line(&mut self) -> Result<()> {
        self.current.as_mut().map_or(Ok(()), ShardWriter::end_line)
    }

    pub fn end_document(&mut self) -> Result<bool> {
        let Some(shard) = &mut self.current else { return Ok(false) };
        let has_tokens = shard.end_document()?;
        if shard.num_tokens >= self.spec.max_tokens || shard.ends.len() >= self.spec.max_documents {
            self.finish_shard()?;
        }
        Ok(has_tokens)
    }

    /// Finishes the last shard; returns the entries of all shards, which are now durable.
    pub fn finish(mut self) -> Result<Vec<ShardEntry>> {
        self.finish_shard()?;
        Ok(self.shards)
    }

    fn finish_shard(&mut self) -> Result<()> {
        if let Some(shard) = self.current.take() {
            self.shards.push(shard.finish()?);
        }
        Ok(())
    }
}

struct ShardWriter {
    stem: String,
    spec: ShardSpec,
    tokens: BlockWriter,
    lines: BlockWriter,
    num_tokens: u64,
    ends: Vec<u32>,
    offsets: Vec<u64>,
    line: u32,
    /// Blank lines that are written only if another line follows in the same document.
    blank_lines: u64,
    document_start: u64,
    document_offset: u64,
}

impl ShardWriter {
    fn create(dir: &Path, stem: String, spec: &ShardSpec) -> Result<Self> {
        Ok(Self {
            tokens: BlockWriter::create(dir, &format!("{stem}.tokens"), &spec.tag)?,
            lines: BlockWriter::create(dir, &format!("{stem}.lines"), &spec.tag)?,
            stem,
            spec: spec.clone(),
            num_tokens: 0,
            ends: Vec::new(),
            offsets: Vec::new(),
            line: 0,
            blank_lines: 0,
            document_start: 0,
            document_offset: 0,
        })
    }

    fn push(&mut self, ids: &[u32]) -> Result<()> {
        self.num_tokens += ids.len() as u64;
        if self.num_tokens > u64::from(u32::MAX) {
            let limit = u64::from(u32::MAX) - self.spec.max_tokens;
            return Err(Error::Input(format!("a document has more than {limit} tokens; split it")));
        }
        self.line += ids.len() as u32;
        match self.spec.width {
            2 => self.tokens.write_all(ids, |id| (id as u16).to_le_bytes()),
            _ => self.tokens.write_all(ids, u32::to_le_bytes),
        }
    }

    /// Drops blank lines at a document's start and end, so that its lines do not depend on the input format.
    fn end_line(&mut self) -> Result<()> {
        if self.line == 0 {
            self.blank_lines += u64::from(self.num_tokens > self.document_start);
            return Ok(());
        }
        for _ in 0..self.blank_lines {
            self.lines.write(&[0])?;
        }
        self.blank_lines = 0;
        leb128(std::mem::take(&mut self.line)).try_for_each(|byte| self.lines.write(&[byte]))
    }

    fn end_document(&mut self) -> Result<bool> {
        if self.line > 0 {
            self.end_line()?;
        }
        self.blank_lines = 0;
        if self.num_tokens == self.document_start {
            return Ok(false);
        }
        self.ends.push(self.num_tokens as u32);
        self.offsets.push(self.document_offset);
        self.document_start = self.num_tokens;
        self.document_offset = self.lines.position - HEADER_BYTES as u64;
        Ok(true)
    }

    fn finish(self) -> Result<ShardEntry> {
        let header = |kind, body: &BlockWriter| Header {
            kind,
            num_tokens: self.num_tokens,
            num_documents: self.ends.len() as u64,
            tokenizer_hash: self.spec.tokenizer_hash,
            body_length: body.position - HEADER_BYTES as u64,
        };
        let tokens_header = header(FileKind::Tokens { width: self.spec.width }, &self.tokens);
        let lines_header = header(FileKind::Lines, &self.lines);
        let ends = self.ends.iter().map(|end| end.to_le_bytes());
        let offsets = self.offsets.iter().map(|offset| offset.to_le_bytes());
        Ok(ShardEntry {
            num_tokens: self.num_tokens,
            num_documents: self.ends.len() as u64,
            tokens: self.tokens.finish(tokens_header, ends, format!("{}.tokens", self.stem))?,
            lines: self.lines.finish(lines_header, offsets, format!("{}.lines", self.stem))?,
        })
    }
}

pub(super) fn leb128(value: u32) -> impl Iterator<Item = u8> {
    let mut rest = Some(value);
    std::iter::from_fn(move || {
        let value = rest?;
        rest = (value >= 0x80).then_some(value >> 7);
        Some(if rest.is_some() { value as u8 | 0x80 } else { value as u8 })
    })
}

/// A file that is checksummed block by block while it is written.
struct BlockWriter {
    output: AtomicFile,
    block: Vec<u8>,
    /// Block 0, held back because the header is known only at the end.
    first: Vec<u8>,
    hashes: Vec<u64>,
    position: u64,
}

impl BlockWriter {
    fn create(dir: &Path, name: &str, tag: &str) -> Result<Self> {
        let output = AtomicFile::create(dir, name, tag)?;
        let mut block = Vec::with_capacity(BLOCK_BYTES);
        block.resize(HEADER_BYTES, 0);
        Ok(Self { output, block, first: Vec::new(), hashes: Vec::new(), position: HEADER_BYTES as u64 })
    }

    /// Writes ids of N bytes, in batches that fit into the block. N divides the block size.
    fn write_all<const N: usize>(&mut self, ids: &[u32], to_bytes: impl Fn(u32) -> [u8; N]) -> Result<()> {
        self.position += (N * ids.len()) as u64;
        let mut rest = ids;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min((BLOCK_BYTES - self.block.len()) / N));
            let end = self.block.len();
            self.block.resize(end + N * now.len(), 0);
            for (slot, &id) in self.block[end..].chunks_exact_mut(N).zip(now) {
                slot.copy_from_slice(&to_bytes(id));
            }
            if self.block.len() == BLOCK_BYTES {
                self.flush_block()?;
            }
            rest = later;
        }
        Ok(())
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.position += bytes.len() as u64;
        let room = BLOCK_BYTES - self.block.len();
        if bytes.len() < room {
            self.block.extend_from_slice(bytes);
            return Ok(());
        }
        self.block.extend_from_slice(&bytes[..room]);
        self.flush_block()?;
        self.block.extend_from_slice(&bytes[room..]);
        Ok(())
    }

    fn flush_block(&mut self) -> Result<()> {
        self.hashes.push(block_hash(&self.block));
        self.write_out()?;
        if self.hashes.len() == 1 {
            self.first.clone_from(&self.block);
        }
        self.block.clear();
        Ok(())
    }

    fn write_out(&mut self) -> Result<()> {
        self.output.file.write_all(&self.block).map_err(|e| write_error(self.output.target(), e))
    }

    fn align(&mut self) -> Result<()> {
        let padding = self.position.next_multiple_of(8) - self.position;
        self.write(&[0; 8][..padding as usize])
    }

    fn finish<const N: usize>(
        mut self,
        header: Header,
        index: impl Iterator<Item = [u8; N]>,
        file: String,
    ) -> Result<FileEntry> {
        self.align()?;
        for entry in index {
            self.write(&entry)?;
        }
        self.align()?;
        if !self.block.is_empty() {
            self.flush_block()?;
        }
        self.first[..HEADER_BYTES].copy_from_slice(&header.to_bytes());
        self.hashes[0] = block_hash(&self.first);
        let table: Vec<u8> = self.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        self.block.extend_from_slice(&table);
        self.block.extend_from_slice(&block_hash(&table).to_le_bytes());
        self.write_out()?;
        let bytes = self.position + self.block.len() as u64;
        self.rewrite_header(&header)?;
        self.output.commit()?;
        Ok(FileEntry { file, bytes, hash: hash_hex(&table) })
    }

    fn rewrite_header(&mut self, header: &Header) -> Result<()> {
        let file = &mut self.output.file;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&header.to_bytes()))
            .map_err(|e| write_error(self.output.target(), e))
    }
}
