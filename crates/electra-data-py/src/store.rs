//! Objects in stores: upload, download, list, delete.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::errors::interruptible;

/// Uploads a file to the object at `url`. With `if_absent`, returns False and writes nothing if the object exists.
#[pyfunction]
#[pyo3(signature = (path, url, if_absent=false))]
pub(crate) fn upload(py: Python, path: PathBuf, url: &str, if_absent: bool) -> PyResult<bool> {
    interruptible(py, || electra_data::upload(&path, url, if_absent))
}

#[pyfunction]
pub(crate) fn download(py: Python, url: &str, path: PathBuf) -> PyResult<()> {
    interruptible(py, || electra_data::download(url, &path))
}

/// All objects of the folder `url` as (name, bytes), sorted by name.
#[pyfunction]
pub(crate) fn list_objects(py: Python, url: &str) -> PyResult<Vec<(String, u64)>> {
    interruptible(py, || electra_data::list_objects(url))
}

#[pyfunction]
pub(crate) fn delete_objects(py: Python, url: &str, names: Vec<String>) -> PyResult<()> {
    interruptible(py, || electra_data::delete_objects(url, &names))
}
