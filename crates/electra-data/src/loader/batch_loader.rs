//! The loader: an iterator of batches whose order does not depend on threads, ranks or interruptions.

use std::iter::Sum;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;

use super::contents::Contents;
use super::options::{LoaderOptions, LoaderState, Position};
use super::pack::{Packer, RngCounter};
use super::shuffle_window::Blocks;
use super::workers::{Pipeline, Poll, Shared, stopped};
use crate::error::{Error, Result};
use crate::format::Corpus;

/// Masked, packed batches of a corpus. Corpus, options and seed alone decide their content and order.
pub struct Loader {
    shared: Arc<Shared>,
    position: Position,
    pipeline: Option<Pipeline>,
}

impl Loader {
    /// A loader at the start of its stream. Reads no token and starts no thread yet. A wrong option or an
    /// empty corpus is [`Error::Input`].
    pub fn new(corpus: Arc<Corpus>, options: &LoaderOptions) -> Result<Self> {
        let settings = options.check()?;
        if corpus.num_tokens() == 0 {
            return Err(Error::Input("the corpus has no tokens; prepare it from other input".into()));
        }
        settings.check_words(&corpus)?;
        let blocks = Blocks::new(corpus, settings.seed)?;
        let shared = Arc::new(Shared { blocks, settings, pool: Arc::default() });
        Ok(Self { shared, position: Position::default(), pipeline: None })
    }

    /// Waits for the next batch for at most `timeout`. After an error, the loader is at the position before
    /// the batch that failed.
    pub fn poll_next(&mut self, timeout: Duration) -> Result<Poll> {
        let (shared, position) = (&self.shared, self.position);
        let pipeline = match &mut self.pipeline {
            Some(pipeline) => pipeline,
            empty => empty.insert(Pipeline::start(shared, position)?),
        };
        match pipeline.poll_next(Instant::now() + timeout) {
            Ok(poll) => {
                self.position = pipeline.position;
                Ok(poll)
            }
            Err(error) => {
                self.pipeline = None;
                Err(error)
            }
        }
    }

    /// The position after the last batch that was returned.
    pub fn state(&self) -> LoaderState {
        LoaderState::new(self.position, &self.shared.settings, self.corpus().content_hash())
    }

    /// Resumes from the state of a loader with the same corpus, seed and row options; batch size, ranks and
    /// threads may differ. An error leaves the loader as it was.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let Shared { blocks, settings, .. } = &*self.shared;
        let position = state.position(settings, self.corpus().content_hash())?;
        let rows = if settings.epochs == Some(position.epoch) && position.window == 0 {
            0 // the end of the last epoch
        } else {
            if settings.epochs.is_some_and(|epochs| position.epoch >= epochs) {
                return Err(beyond("epoch", u64::from(position.epoch)));
            }
            if position.window >= blocks.num_windows() {
                return Err(beyond("group", u64::from(position.window))); // its name in the JSON
            }
            blocks.count_window(&mut settings.packer(), position.epoch, position.window)?
        };
        if position.row > rows {
            return Err(beyond("row", position.row));
        }
        self.pipeline = None;
        self.position = position;
        Ok(())
    }

    /// Rows per epoch; in the first one, where the number depends on the epoch (`google` packing, and cuts at
    /// words or lines). Reads where documents end, for `google` and cuts at lines all line lengths, for cuts
    /// at words some tokens of every row.
    pub fn num_rows(&self) -> Result<u64> {
        self.sum_over_blocks(|packer, counter| self.shared.blocks.count_rows(packer, counter))
    }

    /// What the rows of the first epoch hold. Packs all blocks, which reads no token, except for cuts at words.
    pub fn contents(&self) -> Result<Contents> {
        self.sum_over_blocks(|packer, counter| Ok(Contents::of(&self.shared.blocks.rows(packer, counter)?)))
    }

    /// A sum over the blocks of the first epoch, computed in parallel.
    fn sum_over_blocks<T: Sum + Send>(
        &self,
        of: impl Fn(&mut Packer, RngCounter) -> Result<T> + Sync,
    ) -> Result<T> {
        let Shared { blocks, settings, .. } = &*self.shared;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16) as u32);
        let sum = |first: u32| {
            let mut packer = settings.packer();
            let ours = (first..blocks.len()).step_by(threads as usize);
            ours.map(|block| of(&mut packer, RngCounter { epoch: 0, block })).sum()
        };
        std::thread::scope(|scope| {
            let sum = &sum;
            let threads: Vec<_> = (0..threads).map(|first| scope.spawn(move || sum(first))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(stopped()))).sum()
        })
    }

    /// The corpus that is read.
    pub fn corpus(&self) -> &Arc<Corpus> {
        self.shared.blocks.corpus()
    }
}

impl Iterator for Loader {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.poll_next(Duration::from_secs(1)) {
                Ok(Poll::Batch(batch)) => return Some(Ok(batch)),
                Ok(Poll::Pending) => {}
                Ok(Poll::Finished) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

fn beyond(what: &str, value: u64) -> Error {
    Error::Input(format!("state: {what} {value} is beyond the end of the corpus or of its epochs"))
}
