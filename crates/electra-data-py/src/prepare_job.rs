//! `PrepareJob` and `prepare_units`: one corpus by many processes.

use std::path::PathBuf;
use std::sync::Arc;

use electra_data::{OpenedJob, PrepareOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{InputError, raise};
use crate::prepare::{PythonCallbacks, reading, report_dict};
use crate::tokenizer::Tokenizer;

/// The parent's side of a corpus that tasks prepare.
#[pyclass(module = "electra_fast._data")]
pub(crate) struct PrepareJob {
    tokenizer: Arc<electra_data::Tokenizer>,
    /// `None` once it is closed.
    opened: Option<OpenedJob>,
}

#[pymethods]
impl PrepareJob {
    #[new]
    #[pyo3(signature = (tokenizer, out, *, files, separator="blank-line", text_fields, invalid_utf8="error",
                        format="auto", skip_bad_records=0, holdout=0.0, verify_inputs=false, _part_bytes=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python,
        tokenizer: &Tokenizer,
        out: PathBuf,
        files: Vec<PathBuf>,
        separator: &str,
        text_fields: Vec<String>,
        invalid_utf8: &str,
        format: &str,
        skip_bad_records: u64,
        holdout: f64,
        verify_inputs: bool,
        _part_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let reading = reading(separator, text_fields, invalid_utf8, format, skip_bad_records)?;
        let options = PrepareOptions {
            reading,
            validation_fraction: holdout,
            verify_inputs,
            part_bytes: _part_bytes,
            ..PrepareOptions::default()
        };
        let tokenizer = tokenizer.get(py)?;
        let opened = PythonCallbacks::new(None).run(py, None, None, |_, progress| {
            electra_data::PrepareJob::open(&files, &tokenizer, &out, options, progress)
        })?;
        Ok(Self { tokenizer, opened: Some(opened) })
    }

    /// (number, bytes of input) of each unit that is missing; none if the corpus was complete before.
    fn units(&self) -> Vec<(usize, u64)> {
        self.unfinished().map(electra_data::PrepareJob::units).unwrap_or_default()
    }

    /// What all tasks share, as text.
    fn settings(&self) -> PyResult<String> {
        self.unfinished()?.settings(&self.tokenizer).map_err(raise)
    }

    /// A unit as text, for a task.
    fn unit(&self, number: usize) -> PyResult<String> {
        self.unfinished()?.unit(number).map_err(raise)
    }

    /// Makes the corpus of what the tasks have built; the report of `prepare`.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if let Some(OpenedJob::Complete(report)) = &self.opened {
            return report_dict(py, (**report).clone());
        }
        let job = self.unfinished()?;
        report_dict(py, py.detach(|| job.finish(&self.tokenizer)).map_err(raise)?)
    }

    /// Leaves the folder to others.
    fn close(&mut self, py: Python) {
        let opened = self.opened.take();
        py.detach(|| drop(opened));
    }
}

impl PrepareJob {
    fn unfinished(&self) -> PyResult<&electra_data::PrepareJob> {
        match &self.opened {
            Some(OpenedJob::Unfinished(job)) => Ok(job),
            _ => Err(InputError::new_err("there is nothing left to prepare")),
        }
    }
}

/// The tokenizer of a job, from its settings.
#[pyfunction]
pub(crate) fn job_tokenizer(py: Python, settings: String) -> PyResult<Tokenizer> {
    py.detach(|| electra_data::job_tokenizer(&settings)).map(Tokenizer::of).map_err(raise)
}

/// (documents, tokens, bytes of input) of the units of a task, which it builds unless they are finished.
#[pyfunction]
#[pyo3(signature = (settings, units, tokenizer, threads=1))]
pub(crate) fn prepare_units(
    py: Python,
    settings: String,
    units: Vec<String>,
    tokenizer: &Tokenizer,
    threads: usize,
) -> PyResult<(u64, u64, u64)> {
    let tokenizer = tokenizer.get(py)?;
    let done = PythonCallbacks::new(None).run(py, None, None, |_, progress| {
        electra_data::prepare_units(&settings, &units, &tokenizer, threads, progress)
    })?;
    Ok((done.documents, done.tokens, done.bytes))
}
