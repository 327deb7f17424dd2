//! Ctrl-C during calls that may wait for an object store.

use electra_data::Error;
use pyo3::prelude::*;

use crate::errors::raise;

/// Runs `work` without the GIL on a thread of its own, while this one handles signals. An exception that a handler
/// raises cancels all requests to stores and is the result.
pub(crate) fn interruptible<T: Send>(
    py: Python,
    work: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    let check = |_: Option<()>| Python::attach(|py| py.check_signals());
    py.detach(|| electra_data::attended(|_| work(), check))?.map_err(raise)
}
