//! A corpus to training batches: blocks in a shuffled order, packed into rows, masked, as Arrow batches.

mod batch;
mod batch_cutter;
mod batch_loader;
mod contents;
#[cfg(test)]
mod corruption;
mod mask;
mod options;
mod pack;
mod permutation;
#[cfg(all(test, feature = "object-store"))]
mod remote_tests;
mod shuffle_window;
#[cfg(test)]
mod tests;
mod workers;

pub use batch_loader::Loader;
pub use contents::Contents;
pub use options::{LoaderOptions, LoaderState};
pub use workers::Poll;
