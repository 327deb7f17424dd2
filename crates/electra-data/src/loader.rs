//! The loader: batches in order, from threads that work ahead.
//!
//! One thread plans groups, one ahead; the caller's own thread cuts the stream of rows into global
//! batches and hands each rank's share to worker threads; results are taken in the order in which
//! they were asked for. Nothing that threads do changes what comes out.

use std::collections::VecDeque;
use std::iter::Sum;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use crate::Corpus;
use crate::batch::{BatchWriter, Pool, Span};
use crate::error::{Error, Result};
use crate::group::{Blocks, Group};
use crate::mask::Masker;
use crate::options::{Options, Position, Settings, State};
use crate::pack::{Packer, Place};

mod contents;
mod cutter;

pub use contents::Contents;
use cutter::{Cutter, following, share};

/// What a loader has after waiting.
#[derive(Debug)]
pub enum Step {
    /// This rank's part of the next batch (no rows where the batch is smaller than the world).
    Batch(RecordBatch),
    /// Nothing yet: ask again.
    Waiting,
    /// All epochs are done.
    Finished,
}

/// Masked, packed batches of a corpus in an order that only corpus, options and seed decide.
pub struct Loader {
    source: Arc<Source>,
    position: Position,
    pipeline: Option<Pipeline>,
}

/// What the threads of a loader share.
struct Source {
    blocks: Blocks,
    settings: Settings,
    pool: Arc<Pool>,
}

impl Loader {
    /// A loader at the beginning of its stream. Reads no token and starts no thread yet.
    pub fn new(corpus: Arc<Corpus>, options: &Options) -> Result<Self> {
        let settings = options.check()?;
        if corpus.num_tokens() == 0 {
            return Err(Error::Input("the corpus has no tokens; prepare it from other input".into()));
        }
        let blocks = Blocks::new(corpus)?;
        let source = Arc::new(Source { blocks, settings, pool: Arc::default() });
        Ok(Self { source, position: Position::default(), pipeline: None })
    }

    /// The next batch, or `Waiting` if it is not there when `patience` runs out. After an error the
    /// loader stands where it stood before the batch that failed.
    pub fn next_within(&mut self, patience: Duration) -> Result<Step> {
        let (source, position) = (&self.source, self.position);
        let pipeline = match &mut self.pipeline {
            Some(pipeline) => pipeline,
            empty => empty.insert(Pipeline::start(source, position)?),
        };
        match pipeline.next(Instant::now() + patience) {
            Ok(Outcome::Batch(batch, after)) => {
                self.position = after;
                Ok(Step::Batch(batch))
            }
            Ok(Outcome::Waiting) => Ok(Step::Waiting),
            Ok(Outcome::Finished) => Ok(Step::Finished),
            Err(error) => {
                self.pipeline = None;
                Err(error)
            }
        }
    }

    /// The position after the last batch given out.
    pub fn state(&self) -> State {
        State::new(self.position, &self.source.settings, self.corpus().content_hash())
    }

    /// Continues from a state of a loader of the same corpus, seed and row options; batch size,
    /// ranks and threads may differ. An error leaves the loader as it was.
    pub fn restore(&mut self, state: &State) -> Result<()> {
        let Source { blocks, settings, .. } = &*self.source;
        let position = state.position(settings, self.corpus().content_hash())?;
        let rows = if settings.epochs == Some(position.epoch) && position.group == 0 {
            0 // the end of the last epoch
        } else {
            if settings.epochs.is_some_and(|epochs| position.epoch >= epochs) {
                return Err(beyond("epoch", u64::from(position.epoch)));
            }
            if position.group >= blocks.num_groups() {
                return Err(beyond("group", u64::from(position.group)));
            }
            let mut packer = Packer::new(settings.packing, settings.sequence_length);
            blocks.count_group(&mut packer, settings.seed, position.epoch, position.group)?
        };
        if position.row > rows {
            return Err(beyond("row", position.row));
        }
        self.pipeline = None;
        self.position = position;
        Ok(())
    }

    /// Rows in an epoch: in the first one, where packing draws them (`google`), else in every one.
    /// Reads where the corpus' documents end, for `google` all line lengths.
    pub fn num_rows(&self) -> Result<u64> {
        self.over_blocks(|packer, place| self.source.blocks.count_rows(packer, place))
    }

    /// What the first epoch's rows hold. Plans them all, which touches no token.
    pub fn contents(&self) -> Result<Contents> {
        self.over_blocks(|packer, place| Ok(Contents::of(&self.source.blocks.rows(packer, place)?)))
    }

    /// The sum over the first epoch's blocks, computed on all cores.
    fn over_blocks<T: Sum + Send>(&self, of: impl Fn(&mut Packer, Place) -> Result<T> + Sync) -> Result<T> {
        let Source { blocks, settings, .. } = &*self.source;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16) as u32);
        let sum = |first: u32| {
            let mut packer = Packer::new(settings.packing, settings.sequence_length);
            let ours = (first..blocks.len()).step_by(threads as usize);
            ours.map(|block| of(&mut packer, Place { seed: settings.seed, epoch: 0, block })).sum()
        };
        std::thread::scope(|scope| {
            let sum = &sum;
            let threads: Vec<_> = (0..threads).map(|first| scope.spawn(move || sum(first))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(stopped()))).sum()
        })
    }

    /// The corpus that is read.
    pub fn corpus(&self) -> &Arc<Corpus> {
        self.source.blocks.corpus()
    }
}

impl Iterator for Loader {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(Duration::from_secs(1)) {
                Ok(Step::Batch(batch)) => return Some(Ok(batch)),
                Ok(Step::Waiting) => {}
                Ok(Step::Finished) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn beyond(what: &str, value: u64) -> Error {
    Error::Input(format!("state: {what} {value} is beyond the end of the corpus or of its epochs"))
}

fn stopped() -> Error {
    Error::Input("a loader thread stopped unexpectedly; please report this with the message above".into())
}

enum Outcome {
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
struct Pipeline {
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
    fn start(source: &Arc<Source>, position: Position) -> Result<Self> {
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

    fn next(&mut self, deadline: Instant) -> Result<Outcome> {
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

#[cfg(test)]
mod tests;
