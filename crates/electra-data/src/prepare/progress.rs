//! Progress of a run, reported to the caller about ten times per second.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};

const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Progress of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes of input read so far, before decompression.
    pub bytes_done: u64,
    /// Bytes of input that this run has to read; 0 if unknown.
    pub bytes_total: u64,
    /// Documents with at least one token.
    pub documents: u64,
    /// Tokens in them.
    pub tokens: u64,
}

/// Limits how often a callback is called. The callback stops the run by returning `false`.
pub(super) struct ProgressReporter<'a> {
    callback: &'a mut dyn FnMut(Progress) -> bool,
    reported: Option<Instant>,
}

impl<'a> ProgressReporter<'a> {
    pub fn new(callback: &'a mut dyn FnMut(Progress) -> bool) -> Self {
        Self { callback, reported: None }
    }

    /// Reports if the last report is 100 ms old; [`Error::Interrupted`] if the run is to stop.
    pub fn report_if_due(&mut self, progress: impl FnOnce() -> Progress) -> Result<()> {
        if self.reported.is_some_and(|moment| moment.elapsed() < REPORT_EVERY) {
            return Ok(());
        }
        self.reported = Some(Instant::now());
        if (self.callback)(progress()) { Ok(()) } else { Err(Error::Interrupted) }
    }

    /// Reports the end of the run.
    pub fn finish(self, progress: Progress) {
        (self.callback)(progress);
    }
}
