//! The Python module `electra_fast._data`: each function parses, detaches from the GIL and calls
//! `electra-data`.

use electra_data::Error;
use pyo3::exceptions::{PyFileNotFoundError, PyKeyboardInterrupt, PyOSError, PyValueError};
use pyo3::prelude::*;

mod loader;

/// The Python exception that means the same as an error of the crate.
fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NotFound { .. } => PyFileNotFoundError::new_err(message),
        Error::Io { .. } => PyOSError::new_err(message),
        Error::Interrupted => PyKeyboardInterrupt::new_err(message),
        _ => PyValueError::new_err(message),
    }
}

#[pymodule]
mod _data {
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use crate::loader::{BatchLoader, RecordBatch};
}
