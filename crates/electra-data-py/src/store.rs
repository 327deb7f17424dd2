//! `Corpus` and `verify`: reading what `prepare` made.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::build::{CoverageTuple, coverage_tuple};
use crate::errors::raise;
use crate::tokenizer::{Tokenizer, ids_to_bytes, special_tuple};

/// A finished corpus.
#[pyclass(frozen, module = "electra_fast._data")]
pub(crate) struct Corpus {
    inner: electra_data::Corpus,
}

#[pymethods]
impl Corpus {
    #[new]
    fn new(py: Python, path: PathBuf) -> PyResult<Self> {
        let inner = py.detach(|| electra_data::Corpus::open(&path)).map_err(raise)?;
        Ok(Self { inner })
    }

    /// Ids of a document as the bytes of little-endian u32.
    fn document<'py>(&self, py: Python<'py>, index: u64) -> PyResult<Bound<'py, PyBytes>> {
        let ids = py.detach(|| self.inner.document(index)).map_err(raise)?;
        ids_to_bytes(py, &ids)
    }

    /// (tokens, unknown tokens, words or None, []) of the corpus or an evenly spread sample of it.
    fn coverage(&self, py: Python, tokenizer: &Tokenizer) -> PyResult<CoverageTuple> {
        let found = py.detach(|| electra_data::Coverage::of_corpus(&self.inner, &tokenizer.inner));
        found.map(coverage_tuple).map_err(raise)
    }

    #[getter]
    fn num_documents(&self) -> u64 {
        self.inner.num_documents()
    }

    #[getter]
    fn num_tokens(&self) -> u64 {
        self.inner.num_tokens()
    }

    #[getter]
    fn empty_documents(&self) -> u64 {
        self.inner.empty_documents()
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.inner.vocab_size()
    }

    #[getter]
    fn content_hash(&self) -> &str {
        self.inner.content_hash()
    }

    /// (pad, unk, cls, sep, mask)
    #[getter]
    fn special_tokens(&self) -> (u32, u32, u32, u32, u32) {
        special_tuple(self.inner.special_tokens())
    }

    /// (documents, tokens) of each shard
    #[getter]
    fn shards(&self) -> Vec<(u64, u64)> {
        self.inner.shards().iter().map(|shard| (shard.num_documents(), shard.num_tokens())).collect()
    }

    #[getter]
    fn tokenizer_path(&self) -> PathBuf {
        self.inner.tokenizer_path()
    }

    /// (lowercase, strip_accents)
    #[getter]
    fn tokenizer_settings(&self) -> (Option<bool>, Option<bool>) {
        self.inner.tokenizer_settings()
    }

    /// Options that the corpus was prepared with, as JSON.
    #[getter]
    fn options(&self) -> String {
        self.inner.options()
    }

    #[getter]
    fn holdout(&self) -> Option<PathBuf> {
        self.inner.holdout()
    }
}

/// (files, bytes, one line for each piece of damage)
#[pyfunction]
pub(crate) fn verify(py: Python, path: PathBuf) -> PyResult<(u64, u64, Vec<String>)> {
    let verified = py.detach(|| electra_data::verify(&path)).map_err(raise)?;
    Ok((verified.num_files, verified.num_bytes, verified.damaged))
}
