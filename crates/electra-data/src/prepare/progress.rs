//! Progress of a run, reported to the caller about ten times per second.

use std::sync::Mutex;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::store::{Cancel, attended};
use crate::threads::lock;

const REPORT_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    pub bytes_done: u64,
    /// Bytes of input that this run must read; 0 if unknown.
    pub bytes_total: u64,
    pub documents: u64,
    pub tokens: u64,
    /// The current step other than reading the input, with the bytes of the run's files; empty while it reads the input.
    pub step: &'static str,
}

pub type Report<'a> = dyn FnMut(Progress) -> bool + 'a;

/// The current step of a run outside the reading of its input.
#[derive(Default)]
pub(super) struct Step(Mutex<Progress>);

impl Step {
    pub fn begin(&self, step: &'static str, bytes_total: u64) {
        *lock(&self.0) = Progress { step, bytes_total, ..Progress::default() };
    }

    /// Adds bytes that were read; [`Error::Interrupted`] if the run should stop.
    pub fn advance(&self, bytes: u64) -> Result<()> {
        lock(&self.0).bytes_done += bytes;
        if Cancel::default().is_raised() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Runs `work` on a thread and reports its steps on this one. Stopping cancels all its requests.
    pub fn report<T: Send>(progress: &mut Report, work: impl FnOnce(&Self) -> Result<T> + Send) -> Result<T> {
        // A very short step is not reported.
        let mut reporter = ProgressReporter { callback: progress, reported: Some(Instant::now()) };
        let step = Self::default();
        attended(|_: Sender<()>| work(&step), |_| reporter.report_if_due(|| *lock(&step.0)))?
    }

    pub fn report_one<T: Send>(
        progress: &mut Report,
        step: &'static str,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        Self::report(progress, |steps| {
            steps.begin(step, 0);
            work()
        })
    }
}

pub(super) struct ProgressReporter<'a> {
    callback: &'a mut Report<'a>,
    reported: Option<Instant>,
}

impl<'a> ProgressReporter<'a> {
    pub fn new(callback: &'a mut Report<'a>) -> Self {
        Self { callback, reported: None }
    }

    /// Reports if the last report is 100 ms old; [`Error::Interrupted`] if the run should stop.
    pub fn report_if_due(&mut self, progress: impl FnOnce() -> Progress) -> Result<()> {
        if self.reported.is_some_and(|moment| moment.elapsed() < REPORT_EVERY) {
            return Ok(());
        }
        self.reported = Some(Instant::now());
        if (self.callback)(progress()) { Ok(()) } else { Err(Error::Interrupted) }
    }

    pub fn finish(self, progress: Progress) {
        (self.callback)(progress);
    }
}
