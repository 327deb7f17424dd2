//! The file of an input group's hashes, in buckets by first byte: so the hashes of all groups are compared bucket
//! by bucket, and each hash is read once.
//!
//! The file has a head; the first byte of every hash, which gives the order of the buckets' entries; and, by bucket,
//! the other seven bytes, in order. Each of these pieces ends with a checksum. A hash takes 8 bytes in total.

use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

pub(super) const BUCKETS: usize = 1 << 8;
pub(super) const HASH: usize = size_of::<u64>();
const REST: usize = HASH - 1;
/// Bytes of the head: the ends of the buckets, the hash of all hashes, a checksum.
const HEAD: usize = BUCKETS * size_of::<u32>() + 2 * HASH;

pub(super) struct Head {
    ends: Vec<u32>,
    /// xxh3-64 of all hashes in order.
    pub hash: u64,
}

impl Head {
    pub const RANGE: Range<u64> = 0..HEAD as u64;

    /// The head of a file of this length; `None` if it is damaged.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Option<Self> {
        let (ends, hash) = unsealed(bytes)?.split_last_chunk()?;
        let ends = ends.as_chunks().0.iter().map(|end| u32::from_le_bytes(*end)).collect();
        let head = Self { ends, hash: u64::from_le_bytes(*hash) };
        (head.ends.len() == BUCKETS && head.start_of(BUCKETS) == file_bytes).then_some(head)
    }

    pub fn len(&self) -> usize {
        self.end(BUCKETS)
    }

    pub fn numbers(&self, buckets: &Range<usize>) -> Range<usize> {
        self.end(buckets.start)..self.end(buckets.end)
    }

    fn end(&self, bucket: usize) -> usize {
        bucket.checked_sub(1).map_or(0, |last| self.ends[last] as usize)
    }

    pub fn first_bytes(&self) -> Range<u64> {
        HEAD as u64..(HEAD + self.len() + HASH) as u64
    }

    pub fn range(&self, buckets: &Range<usize>) -> Range<u64> {
        self.start_of(buckets.start)..self.start_of(buckets.end)
    }

    fn start_of(&self, bucket: usize) -> u64 {
        self.first_bytes().end + (self.end(bucket) * REST + bucket * HASH) as u64
    }

    /// Calls `visit` with the number and value of each hash in `range(buckets)`; `None` if these bytes are damaged.
    pub fn for_each(
        &self,
        buckets: &Range<usize>,
        mut bytes: &[u8],
        mut visit: impl FnMut(usize, u64),
    ) -> Option<()> {
        for bucket in buckets.clone() {
            let numbers = self.numbers(&(bucket..bucket + 1));
            let (piece, rest) = bytes.split_at_checked(numbers.len() * REST + HASH)?;
            for (number, rest) in numbers.zip(unsealed(piece)?.as_chunks::<REST>().0) {
                visit(number, joined(bucket, rest));
            }
            bytes = rest;
        }
        Some(())
    }

    /// The numbers of all hashes in order, from `first_bytes`; `None` if these bytes are damaged.
    pub fn order(&self, first_bytes: &[u8]) -> Option<impl Iterator<Item = usize>> {
        let mut next: Vec<usize> = (0..BUCKETS).map(|bucket| self.end(bucket)).collect();
        Some(unsealed(first_bytes)?.iter().map(move |&bucket| {
            let number = &mut next[usize::from(bucket)];
            *number += 1;
            *number - 1
        }))
    }
}

/// The bytes of the file for these hashes of 8 little-endian bytes; `None` for 2^32 hashes or more.
pub(super) fn to_bytes(hashes: &[u8]) -> Option<Vec<u8>> {
    let (hashes, _) = hashes.as_chunks::<HASH>();
    let mut ends = vec![0_u32; BUCKETS];
    hashes.iter().for_each(|hash| ends[first(hash)] += 1);
    (1..BUCKETS).for_each(|bucket| ends[bucket] += ends[bucket - 1]);
    u32::try_from(hashes.len()).ok()?;
    let head = Head { ends, hash: xxh3_64(hashes.as_flattened()) };
    let mut bytes = vec![0; head.start_of(BUCKETS) as usize];
    let at = |range: Range<u64>| range.start as usize..range.end as usize;
    let ends = head.ends.iter().flat_map(|end| end.to_le_bytes());
    fill(&mut bytes[at(Head::RANGE)], ends.chain(head.hash.to_le_bytes()));
    fill(&mut bytes[at(head.first_bytes())], hashes.iter().map(|hash| hash[REST]));
    let mut next: Vec<usize> = (0..BUCKETS).map(|bucket| head.start_of(bucket) as usize).collect();
    for hash in hashes {
        let start = &mut next[first(hash)];
        bytes[*start..*start + REST].copy_from_slice(&hash[..REST]);
        *start += REST;
    }
    (0..BUCKETS).for_each(|bucket| seal(&mut bytes[at(head.range(&(bucket..bucket + 1)))]));
    Some(bytes)
}

fn first(hash: &[u8; HASH]) -> usize {
    usize::from(hash[REST])
}

fn joined(bucket: usize, rest: &[u8; REST]) -> u64 {
    let mut hash = [bucket as u8; HASH];
    hash[..REST].copy_from_slice(rest);
    u64::from_le_bytes(hash)
}

fn fill(piece: &mut [u8], bytes: impl Iterator<Item = u8>) {
    piece.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
    seal(piece);
}

fn seal(piece: &mut [u8]) {
    if let Some((bytes, sum)) = piece.split_last_chunk_mut() {
        *sum = xxh3_64(bytes).to_le_bytes();
    }
}

/// A piece without its checksum; `None` if it is damaged.
pub(super) fn unsealed(piece: &[u8]) -> Option<&[u8]> {
    let (bytes, sum) = piece.split_last_chunk()?;
    (xxh3_64(bytes) == u64::from_le_bytes(*sum)).then_some(bytes)
}
