//! The threads of a loader: one per corpus plans windows, the others write batches.
//!
//! A planner works one window ahead in each lane of this rank. The caller's thread cuts the streams of rows into
//! batches and sends the part of this rank to the workers. Batches are returned in the order in which they were
//! requested, so scheduling never changes the result.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use super::batch::{BatchWriter, BufferPool, RowRange};
use super::batch_cutter::{BatchCutter, NextBatch, part_of};
use super::mask::Masker;
use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::pack::Packer;
use super::shuffle_window::{Blocks, CorpusPosition, RowPosition, ShuffleWindow};
use crate::error::{Error, Result};
use crate::format::Pins;
use crate::store::Cancel;

pub(super) struct Shared {
    pub mixture: Mixture,
    pub options: LoaderOptions,
    pub pool: Arc<BufferPool>,
    /// Number of each corpus's planned windows that may wait, excluding each lane's current window and the one being planned.
    pub windows_waiting: Vec<usize>,
}

#[derive(Debug)]
pub enum Poll {
    Batch(RecordBatch),
    Pending,
    Finished,
}

struct BatchRequest {
    rows: Vec<RowRange>,
    reply: Sender<Result<RecordBatch>>,
}

struct PendingBatch {
    reply: Receiver<Result<RecordBatch>>,
    after: Vec<Vec<CorpusPosition>>,
}

type Planned = Result<(usize, Arc<ShuffleWindow>)>;

/// The running threads. Dropping this cancels their requests to stores, closes their channels and joins them.
pub(super) struct Pipeline {
    /// The positions of the corpora in each lane after the last returned batch.
    pub positions: Vec<Vec<CorpusPosition>>,
    shared: Arc<Shared>,
    cutter: BatchCutter,
    plans: Vec<Receiver<Planned>>,
    awaited: usize,
    requests: Option<Sender<BatchRequest>>,
    pending: VecDeque<PendingBatch>,
    /// Returned after earlier batches.
    failure: Option<Error>,
    ended: bool,
    cancel: Cancel,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    pub fn start(shared: &Arc<Shared>, positions: &[Vec<CorpusPosition>]) -> Result<Self> {
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
        for corpus in 0..shared.mixture.corpora.len() {
            let starts: Vec<_> = positions.iter().map(|lane| lane[corpus].at).collect();
            let shared = shared.clone();
            let (sender, plans) = bounded(shared.windows_waiting[corpus]);
            pipeline.plans.push(plans);
            pipeline.spawn("electra-plan", move || {
                let _ = Planner::new(&shared, corpus, &starts).run(&sender);
            })?;
        }
        for _ in 0..shared.options.num_threads {
            let (shared, requests) = (shared.clone(), request_receiver.clone());
            pipeline.spawn("electra-load", move || work(&shared, &requests))?;
        }
        Ok(pipeline)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let cancel = self.cancel.clone();
        // Includes requests that no planner announced, for example for documents that reach beyond a block.
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || cancel.cover(body));
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
            Ok((lane, window)) => self.cutter.accept(lane, self.awaited, window),
            Err(error) => self.failure = Some(error),
        }
    }

    fn request(&mut self, rows: Vec<RowRange>) {
        let options = &self.shared.options;
        let part = if options.lanes == 1 {
            options.rank_rows(rows.iter().map(RowRange::len).sum())
        } else {
            let before = u64::from(options.lanes_of_rank().start) * options.lane_rows();
            let rows = options.rank_rows(options.batch_size as u64);
            rows.start - before..rows.end - before
        };
        let (sender, reply) = bounded(1);
        let request = BatchRequest { rows: part_of(rows, part), reply: sender };
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
            let _ = thread.join(); // a panic has already printed its message
        }
    }
}

/// Packs the windows of a corpus: always the next window of the lane with the fewest rows so far, since all lanes supply
/// rows at the same rate. Windows in an object store are fetched ahead, for all lanes at the same time.
struct Planner<'a> {
    blocks: &'a Blocks,
    packer: Packer,
    lanes: Vec<LanePlan>,
    last_epoch: u32,
}

struct LanePlan {
    lane: u32,
    next: RowPosition,
    /// Rows planned so far, minus the rows that the caller took before the start.
    rows: i64,
    /// Pins of the next windows in the cache.
    fetched: VecDeque<Option<Arc<Vec<Pins>>>>,
}

impl<'a> Planner<'a> {
    fn new(shared: &'a Shared, corpus: usize, starts: &[RowPosition]) -> Self {
        let blocks = &shared.mixture.corpora[corpus];
        let lanes = shared.options.lanes_of_rank().zip(starts);
        let lanes = lanes.map(|(lane, &next)| LanePlan {
            lane,
            next,
            rows: -(next.row as i64),
            fetched: VecDeque::new(),
        });
        Self {
            blocks,
            packer: Packer::new(&shared.options, blocks.seed),
            lanes: lanes.collect(),
            last_epoch: shared.options.last_epoch(),
        }
    }

    /// Sends windows until the receiver is gone or all epochs are finished.
    fn run(mut self, plans: &Sender<Planned>) -> Option<()> {
        loop {
            let number = (0..self.lanes.len()).min_by_key(|&number| self.lanes[number].rows)?;
            if self.lanes[number].next.epoch >= self.last_epoch {
                return None;
            }
            let planned = self.plan(number);
            let failed = planned.is_err();
            plans.send(planned.map(|window| (number, window))).ok().filter(|()| !failed)?;
        }
    }

    fn plan(&mut self, number: usize) -> Result<Arc<ShuffleWindow>> {
        if self.lanes[number].fetched.is_empty() {
            self.fetch()?;
        }
        let lane = &mut self.lanes[number];
        let pins = lane.fetched.pop_front().flatten();
        let window = self.blocks.plan(&mut self.packer, lane.lane, lane.next, pins)?;
        lane.rows += window.len() as i64;
        lane.next = lane.next.next_window(self.blocks.num_windows(lane.lane));
        Ok(Arc::new(window))
    }

    /// Fetches windows until each lane has the same number of them, or all that are left in its epoch.
    fn fetch(&mut self) -> Result<()> {
        let ahead = self.blocks.windows_per_fetch(self.lanes.len() as u32) as usize;
        let mut windows = Vec::new();
        let mut ends = Vec::new();
        for lane in &self.lanes {
            let num_windows = self.blocks.num_windows(lane.lane);
            let coming = (lane.next.window..num_windows).take(ahead).skip(lane.fetched.len());
            windows.extend(coming.map(|window| (lane.lane, RowPosition { window, row: 0, ..lane.next })));
            ends.push(windows.len());
        }
        let pins = self.blocks.fetch(&self.packer, &windows, &Cancel::default())?.map(Arc::new);
        let mut start = 0;
        for (lane, end) in self.lanes.iter_mut().zip(ends) {
            lane.fetched.extend(std::iter::repeat_n(pins.clone(), end - start));
            start = end;
        }
        Ok(())
    }
}

fn work(shared: &Shared, requests: &Receiver<BatchRequest>) {
    let corpus = &shared.mixture.corpora[0].corpus; // all have the same vocabulary
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
