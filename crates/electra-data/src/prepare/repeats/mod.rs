//! Repeated text: counting exact duplicates of documents and lines while they are read, and leaving them out.
//!
//! Every pass watches the lines of each input group in order (`watch`), as 64-bit hashes (`hasher`). Building counts
//! them (`counts`). To leave duplicates out, a first pass stores the hashes (`buckets`), `drops` decides by those of all
//! input groups which occurrences are not the first, and building leaves these out.

mod buckets;
mod counts;
mod drops;
mod sketches;
#[cfg(test)]
mod tests;
mod watch;

pub(super) use counts::{Dropped, merge};
pub use counts::{RepeatCount, RepeatedLine, Repeats};
pub(super) use drops::{decide, digest};
pub(super) use watch::watch;
