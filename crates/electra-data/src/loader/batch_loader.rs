//! The loader: batches in order, from threads that work ahead.
//!
//! One thread plans groups, one ahead; the caller's own thread cuts the stream of rows into global
//! batches and hands each rank's share to worker threads; results are taken in the order in which
//! they were asked for. Nothing that threads do changes what comes out.

use std::iter::Sum;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;

use super::contents::Contents;
use super::options::{Options, Position, State};
use super::pack::{Packer, Place};
use super::shuffle_window::Blocks;
use super::workers::{Outcome, Pipeline, Source, stopped};
use crate::error::{Error, Result};
use crate::format::Corpus;

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
