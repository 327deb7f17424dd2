//! Preparing training data: writing a corpus (`prepare`), training a vocabulary (`train_vocab`), and measuring
//! how well a vocabulary covers a text.

mod changes;
mod clean_up;
mod coverage;
mod finalize;
mod input_group;
mod options;
mod output_dir;
mod pipelines;
mod place;
mod process;
mod progress;
mod repeats;
mod run;
mod tasks;
#[cfg(test)]
mod tests;
mod vocab;
mod vocab_files;
mod word_counts;

pub use changes::verify;
pub use coverage::{Coverage, text_sample};
pub use options::{DropDuplicates, PrepareOptions, VocabOptions};
pub use progress::Progress;
pub use repeats::{RepeatCount, RepeatedLine, Repeats};
pub use run::{PrepareReport, prepare};
pub use tasks::{OpenedJob, PrepareJob, TaskReport, job_tokenizer, prepare_input_groups};
pub use vocab::{Alphabet, VocabReport, train_vocab};
