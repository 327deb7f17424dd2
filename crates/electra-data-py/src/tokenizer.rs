//! `Tokenizer`: text to ids.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::raise;

/// A tokenizer of vocab.txt or tokenizer.json: the one reader of both.
#[pyclass(frozen, module = "electra_fast._data")]
pub(crate) struct Tokenizer {
    pub inner: electra_data::Tokenizer,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (path, lowercase=None, strip_accents=None))]
    fn new(
        py: Python,
        path: PathBuf,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> PyResult<Self> {
        let inner = py
            .detach(|| electra_data::Tokenizer::from_file(&path, lowercase, strip_accents))
            .map_err(raise)?;
        Ok(Self { inner })
    }

    /// Ids of each text as the bytes of little-endian u32.
    fn encode_batch<'py>(&self, py: Python<'py>, texts: Vec<String>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let ids = py.detach(|| self.inner.encode_batch(&texts)).map_err(raise)?;
        ids.iter().map(|ids| ids_to_bytes(py, ids)).collect()
    }

    fn decode(&self, ids: Vec<u32>) -> PyResult<String> {
        self.inner.decode(&ids).map_err(raise)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.inner.vocab_size()
    }

    #[getter]
    fn fast(&self) -> bool {
        self.inner.is_fast()
    }

    /// A clause, or None if the fast path serves.
    #[getter]
    fn why_not_fast(&self) -> Option<&'static str> {
        self.inner.why_not_fast()
    }

    /// (lowercase, strip_accents)
    #[getter]
    fn settings(&self) -> (Option<bool>, Option<bool>) {
        self.inner.settings()
    }

    /// Nothing told the settings: they follow from the entries.
    #[getter]
    fn case_is_guessed(&self) -> bool {
        self.inner.case_is_guessed()
    }

    #[getter]
    fn path(&self) -> PathBuf {
        self.inner.path().to_owned()
    }

    /// (name, bytes) of the copy that a corpus keeps
    #[getter]
    fn file<'py>(&self, py: Python<'py>) -> (&'static str, Bound<'py, PyBytes>) {
        let (name, bytes) = self.inner.file();
        (name, PyBytes::new(py, bytes))
    }

    fn content_hash(&self, py: Python) -> PyResult<String> {
        py.detach(|| self.inner.content_hash()).map_err(raise)
    }

    fn to_json(&self, py: Python) -> PyResult<String> {
        py.detach(|| self.inner.to_json()).map_err(raise)
    }

    /// (pad, unk, cls, sep, mask)
    #[getter]
    fn special_tokens(&self) -> (u32, u32, u32, u32, u32) {
        special_tuple(self.inner.special_tokens())
    }
}

/// Special tokens in the order that Python's named tuple has.
pub(crate) fn special_tuple(special: electra_data::SpecialTokens) -> (u32, u32, u32, u32, u32) {
    (special.pad, special.unk, special.cls, special.sep, special.mask)
}

/// Ids as bytes that numpy reads as `<u4`.
pub(crate) fn ids_to_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, 4 * ids.len(), |bytes| {
        bytes.chunks_exact_mut(4).zip(ids).for_each(|(four, id)| four.copy_from_slice(&id.to_le_bytes()));
        Ok(())
    })
}
