//! `prepare` and `train_vocab`: text to corpus, text to vocabulary.

use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};

use electra_data::{
    Coverage, DropDuplicates, Error, PassedOver, PrepareOptions, PrepareReport, Progress, ReadOptions,
    RepeatCount, Repeats, SkippedRecord, TextSource, VocabOptions, VocabReport,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::errors::{interruptible, options, raise};
use crate::tokenizer::Tokenizer;

/// Prepares a corpus from either `files` or `texts`, an iterator; `reading` has the options for reading files.
#[pyfunction]
#[pyo3(signature = (tokenizer, out, *, files=None, texts=None, holdout=0.0, drop_duplicates=None, partition=None,
                    verify_inputs=false, threads=None, progress=None, _part_bytes=None, **reading))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn prepare<'py>(
    py: Python<'py>,
    tokenizer: &Tokenizer,
    out: PathBuf,
    files: Option<Vec<PathBuf>>,
    texts: Option<Py<PyAny>>,
    holdout: f64,
    drop_duplicates: Option<&str>,
    partition: Option<(usize, usize)>,
    verify_inputs: bool,
    threads: Option<usize>,
    progress: Option<Py<PyAny>>,
    _part_bytes: Option<u64>,
    reading: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let reading = options::<ReadOptions>(reading)?;
    let part_bytes = _part_bytes;
    let settings = PrepareOptions {
        reading,
        validation_fraction: holdout,
        drop_duplicates: drop_duplicates_from(drop_duplicates)?,
        partition,
        verify_inputs,
        threads,
        part_bytes,
    };
    let tokenizer = tokenizer.get(py)?;
    let report = PythonCallbacks::new(progress).run(py, files, texts, |source, report| {
        electra_data::prepare(source, &tokenizer, &out, &settings, report)
    })?;
    report_dict(py, report)
}

pub(crate) fn drop_duplicates_from(name: Option<&str>) -> PyResult<Option<DropDuplicates>> {
    #[derive(Default, serde::Deserialize)]
    #[serde(default)]
    struct Options {
        drop_duplicates: Option<DropDuplicates>,
    }
    let values = [("drop_duplicates".to_owned(), name.into())].into_iter().collect();
    electra_data::options_from::<Options>(values).map(|options| options.drop_duplicates).map_err(raise)
}

pub(crate) fn report_dict(py: Python, report: PrepareReport) -> PyResult<Bound<PyDict>> {
    let result = PyDict::new(py);
    macro_rules! set {
        ($($name:ident)*) => { $(result.set_item(stringify!($name), report.$name)?;)* };
    }
    set!(complete already_complete num_files num_input_groups missing_input_groups unhashed_input_groups);
    set!(num_documents num_tokens empty_documents dropped_documents emptied_documents dropped_lines);
    set!(skipped_rows rebuilt_input_groups content_hash);
    set_passed_over(&result, report.passed_over)?;
    result.set_item("skipped_splits", PyTuple::new(py, report.skipped_splits)?)?;
    result.set_item("holdout_documents", report.validation_documents)?;
    result.set_item("repeats", report.repeats.map(repeats_tuple))?;
    result.set_item("first_skipped", tuples(py, report.first_skipped)?)?;
    result.set_item("changed_input", report.changed_input.map(|path| path.to_string_lossy().into_owned()))?;
    Ok(result)
}

type RepeatsTuple = ((u64, u64, u64), (u64, u64, u64), Vec<(String, u64)>, u64);

fn repeats_tuple(repeats: Repeats) -> RepeatsTuple {
    let count = |count: RepeatCount| (count.total, count.repeated, count.sampled);
    let lines = repeats.most_repeated.into_iter().map(|line| (line.text, line.count)).collect();
    (count(repeats.documents), count(repeats.lines), lines, repeats.most_repeated_error)
}

#[pyfunction]
#[pyo3(signature = (run=None, *, files, **reading))]
pub(crate) fn text_sample(
    py: Python,
    run: Option<(PyRef<Tokenizer>, PathBuf)>,
    files: Vec<PathBuf>,
    reading: Option<&Bound<PyDict>>,
) -> PyResult<Vec<String>> {
    let reading = options::<ReadOptions>(reading)?;
    let run = run.map(|(tokenizer, out)| Ok::<_, PyErr>((tokenizer.get(py)?, out))).transpose()?;
    interruptible(py, || {
        let run = run.as_ref().map(|(tokenizer, out)| (&**tokenizer, &**out));
        electra_data::text_sample(&files, run, &reading)
    })
}

#[pyfunction]
pub(crate) fn text_coverage(
    py: Python,
    tokenizer: &Tokenizer,
    texts: Vec<String>,
) -> PyResult<CoverageTuple> {
    let tokenizer = tokenizer.get(py)?;
    py.detach(|| Coverage::of_texts(&texts, &tokenizer)).map(coverage_tuple).map_err(raise)
}

pub(crate) type CoverageTuple = (u64, u64, Option<u64>, Vec<(String, u64)>);

pub(crate) fn coverage_tuple(coverage: Coverage) -> CoverageTuple {
    (coverage.tokens, coverage.unknown, coverage.words, coverage.unknown_words)
}

