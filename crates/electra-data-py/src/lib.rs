//! The Python module `electra_fast._data`: each function parses, detaches from the GIL and calls
//! `electra-data`.

use pyo3::prelude::*;

mod build;
mod errors;
mod loader;
mod process;
mod record_batch;
mod store;
mod tokenizer;

#[pymodule]
mod _data {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::build::{prepare, sample_coverage, train_vocab};
    #[pymodule_export]
    use crate::loader::BatchLoader;
    #[pymodule_export]
    use crate::record_batch::RecordBatch;
    #[pymodule_export]
    use crate::store::{Corpus, verify};
    #[pymodule_export]
    use crate::tokenizer::Tokenizer;
}
