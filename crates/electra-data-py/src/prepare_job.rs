//! `PrepareJob` and `prepare_input_groups`: one corpus prepared by many processes.

use std::path::PathBuf;
use std::sync::Arc;

use electra_data::{OpenedJob, PrepareOptions};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{InputError, interruptible, options, raise};
use crate::prepare::{PythonCallbacks, drop_duplicates_from, report_dict};
use crate::tokenizer::Tokenizer;

#[pyclass(module = "electra_fast._data")]
pub(crate) struct PrepareJob {
    tokenizer: Arc<electra_data::Tokenizer>,
    /// `None` once it is closed.
    opened: Option<OpenedJob>,
    callbacks: PythonCallbacks,
}

#[pymethods]
impl PrepareJob {
    #[new]
    #[pyo3(signature = (tokenizer, out, *, files, holdout=0.0, drop_duplicates=None, verify_inputs=false,
                        _part_bytes=None, progress=None, **reading))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python,
        tokenizer: &Tokenizer,
        out: PathBuf,
        files: Vec<PathBuf>,
        holdout: f64,
        drop_duplicates: Option<&str>,
        verify_inputs: bool,
        _part_bytes: Option<u64>,
        progress: Option<Py<PyAny>>,
        reading: Option<&Bound<PyDict>>,
    ) -> PyResult<Self> {
        let options = PrepareOptions {
            reading: options(reading)?,
            validation_fraction: holdout,
            drop_duplicates: drop_duplicates_from(drop_duplicates)?,
            verify_inputs,
            part_bytes: _part_bytes,
            ..PrepareOptions::default()
        };
        let tokenizer = tokenizer.get(py)?;
        let callbacks = PythonCallbacks::new(progress);
        let opened = callbacks.run(py, None, None, |_, progress| {
            electra_data::PrepareJob::open(&files, &tokenizer, &out, options, progress)
        })?;
        Ok(Self { tokenizer, opened: Some(opened), callbacks })
    }

    /// The missing input groups as (number, bytes of input); none if the corpus was already complete.
    fn input_groups(&self) -> Vec<(usize, u64)> {
        self.unfinished().map(electra_data::PrepareJob::input_groups).unwrap_or_default()
    }

    fn next_pass(&mut self, py: Python) -> PyResult<bool> {
        let (tokenizer, opened) = (&self.tokenizer, &mut self.opened);
        self.callbacks.run(py, None, None, |_, progress| match opened {
            Some(OpenedJob::Unfinished(job)) => job.next_pass(tokenizer, progress),
            _ => Ok(false),
        })
    }

    fn settings(&self) -> PyResult<String> {
        self.unfinished()?.settings(&self.tokenizer).map_err(raise)
    }

    fn input_group(&self, number: usize) -> PyResult<String> {
        self.unfinished()?.input_group(number).map_err(raise)
    }

    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if let Some(OpenedJob::Complete(report)) = &self.opened {
            return report_dict(py, (**report).clone());
        }
        let job = self.unfinished()?;
        let report =
            self.callbacks.run(py, None, None, |_, progress| job.finish(&self.tokenizer, progress))?;
        report_dict(py, report)
    }

    fn close(&mut self, py: Python) {
        let opened = self.opened.take();
        py.detach(|| drop(opened));
    }
}

impl PrepareJob {
    fn unfinished(&self) -> PyResult<&electra_data::PrepareJob> {
        match &self.opened {
            Some(OpenedJob::Unfinished(job)) => Ok(job),
            _ => Err(InputError::new_err("no input group is left to prepare")),
        }
    }
}

#[pyfunction]
pub(crate) fn job_tokenizer(py: Python, settings: String) -> PyResult<Tokenizer> {
    interruptible(py, || electra_data::job_tokenizer(&settings)).map(Tokenizer::of)
}

#[pyfunction]
#[pyo3(signature = (settings, input_groups, tokenizer, threads=1))]
pub(crate) fn prepare_input_groups(
    py: Python,
    settings: String,
    input_groups: Vec<String>,
    tokenizer: &Tokenizer,
    threads: usize,
) -> PyResult<(u64, u64, u64)> {
    let tokenizer = tokenizer.get(py)?;
    let done = PythonCallbacks::new(None).run(py, None, None, |_, progress| {
        electra_data::prepare_input_groups(&settings, &input_groups, &tokenizer, threads, progress)
    })?;
    Ok((done.documents, done.tokens, done.bytes))
}
