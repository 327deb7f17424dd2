//! Corpora to training batches: blocks in a shuffled order, packed into rows, masked, as Arrow batches.

mod batch;
mod batch_cutter;
mod batch_loader;
mod block_order;
mod contents;
#[cfg(test)]
mod corruption;
#[cfg(test)]
mod lane_tests;
mod mask;
mod mixture;
mod options;
mod pack;
mod permutation;
mod position;
#[cfg(test)]
mod remote_tests;
mod shuffle_window;
mod state;
#[cfg(test)]
mod tests;
mod workers;

pub use batch_loader::{Loader, auto_lanes};
pub use contents::Contents;
pub use options::{CutAt, LoaderOptions, Masking, Packing};
pub use state::LoaderState;
pub use workers::Poll;
