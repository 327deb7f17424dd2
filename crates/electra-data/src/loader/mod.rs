//! Corpora to training batches: blocks in a shuffled order, packed into rows, masked, as Arrow batches.

mod batch;
mod batch_cutter;
mod batch_loader;
mod block_order;
#[cfg(test)]
mod corruption;
mod mask;
mod mixture;
mod options;
mod pack;
mod permutation;
#[cfg(test)]
mod remote_tests;
mod shuffle_window;
mod state;
#[cfg(test)]
mod tests;
mod workers;

pub use batch_loader::{Contents, Loader, auto_lanes};
pub use options::{CutAt, LoaderOptions, Masking, Packing};
pub use state::LoaderState;
pub use workers::Poll;
