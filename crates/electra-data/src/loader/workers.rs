//! The threads of a loader: one per corpus plans windows, the others write batches.
//!
//! A planner works one window ahead. The caller's thread cuts the stream of rows into global batches and
//! sends the slice of this rank to the workers. Batches are returned in the order in which they were
//! requested, so scheduling never changes the result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use super::batch::{BatchWriter, BufferPool, RowRange};
use super::batch_cutter::{BatchCutter, NextBatch, rank_slice};
use super::mask::Masker;
use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::pack::Packer;
use super::position::{CorpusPosition, RowPosition};
use super::shuffle_window::ShuffleWindow;
use crate::error::{Error, Result};
use crate::store::Cancel;

/// State shared by the threads of a loader.
pub(super) struct Shared {
    pub mixture: Mixture,
    pub options: LoaderOptions,
    pub pool: Arc<BufferPool>,
    /// For each corpus, how many planned windows may wait for the caller. A corpus of a mixture has one window besides
    /// the current one, a corpus alone two.
    pub windows_waiting: Vec<usize>,
}

/// The result of waiting for a batch.
#[derive(Debug)]
pub enum Poll {
    /// This rank's slice of the next batch, which may be empty if the batch has fewer rows than there are ranks.
    Batch(RecordBatch),
    /// The batch is not ready yet.
    Pending,
    /// All epochs are finished.
    Finished,
}

struct BatchRequest {
    rows: Vec<RowRange>,
    reply: Sender<Result<RecordBatch>>,
}

/// A batch that is being written, and the positions of the corpora after it.
struct PendingBatch {
    reply: Receiver<Result<RecordBatch>>,
    after: Vec<CorpusPosition>,
}

type Planned = Result<Arc<ShuffleWindow>>;

/// The running threads. Dropping it closes their channels and joins them.
pub(super) struct Pipeline {
    /// The positions of the corpora after the last batch that was returned.
    pub positions: Vec<CorpusPosition>,
    shared: Arc<Shared>,
    cutter: BatchCutter,
    /// The windows of each corpus, in order.
    plans: Vec<Receiver<Planned>>,
    /// The corpus whose next window the cutter needs.
    awaited: usize,
    requests: Option<Sender<BatchRequest>>,
    pending: VecDeque<PendingBatch>,
    /// Returned after the batches before it.
    failure: Option<Error>,
    ended: bool,
    cancel: Cancel,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    pub fn start(shared: &Arc<Shared>, positions: &[CorpusPosition]) -> Result<Self> {
        let (requests, request_receiver) = unbounded();
        let mut pipeline = Self {
            positions: positions.to_vec(),
            shared: shared.clone(),
            cutter: BatchCutter::new(positions, &shared.mixture, &shared.options),
            plans: Vec::new(),
            awaited: 0,
            requests: Some(requests),
            pending: VecDeque::new(),
            failure: None,
            ended: false,
            cancel: Cancel::default(),
            threads: Vec::new(),
        };
        for (corpus, position) in positions.iter().enumerate() {
            let (shared, start, cancel) = (shared.clone(), position.at, pipeline.cancel.clone());
            let (sender, plans) = bounded(shared.windows_waiting[corpus]);
            pipeline.plans.push(plans);
            pipeline.spawn("electra-plan", move || plan(&shared, corpus, start, &sender, &cancel))?;
        }
        for _ in 0..shared.options.num_threads {
            let (shared, requests) = (shared.clone(), request_receiver.clone());
            pipeline.spawn("electra-load", move || work(&shared, &requests))?;
        }
        Ok(pipeline)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        self.threads.push(thread.map_err(|error| Error::Input(format!("cannot start a thread: {error}")))?);
        Ok(())
    }

    pub fn poll_next(&mut self, deadline: Instant) -> Result<Poll> {
        loop {
            self.request_ahead();
            if let Some(pending) = self.pending.front_mut() {
                let result = match pending.reply.recv_deadline(deadline) {
                    Ok(result) => result,
                    Err(RecvTimeoutError::Timeout) => return Ok(Poll::Pending),
                    Err(RecvTimeoutError::Disconnected) => Err(stopped()),
                };
                let after = std::mem::take(&mut pending.after);
                self.pending.pop_front();
                let batch = result?;
                self.positions = after;
                return Ok(Poll::Batch(batch));
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
            if self.ended {
                return Ok(Poll::Finished);
            }
            match self.plans[self.awaited].recv_deadline(deadline) {
                Ok(planned) => self.accept(planned),
                Err(RecvTimeoutError::Timeout) => return Ok(Poll::Pending),
                Err(RecvTimeoutError::Disconnected) => return Err(stopped()),
            }
        }
    }

    /// Requests batches up to the prefetch limit, without waiting for a planner.
    fn request_ahead(&mut self) {
        while self.pending.len() < self.shared.options.prefetch as usize
            && !self.ended
            && self.failure.is_none()
        {
            match self.cutter.next() {
                NextBatch::Ready(rows) => self.request(rows),
                NextBatch::Finished => self.ended = true,
                NextBatch::NeedsWindow(corpus) => {
                    self.awaited = corpus;
                    match self.plans[corpus].try_recv() {
                        Ok(planned) => self.accept(planned),
                        Err(TryRecvError::Empty) => return,
                        Err(TryRecvError::Disconnected) => self.failure = Some(stopped()),
                    }
                }
            }
        }
    }

    fn accept(&mut self, planned: Planned) {
        match planned {
            Ok(window) => self.cutter.accept(self.awaited, window),
            Err(error) => self.failure = Some(error),
        }
    }

    fn request(&mut self, rows: Vec<RowRange>) {
        let LoaderOptions { rank, world_size, .. } = self.shared.options;
        let (sender, reply) = bounded(1);
        let request = BatchRequest { rows: rank_slice(rows, rank as u64, world_size as u64), reply: sender };
        // If no worker is left, the reply channel closes, which `poll_next` reports.
        let _ = self.requests.as_ref().map(|requests| requests.send(request));
        self.pending.push_back(PendingBatch { reply, after: self.cutter.positions() });
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.cancel.raise();
        self.plans.clear();
        self.requests = None;
        self.pending.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a panic has printed its message already
        }
    }
}

/// A planning thread: packs a corpus's windows from `position` onward until the receiver is gone.
fn plan(shared: &Shared, corpus: usize, mut position: RowPosition, plans: &Sender<Planned>, cancel: &Cancel) {
    let blocks = &shared.mixture.corpora()[corpus];
    let mut packer = Packer::new(&shared.options, blocks.seed());
    while position.epoch < shared.options.last_epoch() {
        let window = blocks.plan(&mut packer, position.epoch, position.window, cancel);
        let failed = window.is_err();
        if plans.send(window.map(Arc::new)).is_err() || failed {
            return;
        }
        position = position.next_window(blocks.num_windows());
    }
}

/// A worker thread: writes batches until there are no more requests.
fn work(shared: &Shared, requests: &Receiver<BatchRequest>) {
    let corpus = shared.mixture.corpora()[0].corpus(); // all have the same vocabulary
    let masker = Masker::for_corpus(&shared.options, corpus);
    let mut writer =
        BatchWriter::new(corpus, shared.options.sequence_length as usize, masker, shared.pool.clone());
    for request in requests {
        let _ = request.reply.send(writer.write(&request.rows)); // the loader may be gone
    }
}

pub(super) fn stopped() -> Error {
    Error::Input("a loader thread stopped unexpectedly; please report this with the message above".into())
}
