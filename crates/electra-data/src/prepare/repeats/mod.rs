//! Repeated text: counting exact duplicates of documents and lines while they are read, and dropping them.
//!
//! Every pass observes the lines of each input group in order (`watch`), as 64-bit hashes (`hasher`). Building counts
//! them (`counts`). To drop duplicates, a first pass stores the hashes (`buckets`), `drops` finds all repetitions by the
//! hashes of all input groups, and building drops them.

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
