//! Writing shards: documents stream in, two checksummed files come out (layout: `format`).

use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_128;

use super::atomic_file::{AtomicFile, write_error};
use super::header::{BLOCK, HEADER, Header, Kind, block_hash};
use super::manifest::{FileEntry, ShardEntry, hex128};
use crate::error::{Error, Result};

/// What all shards of a corpus have in common.
#[derive(Clone, Debug)]
pub(crate) struct ShardSpec {
    /// Bytes of a token id: 2 or 4.
    pub width: u16,
    pub tokenizer_hash: u64,
    /// The run's tag for temporary names.
    pub tag: String,
    /// A shard ends at the first document boundary after this many tokens …
    pub max_tokens: u64,
    /// … or this many documents, which bounds the tables held in memory while writing.
    pub max_documents: usize,
}

/// Writes the documents of one unit into as many shards as they need.
pub(crate) struct UnitWriter {
    dir: PathBuf,
    unit: usize,
    first: usize,
    spec: ShardSpec,
    current: Option<ShardWriter>,
    shards: Vec<ShardEntry>,
}

impl UnitWriter {
    /// Nothing is created on disk before the first token.
    pub fn new(dir: &Path, unit: usize, spec: ShardSpec) -> Self {
        Self::beginning_at(dir, unit, 0, spec)
    }

    /// A writer whose first shard has this number.
    pub fn beginning_at(dir: &Path, unit: usize, first: usize, spec: ShardSpec) -> Self {
        Self { dir: dir.to_owned(), unit, first, spec, current: None, shards: Vec::new() }
    }

    /// Appends tokens to the current line of the current document.
    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let shard = match &mut self.current {
            Some(shard) => shard,
            empty => {
                let stem = format!("shard-{:06}-{:03}", self.unit, self.first + self.shards.len());
                empty.insert(ShardWriter::create(&self.dir, stem, &self.spec)?)
            }
        };
        shard.push(ids)
    }

    /// Ends the current line, which may be blank.
    pub fn end_line(&mut self) -> Result<()> {
        self.current.as_mut().map_or(Ok(()), ShardWriter::end_line)
    }

    /// Ends the current document; `false` if it had no token and so does not exist.
    pub fn end_document(&mut self) -> Result<bool> {
        let Some(shard) = &mut self.current else { return Ok(false) };
        let any = shard.end_document()?;
        if shard.num_tokens >= self.spec.max_tokens || shard.ends.len() >= self.spec.max_documents {
            self.finish_shard()?;
        }
        Ok(any)
    }

    /// Makes the last shard durable and tells what was written.
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
    /// Tokens of the line being written.
    line: u32,
    /// Blank lines that count only if another line follows in the same document.
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
            return Err(Error::Input(format!(
                "a document has more than {limit} tokens: cut it into several"
            )));
        }
        self.line += ids.len() as u32;
        match self.spec.width {
            2 => self.tokens.write_all(ids, |id| (id as u16).to_le_bytes()),
            _ => self.tokens.write_all(ids, u32::to_le_bytes),
        }
    }

    /// Blank lines at a document's start and end are dropped, so that formats agree on its lines.
    fn end_line(&mut self) -> Result<()> {
        if self.line == 0 {
            self.blank_lines += u64::from(self.num_tokens > self.document_start);
            return Ok(());
        }
        for _ in 0..self.blank_lines {
            self.lines.write(&[0])?;
        }
        self.blank_lines = 0;
        let mut rest = std::mem::take(&mut self.line);
        while rest >= 0x80 {
            self.lines.write(&[rest as u8 | 0x80])?;
            rest >>= 7;
        }
        self.lines.write(&[rest as u8])
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
        self.document_offset = self.lines.position - HEADER as u64;
        Ok(true)
    }

    fn finish(self) -> Result<ShardEntry> {
        let header = |kind, body: &BlockWriter| Header {
            kind,
            num_tokens: self.num_tokens,
            num_documents: self.ends.len() as u64,
            tokenizer_hash: self.spec.tokenizer_hash,
            body_length: body.position - HEADER as u64,
        };
        let tokens_header = header(Kind::Tokens { width: self.spec.width }, &self.tokens);
        let lines_header = header(Kind::Lines, &self.lines);
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

/// A file that is hashed block by block on its way to disk.
struct BlockWriter {
    output: AtomicFile,
    block: Vec<u8>,
    /// Block 0 is kept because the header is known only at the end.
    first: Vec<u8>,
    hashes: Vec<u64>,
    position: u64,
}

impl BlockWriter {
    fn create(dir: &Path, name: &str, tag: &str) -> Result<Self> {
        let output = AtomicFile::create(dir, name, tag)?;
        let mut block = Vec::with_capacity(BLOCK);
        block.resize(HEADER, 0);
        Ok(Self { output, block, first: Vec::new(), hashes: Vec::new(), position: HEADER as u64 })
    }

    /// Writes ids of N bytes each, as many at once as there is room for: N divides a block.
    fn write_all<const N: usize>(&mut self, ids: &[u32], to_bytes: impl Fn(u32) -> [u8; N]) -> Result<()> {
        self.position += (N * ids.len()) as u64;
        let mut rest = ids;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min((BLOCK - self.block.len()) / N));
            let end = self.block.len();
            self.block.resize(end + N * now.len(), 0);
            for (place, &id) in self.block[end..].chunks_exact_mut(N).zip(now) {
                place.copy_from_slice(&to_bytes(id));
            }
            if self.block.len() == BLOCK {
                self.flush_block()?;
            }
            rest = later;
        }
        Ok(())
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.position += bytes.len() as u64;
        let room = BLOCK - self.block.len();
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
        self.first[..HEADER].copy_from_slice(&header.to_bytes());
        self.hashes[0] = block_hash(&self.first);
        let table: Vec<u8> = self.hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        self.block.extend_from_slice(&table);
        self.block.extend_from_slice(&block_hash(&table).to_le_bytes());
        self.write_out()?;
        let bytes = self.position + self.block.len() as u64;
        self.rewrite_header(&header)?;
        self.output.commit()?;
        Ok(FileEntry { file, bytes, hash: hex128(xxh3_128(&table)) })
    }

    fn rewrite_header(&mut self, header: &Header) -> Result<()> {
        let file = &mut self.output.file;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&header.to_bytes()))
            .map_err(|e| write_error(self.output.target(), e))
    }
}
