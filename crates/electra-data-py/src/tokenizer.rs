//! `Tokenizer`: text to ids.

use std::path::PathBuf;
use std::sync::Arc;

use electra_data::SpecialNames;
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::corpus::Corpus;
use crate::errors::{interruptible, raise};
use crate::process::PerProcess;

type Special = (u32, u32, u32, u32, u32);

#[pyclass(frozen, module = "electra_fast._data")]
pub(crate) struct Tokenizer {
    inner: PerProcess<electra_data::Tokenizer>,
}

#[pymethods]
impl Tokenizer {
    /// Opens a file, ignoring others in its folder. `names`: unusual names of pad, unk, cls, sep and mask.
    #[new]
    #[pyo3(signature = (path, lowercase=None, strip_accents=None, names=SpecialNames::default()))]
    fn new(
        py: Python,
        path: PathBuf,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
        names: SpecialNames,
    ) -> PyResult<Self> {
        let open = || electra_data::Tokenizer::with_names(&path, (lowercase, strip_accents), &names);
        py.detach(open).map(Self::of).map_err(raise)
    }

    #[staticmethod]
    fn beside_manifest(
        path: PathBuf,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> PyResult<Option<Self>> {
        let tokenizer = electra_data::Tokenizer::beside_manifest(&path, (lowercase, strip_accents));
        Ok(tokenizer.map_err(raise)?.map(Self::of))
    }

    #[staticmethod]
    fn disagreement(vocab_txt: PathBuf, json: PathBuf) -> PyResult<Option<String>> {
        electra_data::Tokenizer::disagreement(&vocab_txt, &json).map_err(raise)
    }

    fn rules(&self, py: Python) -> PyResult<String> {
        Ok(self.get(py)?.rules())
    }

    fn token_to_id(&self, py: Python, token: &str) -> PyResult<Option<u32>> {
        Ok(self.get(py)?.token_to_id(token))
    }

    #[staticmethod]
    fn restored(
        path: PathBuf,
        file: (String, Vec<u8>),
        settings: (Option<bool>, Option<bool>),
        special_tokens: Special,
    ) -> PyResult<Self> {
        let (pad, unk, cls, sep, mask) = special_tokens;
        let special = electra_data::SpecialTokens { pad, unk, cls, sep, mask };
        electra_data::Tokenizer::restored(&path, (&file.0, file.1), settings, special)
            .map(Self::of)
            .map_err(raise)
    }

    #[staticmethod]
    fn of_corpus(py: Python, corpus: &Corpus) -> PyResult<Self> {
        let corpus = corpus.get(py)?;
        interruptible(py, || electra_data::Tokenizer::of_corpus(&corpus)).map(Self::of)
    }

    fn encode_batch<'py>(&self, py: Python<'py>, texts: Vec<String>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let inner = self.get(py)?;
        let ids = py.detach(|| inner.encode_batch(&texts)).map_err(raise)?;
        ids.iter().map(|ids| ids_to_bytes(py, ids)).collect()
    }

    /// For each text, ids, offsets (first character and one past the last) and words of its pieces, as little-endian u32 bytes.
    fn encode_with_offsets<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
    ) -> PyResult<Vec<[Bound<'py, PyBytes>; 3]>> {
        let inner = self.get(py)?;
        let pieces = py.detach(|| inner.encode_batch_with_offsets(&texts)).map_err(raise)?;
        let bytes = |pieces: &electra_data::Pieces| {
            let offsets = ids_to_bytes(py, pieces.offsets.as_flattened())?;
            Ok([ids_to_bytes(py, &pieces.ids)?, offsets, ids_to_bytes(py, &pieces.words)?])
        };
        pieces.iter().map(bytes).collect()
    }

    fn decode(&self, py: Python, ids: Vec<u32>) -> PyResult<String> {
        self.get(py)?.decode(&ids).map_err(raise)
    }

    fn id_to_token(&self, py: Python, id: u32) -> PyResult<Option<String>> {
        Ok(self.get(py)?.id_to_token(id))
    }

    /// For each id, whether it begins a word; None if the vocabulary does not mark words.
    fn word_starts(&self, py: Python) -> PyResult<Option<Vec<bool>>> {
        Ok(self.get(py)?.word_starts())
    }

    fn content_hash(&self, py: Python) -> PyResult<String> {
        let inner = self.get(py)?;
        py.detach(|| inner.content_hash()).map_err(raise)
    }

    fn to_json(&self, py: Python) -> PyResult<String> {
        let inner = self.get(py)?;
        py.detach(|| inner.to_json()).map_err(raise)
    }

    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let inner = self.get(py)?;
        match name {
            // Name and bytes, as stored in a corpus
            "file" => (inner.file().0, PyBytes::new(py, inner.file().1)).into_bound_py_any(py),
            "vocab_size" => inner.vocab_size().into_bound_py_any(py),
            "fast" => inner.is_fast().into_bound_py_any(py),
            "fallback_reason" => inner.fallback_reason().into_bound_py_any(py),
            "settings" => inner.settings().into_bound_py_any(py),
            "path" => inner.path().into_bound_py_any(py),
            "special_tokens" => special_tuple(inner.special_tokens()).into_bound_py_any(py),
            _ => Err(PyAttributeError::new_err(name.to_owned())),
        }
    }
}

impl Tokenizer {
    pub fn of(inner: electra_data::Tokenizer) -> Self {
        Self { inner: PerProcess::new(inner) }
    }

    pub fn get(&self, py: Python) -> PyResult<Arc<electra_data::Tokenizer>> {
        self.inner.get(py, |parent| {
            let (name, file) = parent.file();
            let (file, special) = ((name, file.to_vec()), parent.special_tokens());
            electra_data::Tokenizer::restored(parent.path(), file, parent.settings(), special).map_err(raise)
        })
    }
}

pub(crate) fn special_tuple(special: electra_data::SpecialTokens) -> Special {
    (special.pad, special.unk, special.cls, special.sep, special.mask)
}

pub(crate) fn ids_to_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, 4 * ids.len(), |bytes| {
        bytes.chunks_exact_mut(4).zip(ids).for_each(|(four, id)| four.copy_from_slice(&id.to_le_bytes()));
        Ok(())
    })
}