#[pyfunction]
#[pyo3(signature = (out, *, files=None, texts=None, size, lowercase, strip_accents, character_coverage,
                    min_frequency, threads=None, sample=None, seed=0, progress=None, counted=None, **reading))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn train_vocab<'py>(
    py: Python<'py>,
    out: PathBuf,
    files: Option<Vec<PathBuf>>,
    texts: Option<Py<PyAny>>,
    size: usize,
    lowercase: bool,
    strip_accents: bool,
    character_coverage: f64,
    min_frequency: u64,
    threads: Option<usize>,
    sample: Option<u64>,
    seed: u64,
    progress: Option<Py<PyAny>>,
    counted: Option<Py<PyAny>>,
    reading: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let reading = options::<ReadOptions>(reading)?;
    let settings = VocabOptions {
        reading,
        size,
        lowercase,
        strip_accents,
        character_coverage,
        min_frequency,
        threads,
        sample,
        seed,
    };
    let mut raised = None;
    let report = PythonCallbacks::new(progress).run(py, files, texts, |source, progress| {
        let mut call_counted = |report: &VocabReport| {
            let (alphabet, bytes) = (&report.alphabet, (report.counted_bytes, report.text_bytes));
            let letters = (
                alphabet.num_letters(),
                alphabet.num_dropped,
                alphabet.dropped_letters,
                alphabet.text_letters,
            );
            let arguments =
                (report.num_words, bytes, letters, alphabet.dropped_words, &alphabet.most_dropped);
            let call = |call: &Py<PyAny>| Python::attach(|py| call.call1(py, arguments)).err();
            raised = counted.as_ref().and_then(call);
            raised.is_none()
        };
        electra_data::train_vocab(source, &out, &settings, progress, &mut call_counted)
    });
    if let Some(error) = raised {
        return Err(error);
    }
    let report = report?;
    let result = PyDict::new(py);
    result.set_item("num_entries", report.num_entries)?;
    set_passed_over(&result, report.passed_over)?;
    result.set_item("skipped_rows", report.skipped.len())?;
    result.set_item("first_skipped", tuples(py, report.skipped.into_iter().take(10))?)?;
    Ok(result)
}

fn set_passed_over(result: &Bound<'_, PyDict>, files: PassedOver) -> PyResult<()> {
    result.set_item("skipped_files", files.files)?;
    result.set_item("skipped_bytes", files.bytes)?;
    result.set_item("read_bytes", files.bytes_read)?;
    result.set_item("skipped_kinds", PyTuple::new(result.py(), files.kinds)?)
}

fn tuples(py: Python<'_>, records: impl IntoIterator<Item = SkippedRecord>) -> PyResult<Bound<'_, PyTuple>> {
    let records: Vec<_> = records.into_iter().map(|r| (r.file, r.line, r.reason)).collect();
    PyTuple::new(py, records)
}

pub(crate) struct PythonCallbacks {
    progress: Option<Py<PyAny>>,
}

impl PythonCallbacks {
    pub fn new(progress: Option<Py<PyAny>>) -> Self {
        Self { progress }
    }

    /// Runs `work` without the GIL and reports its progress here. An exception raised in Python meanwhile stops it.
    pub fn run<T: Send>(
        &self,
        py: Python,
        files: Option<Vec<PathBuf>>,
        texts: Option<Py<PyAny>>,
        work: impl FnOnce(TextSource, &mut dyn FnMut(Progress) -> bool) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let failure = std::sync::Mutex::new(None);
        let source = match texts {
            Some(iterator) => TextSource::Documents(Box::new(PyDocuments { iterator, failure: &failure })),
            None => TextSource::Files(files.unwrap_or_default()),
        };
        let ask = |progress, asks: &Sender<(Progress, Sender<()>)>| {
            let (reply, answer) = channel();
            asks.send((progress, reply)).is_ok() && answer.recv().is_ok()
        };
        let attend = |event: Option<(Progress, Sender<()>)>| -> PyResult<()> {
            let (progress, reply) = event.unzip();
            self.report(progress)?;
            let _ = reply.map(|reply| reply.send(())); // the run may have ended in the meantime
            Ok(())
        };
        let run =
            || electra_data::attended(|asks| work(source, &mut |progress| ask(progress, &asks)), attend);
        let result = py.detach(run)?;
        match (result, failure.into_inner().unwrap_or(None)) {
            (Err(_), Some(raised)) => Err(raised),
            (result, _) => result.map_err(raise),
        }
    }

    fn report(&self, progress: Option<Progress>) -> PyResult<()> {
        Python::attach(|py| {
            py.check_signals()?;
            match (&self.progress, progress) {
                (Some(call), Some(Progress { bytes_done, bytes_total, documents, tokens, step })) => {
                    call.call1(py, (bytes_done, bytes_total, documents, tokens, step)).map(drop)
                }
                _ => Ok(()),
            }
        })
    }
}

/// A Python iterator of `str`, called on the reading thread.
struct PyDocuments<'a> {
    iterator: Py<PyAny>,
    failure: &'a std::sync::Mutex<Option<PyErr>>,
}

impl Iterator for PyDocuments<'_> {
    type Item = Result<String, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = Python::attach(|py| -> PyResult<Option<String>> {
            self.iterator.bind(py).try_iter()?.next().transpose()?.map(|text| text.extract()).transpose()
        });
        match item {
            Ok(text) => text.map(Ok),
            Err(error) => {
                if let Ok(mut failure) = self.failure.lock() {
                    *failure = Some(error);
                }
                Some(Err(Error::Interrupted))
            }
        }
    }
}
