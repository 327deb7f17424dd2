//! The byte layout of a shard's two files, written by `writer` and read by `shard`.
//!
//! ```text
//! .tokens  header 64 | token ids (u16 or u32) | padding | document ends (u32)    | padding | table
//! .lines   header 64 | LEB128 line lengths    | padding | document offsets (u64) | padding | table
//! table    xxh3-64 of each 64 KiB block of everything before the table | xxh3-64 of those hashes
//! ```
//! Everything is little-endian; padding is zeros up to a multiple of 8 bytes; every byte is covered by a checksum.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

#[cfg(target_endian = "big")]
compile_error!("shards are memory-mapped, and their byte order is little-endian");

pub(super) const BLOCK_BYTES: usize = 64 * 1024;
pub(crate) const HEADER_BYTES: usize = 64;
/// Version of the layout; readers reject any other.
pub(crate) const FORMAT_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"ELEFAST\0";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    Tokens { width: u16 },
    Lines,
}

impl FileKind {
    fn index_width(self) -> u64 {
        match self {
            Self::Tokens { .. } => 4,
            Self::Lines => 8,
        }
    }

    fn code(self) -> (u16, u16) {
        match self {
            Self::Tokens { width } => (1, width),
            Self::Lines => (2, 0),
        }
    }

    fn from_code(code: (u16, u16)) -> Option<Self> {
        let kinds = [Self::Tokens { width: 2 }, Self::Tokens { width: 4 }, Self::Lines];
        kinds.into_iter().find(|kind| kind.code() == code)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: FileKind,
    pub num_tokens: u64,
    pub num_documents: u64,
    pub tokenizer_hash: u64,
    /// Bytes of the token ids, or of the LEB128 line lengths.
    pub body_length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub index: usize,
    pub table: usize,
    pub num_blocks: usize,
    pub file_length: usize,
}

impl Layout {
    /// The layout of a file of this length with a document table of this size; `None` if it is impossible.
    pub fn from_length(file_length: u64, index_bytes: u64) -> Option<Self> {
        let rest = file_length.checked_sub(8)?;
        let num_blocks = rest.div_ceil(BLOCK_BYTES as u64 + 8);
        let table = rest.checked_sub(8 * num_blocks)?;
        let index = table.checked_sub(index_bytes.checked_next_multiple_of(8)?)?;
        let consistent = table.div_ceil(BLOCK_BYTES as u64) == num_blocks && index >= HEADER_BYTES as u64;
        if consistent { Self::new(index, table, num_blocks, file_length) } else { None }
    }

    fn new(index: u64, table: u64, num_blocks: u64, file_length: u64) -> Option<Self> {
        let parts = [index, table, num_blocks, file_length].map(|n| usize::try_from(n).ok());
        let [Some(index), Some(table), Some(num_blocks), Some(file_length)] = parts else { return None };
        Some(Self { index, table, num_blocks, file_length })
    }
}

impl Header {
    pub fn layout(&self) -> Option<Layout> {
        let align = |n: u64| n.checked_next_multiple_of(8);
        let index = align(self.body_length.checked_add(HEADER_BYTES as u64)?)?;
        let index_length = self.num_documents.checked_mul(self.kind.index_width())?;
        let table = align(index.checked_add(index_length)?)?;
        let num_blocks = table.div_ceil(BLOCK_BYTES as u64);
        let file_length = table.checked_add(num_blocks.checked_mul(8)?)?.checked_add(8)?;
        Layout::new(index, table, num_blocks, file_length)
    }

    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let (kind, width) = self.kind.code();
        let length = self.layout().expect("a shard in memory fits its layout").file_length as u64;
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[12..14].copy_from_slice(&kind.to_le_bytes());
        bytes[14..16].copy_from_slice(&width.to_le_bytes());
        let fields = [self.num_tokens, self.num_documents, self.tokenizer_hash, length, self.body_length];
        for (slot, field) in bytes[16..56].chunks_exact_mut(8).zip(fields) {
            slot.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Parses a header. The error describes the problem in a few words.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        if bytes[..8] != MAGIC {
            return Err("not a shard (wrong magic bytes)".into());
        }
        let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        if version != FORMAT_VERSION {
            return Err(format!("format version {version}; this release reads {FORMAT_VERSION}"));
        }
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let long = |at: usize| read_u64(&bytes[at..]);
        let kind =
            FileKind::from_code((short(12), short(14))).ok_or("unknown kind of shard in the header")?;
        let header = Self {
            kind,
            num_tokens: long(16),
            num_documents: long(24),
            tokenizer_hash: long(32),
            body_length: long(48),
        };
        match header.layout() {
            Some(layout) if layout.file_length as u64 == long(40) && header.is_consistent() => Ok(header),
            _ => Err("the lengths in the header are inconsistent".into()),
        }
    }

    /// Whether counts and lengths agree. Readers index by the counts.
    fn is_consistent(&self) -> bool {
        let body = match self.kind {
            FileKind::Tokens { width } => self.num_tokens.checked_mul(width.into()) == Some(self.body_length),
            FileKind::Lines => self.num_documents <= self.body_length,
        };
        body && self.num_documents <= self.num_tokens && self.num_tokens <= u64::from(u32::MAX)
    }
}

pub(super) fn block_hash(block: &[u8]) -> u64 {
    xxh3_64(block)
}

pub(crate) fn hash_hex(bytes: &[u8]) -> String {
    hex128(xxh3_128(bytes))
}

pub(crate) fn hex128(hash: u128) -> String {
    format!("{hash:032x}")
}

/// The first eight bytes as a little-endian number. Panics if there are fewer.
pub(super) fn read_u64(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            kind: FileKind::Tokens { width: 2 },
            num_tokens: 5,
            num_documents: 3,
            tokenizer_hash: 9,
            body_length: 10,
        }
    }

    #[test]
    fn layout_follows_from_length_and_number_of_documents() {
        let block = BLOCK_BYTES as u64;
        for body_length in (0..40).chain(block - 80..block + 80).chain([9 * block + 7, 4_000 * block - 3]) {
            for num_documents in [0, 1, 2, 9_000] {
                for kind in [FileKind::Tokens { width: 2 }, FileKind::Lines] {
                    let header = Header { kind, num_documents, body_length, ..header() };
                    let layout = header.layout().unwrap();
                    let index_bytes = num_documents * kind.index_width();
                    assert_eq!(Layout::from_length(layout.file_length as u64, index_bytes), Some(layout));
                }
            }
        }
        assert!(Layout::from_length(100, 200).is_none() && Layout::from_length(7, 0).is_none());
    }

    #[test]
    fn inconsistent_counts_are_rejected() {
        assert!(Header { num_documents: u64::MAX / 2, ..header() }.layout().is_none());
        for wrong in [
            Header { num_tokens: 6, ..header() },
            Header { num_documents: 6, ..header() },
            Header { kind: FileKind::Lines, body_length: 2, ..header() },
        ] {
            assert!(Header::parse(&wrong.to_bytes()).unwrap_err().contains("inconsistent"), "{wrong:?}");
        }
    }
}
