//! The threads of a loader: one per corpus plans windows, the others write batches.
//!
//! A planner works one window ahead. The caller's thread cuts the stream of rows into global batches and
//! sends the share of this rank to the workers. Batches are returned in the order in which they were
//! requested, so scheduling never changes the result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use super::batch::{BatchWriter, BufferPool, RowRange};
use super::batch_cutter::{BatchCutter, Cut, next_window, rank_share};
use super::mixture::Mixture;
use super::options::Settings;
use super::shuffle_window::ShuffleWindow;
use super::state::{Place, Position};
use crate::error::{Error, Result};
use crate::store::Cancel;

/// What the threads of a loader share.
pub(super) struct Shared {
    pub mixture: Mixture,
    pub settings: Settings,
    pub pool: Arc<BufferPool>,
    /// For each corpus, how many planned windows may wait for the caller. Each corpus of a mixture keeps one window
    /// besides the one that is cut, a corpus alone two.
    pub windows_waiting: Vec<usize>,
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

/// A batch that is being written, and where the corpora stand after it.
struct PendingBatch {
    reply: Receiver<Result<RecordBatch>>,
    after: Vec<Place>,
}

type Planned = Result<Arc<ShuffleWindow>>;

/// The running threads. Dropping it closes their channels and joins them.
pub(super) struct Pipeline {
    /// Where the corpora stand after the last batch that was returned.
    pub places: Vec<Place>,
    shared: Arc<Shared>,
    cutter: BatchCutter,
    /// The windows of each corpus, in order.
    plans: Vec<Receiver<Planned>>,
    /// The corpus whose window the cutter awaits.
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
    pub fn start(shared: &Arc<Shared>, places: &[Place]) -> Result<Self> {
        let (requests, request_receiver) = unbounded();
        let mut pipeline = Self {
            places: places.to_vec(),
            shared: shared.clone(),
            cutter: BatchCutter::new(places, &shared.mixture, &shared.settings),
            plans: Vec::new(),
            awaited: 0,
            requests: Some(requests),
            pending: VecDeque::new(),
            failure: None,
            ended: false,
            cancel: Cancel::default(),
            threads: Vec::new(),
        };
        for (corpus, place) in places.iter().enumerate() {
            let (shared, position, cancel) = (shared.clone(), place.position, pipeline.cancel.clone());
            let (sender, plans) = bounded(shared.windows_waiting[corpus]);
            pipeline.plans.push(plans);
            pipeline.spawn("electra-plan", move || plan(&shared, corpus, position, &sender, &cancel))?;
        }
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
            if let Some(pending) = self.pending.front_mut() {
                let result = match pending.reply.recv_deadline(deadline) {
                    Ok(result) => result,
                    Err(RecvTimeoutError::Timeout) => return Ok(Poll::Pending),
                    Err(RecvTimeoutError::Disconnected) => Err(stopped()),
                };
                let after = std::mem::take(&mut pending.after);
                self.pending.pop_front();
                let batch = result?;
                self.places = after;
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
        while self.pending.len() < self.shared.settings.prefetch && !self.ended && self.failure.is_none() {
            match self.cutter.cut() {
                Cut::Batch(rows) => self.request(rows),
                Cut::Ended => self.ended = true,
                Cut::Awaits(corpus) => {
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
        let Settings { rank, world_size, .. } = self.shared.settings;
        let (sender, reply) = bounded(1);
        let request = BatchRequest { rows: rank_share(rows, rank, world_size), reply: sender };
        // If no worker is left, the reply channel closes, which `poll_next` reports.
        let _ = self.requests.as_ref().map(|requests| requests.send(request));
        self.pending.push_back(PendingBatch { reply, after: self.cutter.places() });
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

/// A planning thread: packs a corpus's windows from `position` on until the receiver is gone.
fn plan(shared: &Shared, corpus: usize, mut position: Position, plans: &Sender<Planned>, cancel: &Cancel) {
    let blocks = &shared.mixture.streams()[corpus];
    let mut packer = shared.settings.packer(blocks.seed());
    while position.epoch < shared.settings.last_epoch() {
        let window = blocks.plan(&mut packer, position.epoch, position.window, cancel);
        let failed = window.is_err();
        if plans.send(window.map(Arc::new)).is_err() || failed {
            return;
        }
        position = next_window(position, blocks.num_windows());
    }
}

/// A worker thread: writes batches until there are no more requests.
fn work(shared: &Shared, requests: &Receiver<BatchRequest>) {
    let corpus = shared.mixture.streams()[0].corpus(); // all have the same vocabulary
    let masker = shared.settings.masker(corpus);
    let mut writer = BatchWriter::new(corpus, shared.settings.sequence_length, masker, shared.pool.clone());
    for request in requests {
        let _ = request.reply.send(writer.write(&request.rows)); // the loader may be gone
    }
}

pub(super) fn stopped() -> Error {
    Error::Input("a loader thread stopped unexpectedly; please report this with the message above".into())
}
