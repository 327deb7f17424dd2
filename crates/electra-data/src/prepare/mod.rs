//! What makes files: a corpus from text (`prepare`), a vocabulary from text (`train_vocab`), and how
//! well a vocabulary covers a text.

mod coverage;
mod finalize;
mod input_group;
mod output_dir;
mod run;
mod vocab;
mod vocab_files;
mod word_counts;

pub use coverage::Coverage;
pub use input_group::Progress;
pub use run::{Options, Report, Source, prepare};
pub use vocab::{VocabOptions, VocabReport, train_vocab};
