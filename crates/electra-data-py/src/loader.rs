//! `BatchLoader`: the iterator of record batches.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use electra_data::{Corpus, Error, Loader, LoaderOptions, LoaderState, Poll, Tokenizer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{InputError, absolute, interruptible, raise};
use crate::process::PerProcess;
use crate::record_batch::RecordBatch;

/// Interval of checks for Ctrl-C while waiting for a batch.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

const IN_USE: &str = "this process was forked while a thread was taking a batch, so the loader's position is unknown; \
                      open a BatchLoader in this process";

type Weighted = (PathBuf, Option<f64>);

/// An iterator of record batches over corpora. `electra_fast.data.BatchLoader` documents it.
#[pyclass(frozen, module = "electra_fast._data")]
pub struct BatchLoader {
    corpora: Vec<Weighted>,
    options: LoaderOptions,
    loader: PerProcess<Mutex<Loader>>,
}

#[pymethods]
impl BatchLoader {
    #[new]
    fn new(py: Python<'_>, corpora: Vec<Weighted>, options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let options: LoaderOptions = crate::errors::options(Some(options))?;
        let loader = interruptible(py, || open(&corpora, &options))?;
        let corpora = corpora.into_iter().map(|(path, weight)| Ok((absolute(&path)?, weight)));
        Ok(Self {
            corpora: corpora.collect::<PyResult<_>>()?,
            options,
            loader: PerProcess::new(Mutex::new(loader)),
        })
    }

    /// Absolute folders or URLs, with their weights. Strings, since a `Path` would corrupt a URL.
    #[getter]
    fn corpora(&self) -> Vec<(&OsStr, Option<f64>)> {
        self.corpora.iter().map(|(path, weight)| (path.as_os_str(), *weight)).collect()
    }

    fn passes(&self, py: Python<'_>) -> PyResult<Vec<f64>> {
        let loader = self.get(py)?;
        Ok(py.detach(|| lock(&loader).passes()))
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

    fn state(&self, py: Python<'_>) -> PyResult<String> {
        let loader = self.get(py)?;
        py.detach(|| lock(&loader).state().to_json()).map_err(raise)
    }

    fn restore(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        let loader = self.get(py)?;
        interruptible(py, || lock(&loader).restore(&LoaderState::from_json(state)?))
    }

    #[getter]
    fn num_rows(&self, py: Python<'_>) -> PyResult<u64> {
        let loader = self.get(py)?;
        interruptible(py, || lock(&loader).num_rows())
    }

    /// (rows, tokens of the corpora, positions that are not padding) of the first epoch.
    fn contents(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let loader = self.get(py)?;
        let contents = interruptible(py, || lock(&loader).contents())?;
        Ok((contents.rows, contents.tokens, contents.positions))
    }
}

impl BatchLoader {
    /// The loader of this process. A forked child opens a new one at the parent's position.
    fn get(&self, py: Python<'_>) -> PyResult<Arc<Mutex<Loader>>> {
        self.loader.get(py, |parent| {
            let state = match parent.try_lock() {
                Ok(parent) => parent.state(),
                Err(TryLockError::Poisoned(parent)) => parent.into_inner().state(),
                Err(TryLockError::WouldBlock) => return Err(InputError::new_err(IN_USE)),
            };
            interruptible(py, || {
                let mut loader = open(&self.corpora, &self.options)?;
                loader.restore(&state)?;
                Ok(Mutex::new(loader))
            })
        })
    }
}

#[pyfunction]
pub(crate) fn mixture_weights(py: Python<'_>, corpora: Vec<Weighted>) -> PyResult<Vec<u64>> {
    let weights = || open(&corpora, &LoaderOptions::default()).map(|loader| loader.weights().to_vec());
    interruptible(py, weights)
}

#[pyfunction]
pub(crate) fn merge_states(states: Vec<String>) -> PyResult<String> {
    let states = states.iter().map(|state| LoaderState::from_json(state)).collect::<Result<_, _>>();
    states.and_then(LoaderState::merged).and_then(|state| state.to_json()).map_err(raise)
}

#[pyfunction]
pub(crate) fn auto_lanes(py: Python<'_>, corpora: Vec<PathBuf>, batch_size: i64) -> PyResult<i64> {
    let open = |path: &PathBuf| Ok(Arc::new(Corpus::open(path)?));
    let lanes =
        || electra_data::auto_lanes(&corpora.iter().map(open).collect::<Result<Vec<_>, _>>()?, batch_size);
    interruptible(py, lanes)
}

fn open(corpora: &[Weighted], options: &LoaderOptions) -> Result<Loader, Error> {
    options.check()?;
    let cache = options.cache(corpora.len());
    let corpora = corpora
        .iter()
        .map(|(path, weight)| Ok((Arc::new(Corpus::open_with(path, cache.as_ref())?), *weight)));
    let corpora: Vec<_> = corpora.collect::<Result<_, Error>>()?;
    let mut options = options.clone();
    if let Some((corpus, _)) = corpora.first()
        && options.needs_word_starts()
    {
        options.word_starts = Tokenizer::of_corpus(corpus)?.word_starts().map(Into::into);
    }
    Loader::mixture(corpora, &options)
}

/// Must be called without the GIL: the owner of the lock may be waiting for a batch.
fn lock(loader: &Mutex<Loader>) -> MutexGuard<'_, Loader> {
    loader.lock().unwrap_or_else(PoisonError::into_inner)
}
