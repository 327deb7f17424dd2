//! Running input groups in pipelines: several groups are read and written at once, each entirely in one pipeline.
//!
//! A reader delivers about 500 MB/s of plain text, or 250 MB/s of compressed text, a worker tokenizes 150 to 250
//! MB/s, and a writer waits for the disk after each group: so there is one pipeline for every two workers. Workers are not
//! tied to pipelines, and keep their caches for the whole run. The bytes of a group do not depend on workers or pipelines.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};

use super::input_group::{InputGroupBuilder, PipelineWriter, Written, line_cut, tokenize};
use super::options::Pass;
use super::output_dir::InputGroupRecord;
use super::progress::{Progress, ProgressReporter, Report};
use super::repeats::watch;
use crate::error::{Error, Result};
use crate::input::{Batcher, Intake, SkipLog, TextBatch, with_workers};
use crate::store::Cancel;
use crate::threads::lock;

const WORKERS_PER_PIPELINE: usize = 2;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Todo {
    pub number: usize,
    /// Bytes of input, for progress; 0 if unknown.
    pub bytes: u64,
}

/// Sends the documents of an input group; counts the bytes that it reads.
pub(super) type ReadGroup<'a> = dyn Fn(usize, &AtomicU64, &mut Batcher) -> Result<()> + Sync + 'a;

struct Shared<'a> {
    todo: &'a [Todo],
    taken: AtomicUsize,
    written: Written,
    /// Bytes of completely read groups, and of the group that each pipeline is reading.
    bytes_finished: AtomicU64,
    bytes_read: Vec<AtomicU64>,
    is_stopped: AtomicBool,
    cancel: &'a Cancel,
    failure: Mutex<Option<Error>>,
}

/// Builds input groups with `threads` workers, and returns the amount built. The first error stops all pipelines;
/// finished groups are kept.
///
/// `progress` is called on this thread.
pub(super) fn build(
    builder: &InputGroupBuilder,
    threads: usize,
    todo: &[Todo],
    skips: &SkipLog,
    read: &ReadGroup,
    progress: &mut Report,
) -> Result<Progress> {
    if todo.is_empty() {
        return Ok(Progress::default());
    }
    // Hashing needs no workers.
    let per_pipeline = if let Pass::Hash(_) = builder.pass { 1 } else { WORKERS_PER_PIPELINE };
    let pipelines = threads.div_ceil(per_pipeline).min(todo.len());
    let shared = Shared {
        todo,
        taken: AtomicUsize::new(0),
        written: Written::default(),
        bytes_finished: AtomicU64::new(0),
        bytes_read: (0..pipelines).map(|_| AtomicU64::new(0)).collect(),
        is_stopped: AtomicBool::new(false),
        cancel: &builder.cancel,
        failure: Mutex::new(None),
    };
    let worker = || {
        let mut encoder = builder.tokenizer.encoder();
        move |batch: TextBatch| tokenize(&mut encoder, &batch)
    };
    let mut reporter = ProgressReporter::new(progress);
    with_workers(threads, pipelines, worker, |workers| {
        std::thread::scope(|scope| {
            let (ending, ended) = bounded::<()>(0);
            // Without capacity, so that a pipeline waits for an upload instead of filling the disk.
            let (finished, uploads) = bounded::<InputGroupRecord>(0);
            let save = |record| builder.cancel.carry(|| builder.out.save_record(&builder.pass, &record));
            for _ in 0..builder.out.num_uploads() {
                let (shared, ending, uploads) = (&shared, ending.clone(), uploads.clone());
                scope.spawn(move || {
                    // The first failure ends the uploads, so that no pipeline waits for an unavailable store.
                    shared.note(uploads.iter().try_for_each(save));
                    drop((ending, uploads));
                });
            }
            drop(uploads);
            for pipeline in 0..pipelines {
                let (shared, ending, skips, finished) =
                    (&shared, ending.clone(), skips.clone(), finished.clone());
                scope.spawn(move || {
                    let watch = Some(watch(builder.out, &builder.pass, builder.num_groups));
                    let intake = Intake { skips, watch, ..Intake::everything(line_cut(builder.tokenizer)) };
                    let mut writer =
                        PipelineWriter { builder, written: &shared.written, finished, current: None };
                    let read = |to: &mut Batcher| shared.read_all(pipeline, read, to);
                    let consume = |batch: Option<_>| {
                        shared.check_stopped()?;
                        batch.map_or(Ok(()), |batch| builder.cancel.carry(|| writer.write(batch)))
                    };
                    let outcome = workers.run_pipeline(intake, read, consume);
                    shared.note(outcome.and_then(|()| writer.end()));
                    drop(ending);
                });
            }
            drop((ending, finished));
            loop {
                if !shared.is_stopped.load(Ordering::Relaxed) {
                    shared.note(reporter.report_if_due(|| shared.progress()));
                }
                if ended.recv_timeout(POLL_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
        });
    });
    if let Some(error) = lock(&shared.failure).take() {
        return Err(error);
    }
    let built = shared.progress();
    reporter.finish(built);
    Ok(built)
}

impl Shared<'_> {
    fn read_all(&self, pipeline: usize, read: &ReadGroup, to: &mut Batcher) -> Result<()> {
        while let Some(group) = self.todo.get(self.taken.fetch_add(1, Ordering::Relaxed)) {
            self.check_stopped()?;
            to.begin_input_group(group.number)?;
            read(group.number, &self.bytes_read[pipeline], to)?;
            to.end_input_group()?;
            let read = self.bytes_read[pipeline].swap(0, Ordering::Relaxed);
            // A part may have more or fewer bytes than its nominal size; the sum over all parts is right.
            let counted = if group.bytes > 0 { group.bytes } else { read };
            self.bytes_finished.fetch_add(counted, Ordering::Relaxed);
        }
        Ok(())
    }

    fn check_stopped(&self) -> Result<()> {
        if self.is_stopped.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn note(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            lock(&self.failure).get_or_insert(error);
            self.is_stopped.store(true, Ordering::Relaxed);
            self.cancel.raise();
        }
    }

    fn progress(&self) -> Progress {
        let reading: u64 = self.bytes_read.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum();
        let bytes_total = self.todo.iter().map(|group| group.bytes).sum();
        let bytes_done = self.bytes_finished.load(Ordering::Relaxed) + reading;
        Progress {
            bytes_done: if bytes_total > 0 { bytes_done.min(bytes_total) } else { bytes_done },
            bytes_total,
            // Tokens are counted before their document.
            documents: self.written.documents.load(Ordering::Acquire),
            tokens: self.written.tokens.load(Ordering::Acquire),
            step: "",
        }
    }
}
