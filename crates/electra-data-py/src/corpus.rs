//! `Corpus` and `verify`: reading a finished corpus.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use electra_data::{CacheOptions, Error};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{absolute, interruptible, raise};
use crate::prepare::{CoverageTuple, coverage_tuple};
use crate::process::PerProcess;
use crate::tokenizer::{Tokenizer, ids_to_bytes, special_tuple};

#[pyclass(frozen, module = "electra_fast._data")]
pub(crate) struct Corpus {
    path: PathBuf,
    inner: PerProcess<electra_data::Corpus>,
}

#[pymethods]
impl Corpus {
    #[new]
    #[pyo3(signature = (path, content_hash=None))]
    fn new(py: Python, path: PathBuf, content_hash: Option<&str>) -> PyResult<Self> {
        let inner = interruptible(py, || open(&path, content_hash, None))?;
        Ok(Self { path: absolute(&path)?, inner: PerProcess::new(inner) })
    }

    fn document<'py>(&self, py: Python<'py>, index: u64) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.get(py)?;
        let ids = match electra_data::url_of(&self.path) {
            None => py.detach(|| inner.document(index)).map_err(raise)?,
            Some(_) => interruptible(py, || inner.document(index))?,
        };
        ids_to_bytes(py, &ids)
    }

    /// (tokens, unknown tokens, words or None, []) of the corpus, or of an evenly spread sample.
    fn coverage(&self, py: Python, tokenizer: &Tokenizer) -> PyResult<CoverageTuple> {
        let (corpus, tokenizer) = (self.get(py)?, tokenizer.get(py)?);
        interruptible(py, || electra_data::Coverage::of_corpus(&corpus, &tokenizer)).map(coverage_tuple)
    }

    /// The count of each id, as the bytes of little-endian u64. `cache`: folder and size limit of a cache for a stored corpus.
    #[pyo3(signature = (cache=None))]
    fn token_counts<'py>(
        &self,
        py: Python<'py>,
        cache: Option<(PathBuf, u64)>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.get(py)?;
        let cache = cache.map(|(dir, bytes)| CacheOptions { dir, bytes });
        let counts = interruptible(py, || match &cache {
            None => inner.token_counts(),
            Some(_) => open(&self.path, Some(inner.content_hash()), cache.as_ref())?.token_counts(),
        })?;
        let bytes: Vec<u8> = counts.into_iter().flat_map(u64::to_le_bytes).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    #[getter]
    fn path(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let inner = self.get(py)?;
        match name {
            "num_documents" => inner.num_documents().into_bound_py_any(py),
            "num_tokens" => inner.num_tokens().into_bound_py_any(py),
            "empty_documents" => inner.empty_documents().into_bound_py_any(py),
            "vocab_size" => inner.vocab_size().into_bound_py_any(py),
            "content_hash" => inner.content_hash().into_bound_py_any(py),
            "special_tokens" => special_tuple(inner.special_tokens()).into_bound_py_any(py),
            // (documents, tokens) of each shard
            "shards" => {
                let sizes = (0..inner.num_shards()).map(|shard| inner.shard_size(shard));
                sizes.collect::<Vec<_>>().into_bound_py_any(py)
            }
            "token_bytes" => inner.token_bytes().into_bound_py_any(py),
            "tokenizer_path" => interruptible(py, || inner.tokenizer_path())?.into_bound_py_any(py),
            "tokenizer_settings" => inner.tokenizer_settings().into_bound_py_any(py),
            "options" => inner.options().into_bound_py_any(py),
            "holdout" => {
                inner.validation().map(|path| path.to_string_lossy().into_owned()).into_bound_py_any(py)
            }
            _ => Err(PyAttributeError::new_err(name.to_owned())),
        }
    }
}

impl Corpus {
    pub fn get(&self, py: Python) -> PyResult<Arc<electra_data::Corpus>> {
        self.inner.get(py, |parent| interruptible(py, || open(&self.path, Some(parent.content_hash()), None)))
    }
}

fn open(
    path: &Path,
    content_hash: Option<&str>,
    cache: Option<&CacheOptions>,
) -> Result<electra_data::Corpus, Error> {
    let corpus = electra_data::Corpus::open_with(path, cache)?;
    match (content_hash, corpus.content_hash()) {
        (Some(expected), actual) if expected != actual => Err(Error::Input(format!(
            "{}: changed since it was opened (content hash {actual}, was {expected}); open it again",
            path.display()
        ))),
        _ => Ok(corpus),
    }
}

/// The URL that a path stands for, or None for a local path. A URL with a secret is an error.
#[pyfunction]
pub(crate) fn url_of(path: PathBuf) -> PyResult<Option<String>> {
    let url = electra_data::url_of(&path);
    url.iter().try_for_each(|url| electra_data::check_url(url)).map_err(raise)?;
    Ok(url)
}

/// (files, bytes, one line per damaged part)
#[pyfunction]
pub(crate) fn verify(py: Python, path: PathBuf) -> PyResult<(u64, u64, Vec<String>)> {
    let verified = interruptible(py, || electra_data::verify(&path))?;
    Ok((verified.num_files, verified.num_bytes, verified.damaged))
}
