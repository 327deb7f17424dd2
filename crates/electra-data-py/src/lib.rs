//! The Python module `electra_fast._data`. Each function converts its arguments, releases the GIL and calls
//! `electra-data`.

use pyo3::pymodule;

mod corpus;
mod errors;
mod loader;
mod prepare;
mod prepare_job;
mod process;
mod record_batch;
mod store;
mod tokenizer;

#[pymodule]
mod _data {
    use electra_data::{Choice, CutAt, Masking, Packing};
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Adds the names of the loader's options. Python changes the environment under the GIL.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        fn names<C: Choice>() -> impl ExactSizeIterator<Item = &'static str> {
            C::NAMES.iter().map(|&(name, _)| name)
        }
        electra_data::guard_environment(|read| Python::attach(|_| read()));
        module.add("MASKINGS", PyTuple::new(module.py(), names::<Masking>())?)?;
        module.add("PACKINGS", PyTuple::new(module.py(), names::<Packing>())?)?;
        module.add("CUTS", PyTuple::new(module.py(), names::<CutAt>())?)
    }

    #[pymodule_export]
    use crate::corpus::{Corpus, url_of, verify};
    #[pymodule_export]
    use crate::loader::{BatchLoader, auto_lanes, merge_states, mixture_weights};
    #[pymodule_export]
    use crate::prepare::{prepare, text_coverage, text_sample, train_vocab};
    #[pymodule_export]
    use crate::prepare_job::{PrepareJob, job_tokenizer, prepare_input_groups};
    #[pymodule_export]
    use crate::process::explain_bus_errors;
    #[pymodule_export]
    use crate::record_batch::RecordBatch;
    #[pymodule_export]
    use crate::store::{delete_objects, download, list_objects, upload};
    #[pymodule_export]
    use crate::tokenizer::Tokenizer;
}
