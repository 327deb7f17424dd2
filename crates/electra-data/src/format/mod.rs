//! The files of a corpus: their byte layout, the manifest, how they are written, mapped and verified.
//!
//! Only this folder knows the on-disk format. `prepare` writes through it, `loader` reads through it.

mod atomic_file;
mod block_cache;
mod corpus;
mod damage;
mod header;
mod manifest;
mod mmap;
mod shard;
#[cfg(test)]
pub(crate) mod testing;
mod verify;
mod writer;

pub use block_cache::CacheOptions;
pub(crate) use block_cache::Pins;
pub use corpus::Corpus;
pub use manifest::SpecialTokens;
pub use shard::Shard;
pub use verify::{Verified, verify};

pub(crate) use atomic_file::{create_folder, temp_path, write_all_new, write_atomically, write_error};
pub(crate) use corpus::VALIDATION;
pub(crate) use header::{FORMAT_VERSION, hash_hex, hex128};
pub(crate) use manifest::{FileEntry, MANIFEST, Manifest, PARTS, ShardEntry, TokenizerEntry, saturating_sum};
pub(crate) use writer::{DocumentWriter, ShardSpec};
