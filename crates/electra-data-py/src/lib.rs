//! The Python module `electra_fast._data`. Each function converts its arguments, releases the GIL and calls
//! `electra-data`.

use pyo3::prelude::*;

mod corpus;
mod errors;
mod interruption;
mod loader;
mod prepare;
mod prepare_job;
mod process;
mod record_batch;
mod tokenizer;

#[pymodule]
mod _data {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::corpus::{Corpus, url_of, verify};
    #[pymodule_export]
    use crate::loader::{BatchLoader, mixture_weights};
    #[pymodule_export]
    use crate::prepare::{prepare, text_coverage, text_sample, train_vocab};
    #[pymodule_export]
    use crate::prepare_job::{PrepareJob, job_tokenizer, prepare_units};
    #[pymodule_export]
    use crate::record_batch::RecordBatch;
    #[pymodule_export]
    use crate::tokenizer::Tokenizer;
}
