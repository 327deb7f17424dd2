//! `BatchLoader`: the iterator of record batches.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use electra_data::Corpus;
use electra_data::loader::{Loader, Step};
use electra_data::options::{Options, State};
use pyo3::prelude::*;

use crate::errors::raise;
use crate::record_batch::RecordBatch;

/// How long Ctrl-C may go unnoticed while a batch is awaited.
const PATIENCE: Duration = Duration::from_millis(50);

/// An iterator of record batches over a corpus. `electra_fast.data.BatchLoader` documents it.
#[pyclass(frozen, module = "electra_fast._data")]
pub struct BatchLoader {
    loader: Mutex<Loader>,
}

#[pymethods]
impl BatchLoader {
    #[new]
    #[pyo3(signature = (
        corpus, *, sequence_length, batch_size, seed, masking, mask_prob, packing, rank, world_size,
        num_threads, prefetch, epochs
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword-only, one per option")]
    fn new(
        py: Python<'_>,
        corpus: PathBuf,
        sequence_length: i64,
        batch_size: i64,
        seed: i64,
        masking: String,
        mask_prob: f64,
        packing: String,
        rank: i64,
        world_size: i64,
        num_threads: i64,
        prefetch: i64,
        epochs: Option<i64>,
    ) -> PyResult<Self> {
        let options = Options {
            sequence_length,
            batch_size,
            seed,
            masking,
            mask_prob,
            packing,
            rank,
            world_size,
            num_threads,
            prefetch,
            epochs,
        };
        let open = || Loader::new(Arc::new(Corpus::open(&corpus)?), &options);
        let loader = py.detach(open).map_err(raise)?;
        Ok(Self { loader: Mutex::new(loader) })
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        loop {
            match py.detach(|| self.lock().next_within(PATIENCE)).map_err(raise)? {
                Step::Batch(batch) => return Ok(Some(RecordBatch::new(batch))),
                Step::Finished => return Ok(None),
                Step::Waiting => py.check_signals()?,
            }
        }
    }

    /// The position after the last batch, as JSON.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        py.detach(|| self.lock().state().to_json()).map_err(raise)
    }

    /// Continues from a state's JSON.
    fn restore(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        py.detach(|| self.lock().restore(&State::from_json(state)?)).map_err(raise)
    }

    /// Rows in an epoch.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.lock().num_rows()).map_err(raise)
    }

    /// (rows, tokens of the corpus, places that are not padding) of the first epoch.
    fn contents(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let contents = py.detach(|| self.lock().contents()).map_err(raise)?;
        Ok((contents.rows, contents.tokens, contents.positions))
    }
}

impl BatchLoader {
    /// Called without the GIL only: whoever holds the lock may be waiting for a batch.
    fn lock(&self) -> MutexGuard<'_, Loader> {
        self.loader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
