//! Rust errors as Python exceptions.

use std::path::{Path, PathBuf};

use electra_data::Error;
use pyo3::exceptions::{PyFileNotFoundError, PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;

pyo3::import_exception!(electra_fast.errors, InputError);

/// The Python exception for an error: a missing file becomes `FileNotFoundError`, bad input `InputError`.
pub(crate) fn raise(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::NotFound { .. } => PyFileNotFoundError::new_err(message),
        Error::Io { source, .. } => match source.kind() {
            std::io::ErrorKind::NotFound => PyFileNotFoundError::new_err(message),
            _ => PyOSError::new_err(message),
        },
        Error::Interrupted => PyKeyboardInterrupt::new_err(message),
        _ => InputError::new_err(message),
    }
}

/// An absolute path, which stays valid after a change of directory, or a URL.
pub(crate) fn absolute(path: &Path) -> PyResult<PathBuf> {
    if let Some(url) = electra_data::url_of(path) {
        return Ok(url.into());
    }
    std::path::absolute(path).map_err(|error| raise(Error::io(path, error)))
}
