//! Checksums of files and blocks, and how they are written in JSON.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The checksum of one block.
pub(super) fn block_hash(block: &[u8]) -> u64 {
    xxh3_64(block)
}

/// The xxh3-128 of some bytes as 32 hexadecimal digits.
pub(crate) fn hash_hex(bytes: &[u8]) -> String {
    hex128(xxh3_128(bytes))
}

/// 128 bits as 32 hexadecimal digits.
pub(crate) fn hex128(hash: u128) -> String {
    format!("{hash:032x}")
}
