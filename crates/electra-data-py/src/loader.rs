//! `BatchLoader`: the iterator of record batches.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use crate::errors::InputError;
use electra_data::{Corpus, Error, Loader, LoaderOptions, LoaderState, Poll, Tokenizer};
use pyo3::prelude::*;

use crate::errors::{absolute, raise};
use crate::process::PerProcess;
use crate::record_batch::RecordBatch;

/// The longest that Ctrl-C goes unnoticed while a batch is awaited.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

const IN_USE: &str = "a thread was taking a batch when this process was forked, so the loader's position is unknown \
                      here; open a BatchLoader in this process";

/// An iterator of record batches over a corpus. `electra_fast.data.BatchLoader` documents it.
#[pyclass(frozen, module = "electra_fast._data")]
pub struct BatchLoader {
    corpus: PathBuf,
    options: LoaderOptions,
    loader: PerProcess<Mutex<Loader>>,
}

#[pymethods]
impl BatchLoader {
    #[new]
    #[pyo3(signature = (
        corpus, *, sequence_length, batch_size, seed, masking, mask_prob, packing, cut_at, rank, world_size,
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
        cut_at: String,
        rank: i64,
        world_size: i64,
        num_threads: i64,
        prefetch: i64,
        epochs: Option<i64>,
    ) -> PyResult<Self> {
        let options = LoaderOptions {
            sequence_length,
            batch_size,
            seed,
            masking,
            mask_prob,
            packing,
            cut_at,
            word_starts: None,
            rank,
            world_size,
            num_threads,
            prefetch,
            epochs,
        };
        let loader = py.detach(|| open(&corpus, &options)).map_err(raise)?;
        Ok(Self { corpus: absolute(&corpus)?, options, loader: PerProcess::new(Mutex::new(loader)) })
    }

    /// The folder of the corpus, as an absolute path.
    #[getter]
    fn corpus(&self) -> &Path {
        &self.corpus
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        let loader = self.get(py)?;
        loop {
            match py.detach(|| lock(&loader).poll_next(SIGNAL_INTERVAL)).map_err(raise)? {
                Poll::Batch(batch) => return Ok(Some(RecordBatch::new(batch))),
                Poll::Finished => return Ok(None),
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// The position after the last batch that was returned, as JSON.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        let loader = self.get(py)?;
        py.detach(|| lock(&loader).state().to_json()).map_err(raise)
    }

    /// Resumes from a state in JSON.
    fn restore(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        let loader = self.get(py)?;
        py.detach(|| lock(&loader).restore(&LoaderState::from_json(state)?)).map_err(raise)
    }

    /// Rows per epoch.
    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<u64> {
        let loader = self.get(py)?;
        py.detach(|| lock(&loader).num_rows()).map_err(raise)
    }

    /// (rows, tokens of the corpus, positions that are not padding) of the first epoch.
    fn contents(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let loader = self.get(py)?;
        let contents = py.detach(|| lock(&loader).contents()).map_err(raise)?;
        Ok((contents.rows, contents.tokens, contents.positions))
    }
}

impl BatchLoader {
    /// The loader of this process. A forked child opens one at the position of the parent's.
    fn get(&self, py: Python<'_>) -> PyResult<Arc<Mutex<Loader>>> {
        self.loader.get(py, |parent| {
            let state = match parent.try_lock() {
                Ok(parent) => parent.state(),
                Err(TryLockError::Poisoned(parent)) => parent.into_inner().state(),
                Err(TryLockError::WouldBlock) => return Err(InputError::new_err(IN_USE)),
            };
            let mut loader = open(&self.corpus, &self.options).map_err(raise)?;
            loader.restore(&state).map_err(raise)?;
            Ok(Mutex::new(loader))
        })
    }
}

fn open(corpus: &Path, options: &LoaderOptions) -> Result<Loader, Error> {
    let corpus = Arc::new(Corpus::open(corpus)?);
    let mut options = options.clone();
    if options.needs_word_starts() {
        options.word_starts = Tokenizer::of_corpus(&corpus)?.word_starts().map(Into::into);
    }
    Loader::new(corpus, &options)
}

/// Must be called without the GIL: the owner of the lock may be waiting for a batch.
fn lock(loader: &Mutex<Loader>) -> MutexGuard<'_, Loader> {
    loader.lock().unwrap_or_else(PoisonError::into_inner)
}
