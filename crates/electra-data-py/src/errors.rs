//! Conversions between Rust and Python: errors, signals, options.

use std::path::{Path, PathBuf};

use electra_data::Error;
use pyo3::exceptions::{PyFileNotFoundError, PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};

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

/// Runs `work` without the GIL on a separate thread, while this one handles signals. An exception that a handler
/// raises cancels all requests to stores and is the result.
pub(crate) fn interruptible<T: Send>(
    py: Python,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let check = |_: Option<()>| Python::attach(|py| py.check_signals());
    py.detach(|| electra_data::attended(|_| work(), check))?.map_err(raise)
}

pub(crate) fn options<T: DeserializeOwned>(named: Option<&Bound<PyDict>>) -> PyResult<T> {
    let mut values = Map::new();
    for (name, value) in named.into_iter().flat_map(|named| named.iter()) {
        let name = name.extract::<String>()?;
        let value = json(&name, &value)?;
        values.insert(name, value);
    }
    electra_data::options_from(values).map_err(raise)
}

/// The value of an option: an integer, a number, text, a list of texts or nothing.
fn json(name: &str, value: &Bound<PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(integer) = value.extract::<i64>() {
        return Ok(integer.into());
    }
    if let Ok(number) = value.extract::<f64>() {
        let number = Number::from_f64(number)
            .ok_or_else(|| InputError::new_err(format!("{name} = {number}: not a finite number")))?;
        return Ok(number.into());
    }
    match value.extract::<String>() {
        Ok(text) => Ok(text.into()),
        Err(_) => value.extract::<Vec<String>>().map(Value::from),
    }
}
