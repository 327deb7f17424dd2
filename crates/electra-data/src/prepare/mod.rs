//! Preparing training data: making a corpus (`prepare`), training a vocabulary (`train_vocab`), and measuring
//! how well a vocabulary covers a text.

mod coverage;
mod finalize;
mod input_group;
mod output_dir;
mod progress;
mod run;
mod vocab;
mod vocab_files;
mod word_counts;

pub use coverage::Coverage;
pub use progress::Progress;
pub use run::{PrepareOptions, PrepareReport, prepare};
pub use vocab::{VocabOptions, VocabReport, train_vocab};
