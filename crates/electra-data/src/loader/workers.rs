//! The threads behind a loader: one plans groups, the others write batches.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use super::batch::{BatchWriter, Pool, Span};
use super::batch_cutter::{Cutter, following, share};
use super::mask::Masker;
use super::options::{Position, Settings};
use super::pack::Packer;
use super::shuffle_window::{Blocks, Group};
use crate::error::{Error, Result};

/// What the threads of a loader share.
pub(super) struct Source {
    pub blocks: Blocks,
    pub settings: Settings,
    pub pool: Arc<Pool>,
}

pub(super) enum Outcome {
    Batch(RecordBatch, Position),
    Waiting,
    Finished,
}

struct Job {
    rows: Vec<Span>,
    reply: Sender<Result<RecordBatch>>,
}

/// A batch that is being written, and the position behind it.
struct Pending {
    reply: Receiver<Result<RecordBatch>>,
    after: Position,
}

/// A group, or `None` after the last one.
type Planned = Result<Option<Arc<Group>>>;

/// The running threads. Dropping it closes their channels and waits for them.
pub(super) struct Pipeline {
    source: Arc<Source>,
    cutter: Cutter,
    plans: Option<Receiver<Planned>>,
    jobs: Option<Sender<Job>>,
    pending: VecDeque<Pending>,
    /// Comes out when the batches before it are given out.
    failure: Option<Error>,
    ended: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    pub fn start(source: &Arc<Source>, position: Position) -> Result<Self> {
        let (plan_sender, plans) = bounded(1);
        let (jobs, job_receiver) = unbounded();
        let mut pipeline = Self {
            source: source.clone(),
            cutter: Cutter::new(position, source.blocks.num_groups(), source.settings.batch_size),
            plans: Some(plans),
            jobs: Some(jobs),
            pending: VecDeque::new(),
            failure: None,
            ended: false,
            threads: Vec::new(),
        };
        let shared = source.clone();
        pipeline.spawn("electra-plan", move || plan(&shared, position, &plan_sender))?;
        for _ in 0..source.settings.num_threads {
            let (shared, jobs) = (source.clone(), job_receiver.clone());
            pipeline.spawn("electra-load", move || work(&shared, &jobs))?;
        }
        Ok(pipeline)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(body);
        self.threads.push(thread.map_err(|error| Error::Input(format!("cannot start a thread: {error}")))?);
        Ok(())
    }

    pub fn next(&mut self, deadline: Instant) -> Result<Outcome> {
        loop {
            self.ask_ahead();
            if let Some(pending) = self.pending.front() {
                let result = match pending.reply.recv_deadline(deadline) {
                    Ok(result) => result,
                    Err(RecvTimeoutError::Timeout) => return Ok(Outcome::Waiting),
                    Err(RecvTimeoutError::Disconnected) => Err(stopped()),
                };
                let after = pending.after;
                self.pending.pop_front();
                return result.map(|batch| Outcome::Batch(batch, after));
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
            if self.ended {
                return Ok(Outcome::Finished);
            }
            match self.plans.as_ref().map(|plans| plans.recv_deadline(deadline)) {
                Some(Ok(planned)) => self.accept(planned),
                Some(Err(RecvTimeoutError::Timeout)) => return Ok(Outcome::Waiting),
                _ => return Err(stopped()),
            }
        }
    }

    /// Asks for batches until enough are on the way, without waiting for plans.
    fn ask_ahead(&mut self) {
        while self.pending.len() < self.source.settings.prefetch && !self.ended && self.failure.is_none() {
            if let Some(rows) = self.cutter.whole_batch() {
                self.ask(rows);
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
            Ok(Some(group)) => self.cutter.group = Some(group),
            Ok(None) => {
                self.ended = true;
                let rest = self.cutter.rest();
                if !rest.is_empty() {
                    self.ask(rest);
                }
            }
            Err(error) => self.failure = Some(error),
        }
    }

    fn ask(&mut self, rows: Vec<Span>) {
        let Settings { rank, world_size, .. } = self.source.settings;
        let (sender, reply) = bounded(1);
        let job = Job { rows: share(rows, rank, world_size), reply: sender };
        // If no worker is left the reply's channel closes, which `next` reports.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
        self.pending.push_back(Pending { reply, after: self.cutter.position });
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        (self.plans, self.jobs) = (None, None);
        self.pending.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a thread that panicked has said so
        }
    }
}

/// The planning thread: groups from `position` on until nobody wants them.
fn plan(source: &Source, mut position: Position, plans: &Sender<Planned>) {
    let Settings { sequence_length, seed, epochs, packing, .. } = source.settings;
    let mut packer = Packer::new(packing, sequence_length);
    while position.epoch < epochs.unwrap_or(u32::MAX) {
        let group = source.blocks.plan(&mut packer, seed, position.epoch, position.group);
        let failed = group.is_err();
        if plans.send(group.map(|group| Some(Arc::new(group)))).is_err() || failed {
            return;
        }
        position = following(position, source.blocks.num_groups());
    }
    let _ = plans.send(Ok(None));
}

/// A working thread: batches until there are no more jobs.
fn work(source: &Source, jobs: &Receiver<Job>) {
    let Settings { sequence_length, seed, masking, mask_prob, .. } = source.settings;
    let corpus = source.blocks.corpus();
    let (specials, vocab_size) = (corpus.special_tokens(), corpus.vocab_size());
    let masker = Masker::new(masking, mask_prob, sequence_length, specials, vocab_size);
    let mut writer = BatchWriter::new(corpus, sequence_length, seed, masker, source.pool.clone());
    for job in jobs {
        let _ = job.reply.send(writer.write(&job.rows)); // the loader may be gone: nothing lost
    }
}

pub(super) fn stopped() -> Error {
    Error::Input("a loader thread stopped unexpectedly; please report this with the message above".into())
}
