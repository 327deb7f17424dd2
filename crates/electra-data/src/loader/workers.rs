//! The threads of a loader: one plans windows, the others write batches.
//!
//! The planner works one window ahead. The caller's thread cuts the stream of rows into global batches and
//! sends the share of this rank to the workers. Batches are returned in the order in which they were
//! requested, so scheduling never changes the result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use super::batch::{BatchWriter, BufferPool, RowRange};
use super::batch_cutter::{BatchCutter, next_window, rank_share};
use super::options::{Position, Settings};
use super::shuffle_window::{Blocks, ShuffleWindow};
use crate::error::{Error, Result};

/// What the threads of a loader share.
pub(super) struct Shared {
    pub blocks: Blocks,
    pub settings: Settings,
    pub pool: Arc<BufferPool>,
}

/// What a loader has after waiting.
#[derive(Debug)]
pub enum Poll {
    /// This rank's part of the next batch; without rows if the batch has fewer rows than there are ranks.
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

/// A batch that is being written, and the position after it.
struct PendingBatch {
    reply: Receiver<Result<RecordBatch>>,
    after: Position,
}

/// A window, or `None` after the last one.
type Planned = Result<Option<Arc<ShuffleWindow>>>;

/// The running threads. Dropping it closes their channels and joins them.
pub(super) struct Pipeline {
    /// The position after the last batch that was returned.
    pub position: Position,
    shared: Arc<Shared>,
    cutter: BatchCutter,
    plans: Option<Receiver<Planned>>,
    requests: Option<Sender<BatchRequest>>,
    pending: VecDeque<PendingBatch>,
    /// Returned after the batches before it.
    failure: Option<Error>,
    ended: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    pub fn start(shared: &Arc<Shared>, position: Position) -> Result<Self> {
        let (plan_sender, plans) = bounded(1);
        let (requests, request_receiver) = unbounded();
        let mut pipeline = Self {
            position,
            shared: shared.clone(),
            cutter: BatchCutter::new(position, shared.blocks.num_windows(), shared.settings.batch_size),
            plans: Some(plans),
            requests: Some(requests),
            pending: VecDeque::new(),
            failure: None,
            ended: false,
            threads: Vec::new(),
        };
        let ours = shared.clone();
        pipeline.spawn("electra-plan", move || plan(&ours, position, &plan_sender))?;
        for _ in 0..shared.settings.num_threads {
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
            if let Some(pending) = self.pending.front() {
                let result = match pending.reply.recv_deadline(deadline) {
                    Ok(result) => result,
                    Err(RecvTimeoutError::Timeout) => return Ok(Poll::Pending),
                    Err(RecvTimeoutError::Disconnected) => Err(stopped()),
                };
                let after = pending.after;
                self.pending.pop_front();
                let batch = result?;
                self.position = after;
                return Ok(Poll::Batch(batch));
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
            if self.ended {
                return Ok(Poll::Finished);
            }
            match self.plans.as_ref().map(|plans| plans.recv_deadline(deadline)) {
                Some(Ok(planned)) => self.accept(planned),
                Some(Err(RecvTimeoutError::Timeout)) => return Ok(Poll::Pending),
                _ => return Err(stopped()),
            }
        }
    }

    /// Requests batches up to the prefetch limit, without waiting for the planner.
    fn request_ahead(&mut self) {
        while self.pending.len() < self.shared.settings.prefetch && !self.ended && self.failure.is_none() {
            if let Some(rows) = self.cutter.next_full_batch() {
                self.request(rows);
                continue;
            }
            match self.plans.as_ref().map(Receiver::try_recv) {
                Some(Ok(planned)) => self.accept(planned),
                Some(Err(TryRecvError::Empty)) => return,
                _ => self.failure = Some(stopped()),
            }
        }
    }

    fn accept(&mut self, planned: Planned) {
        match planned {
            Ok(Some(window)) => self.cutter.window = Some(window),
            Ok(None) => {
                self.ended = true;
                let rest = self.cutter.take_rest();
                if !rest.is_empty() {
                    self.request(rest);
                }
            }
            Err(error) => self.failure = Some(error),
        }
    }

    fn request(&mut self, rows: Vec<RowRange>) {
        let Settings { rank, world_size, .. } = self.shared.settings;
        let (sender, reply) = bounded(1);
        let request = BatchRequest { rows: rank_share(rows, rank, world_size), reply: sender };
        // If no worker is left, the reply channel closes, which `poll_next` reports.
        let _ = self.requests.as_ref().map(|requests| requests.send(request));
        self.pending.push_back(PendingBatch { reply, after: self.cutter.position });
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        (self.plans, self.requests) = (None, None);
        self.pending.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a panic has printed its message already
        }
    }
}

/// The planning thread: packs windows from `position` on until the receiver is gone.
fn plan(shared: &Shared, mut position: Position, plans: &Sender<Planned>) {
    let mut packer = shared.settings.packer();
    while position.epoch < shared.settings.epochs.unwrap_or(u32::MAX) {
        let window = shared.blocks.plan(&mut packer, position.epoch, position.window);
        let failed = window.is_err();
        if plans.send(window.map(|window| Some(Arc::new(window)))).is_err() || failed {
            return;
        }
        position = next_window(position, shared.blocks.num_windows());
    }
    let _ = plans.send(Ok(None));
}

/// A worker thread: writes batches until there are no more requests.
fn work(shared: &Shared, requests: &Receiver<BatchRequest>) {
    let Settings { sequence_length, seed, .. } = shared.settings;
    let corpus = shared.blocks.corpus();
    let masker = shared.settings.masker(corpus);
    let mut writer = BatchWriter::new(corpus, sequence_length, seed, masker, shared.pool.clone());
    for request in requests {
        let _ = request.reply.send(writer.write(&request.rows)); // the loader may be gone
    }
}

pub(super) fn stopped() -> Error {
    Error::Input("a loader thread stopped unexpectedly; please report this with the message above".into())
}
