//! The loader: an iterator of batches whose order does not depend on threads, ranks or interruptions.

use std::iter::Sum;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;

use super::contents::Contents;
use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::pack::{Packer, RngCounter};
use super::position::{CorpusPosition, RowPosition};
use super::shuffle_window::Blocks;
use super::state::LoaderState;
use super::workers::{Pipeline, Poll, Shared, stopped};
use crate::error::{Error, Result};
use crate::format::Corpus;
use crate::store::Cancel;

/// Shuffle windows that the cache of a corpus in an object store must hold.
const MIN_CACHED_WINDOWS: u64 = 3;
/// The most windows that are fetched ahead; they also take memory for their rows.
const MAX_WAITING: u64 = 7;

/// Masked, packed batches of a corpus or of several. Corpora, options and seed alone decide their content and
/// order.
pub struct Loader {
    shared: Arc<Shared>,
    positions: Vec<CorpusPosition>,
    pipeline: Option<Pipeline>,
}

impl Loader {
    /// A loader at the start of its stream. Reads no token and starts no thread yet. A wrong option or an
    /// empty corpus is [`Error::Input`].
    pub fn new(corpus: Arc<Corpus>, options: &LoaderOptions) -> Result<Self> {
        Self::mixture(vec![(corpus, None)], options)
    }

    /// A loader whose rows come from several corpora in proportion to their weights; without any weight, to their
    /// tokens. A corpus that has been read `epochs` times leaves its share to the others. Corpora with different
    /// vocabularies, the same one twice, and weights that are not above 0 are [`Error::Input`].
    pub fn mixture(corpora: Vec<(Arc<Corpus>, Option<f64>)>, options: &LoaderOptions) -> Result<Self> {
        options.check()?;
        let mixture = Mixture::new(corpora, options.seed as u64)?;
        options.check_words(mixture.corpora()[0].corpus())?;
        let positions = vec![CorpusPosition::default(); mixture.corpora().len()];
        let lines = Packer::new(options, 0).reads_lines();
        let waiting = mixture.corpora().iter().map(|blocks| windows_waiting(blocks, lines, positions.len()));
        let windows_waiting = waiting.collect::<Result<_>>()?;
        let options = options.clone();
        let shared = Arc::new(Shared { mixture, options, pool: Arc::default(), windows_waiting });
        Ok(Self { shared, positions, pipeline: None })
    }

    /// Waits for the next batch for at most `timeout`. After an error, the loader is at the position before
    /// the batch that failed.
    pub fn poll_next(&mut self, timeout: Duration) -> Result<Poll> {
        let pipeline = match &mut self.pipeline {
            Some(pipeline) => pipeline,
            empty => empty.insert(Pipeline::start(&self.shared, &self.positions)?),
        };
        match pipeline.poll_next(Instant::now() + timeout) {
            Ok(poll) => {
                self.positions.clone_from(&pipeline.positions);
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
        LoaderState::new(&self.positions, &self.shared.options, &self.shared.mixture)
    }

    /// How often each corpus has been read: finished epochs and the fraction of the current one.
    pub fn passes(&self) -> Vec<f64> {
        self.shared
            .mixture
            .corpora()
            .iter()
            .zip(&self.positions)
            .map(|(blocks, position)| blocks.passes(position))
            .collect()
    }

    /// Resumes from the state of a loader with the same corpora, weights, seed and row options; batch size, ranks
    /// and threads may differ. An error leaves the loader as it was.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let Shared { mixture, options, .. } = &*self.shared;
        let mut positions = state.positions(options, mixture)?;
        for (position, blocks) in positions.iter_mut().zip(mixture.corpora()) {
            position.window_rows = self.rows_of_window(blocks, position.at)?;
            if position.at.row > position.window_rows {
                return Err(beyond("row", position.at.row));
            }
        }
        self.pipeline = None;
        self.positions = positions;
        Ok(())
    }

    /// The rows of the window at a position; 0 at the end of the last epoch.
    fn rows_of_window(&self, blocks: &Blocks, position: RowPosition) -> Result<u64> {
        let options = &self.shared.options;
        if options.epochs == Some(position.epoch.into()) && position.window == 0 {
            return Ok(0);
        }
        if position.epoch >= options.last_epoch() {
            return Err(beyond("epoch", u64::from(position.epoch)));
        }
        if position.window >= blocks.num_windows() {
            return Err(beyond("group", u64::from(position.window))); // its name in the JSON
        }
        blocks.count_window(&mut Packer::new(options, blocks.seed()), position.epoch, position.window)
    }

    /// Rows per epoch, over all corpora. Where the number depends on the epoch (`google` packing, and cuts at words or
    /// lines), rows of the first one. Reads the ends of all documents; for `google` and cuts at lines also all line
    /// lengths, for cuts at words some tokens of every row.
    pub fn num_rows(&self) -> Result<u64> {
        self.sum_over_blocks(|blocks, packer, counter| blocks.count_rows(packer, counter))
    }

    /// What the rows of the first epoch contain, over all corpora. Packs all blocks, which reads no tokens except for
    /// cuts at words.
    pub fn contents(&self) -> Result<Contents> {
        self.sum_over_blocks(|blocks, packer, counter| Ok(Contents::of(&blocks.rows(packer, counter)?)))
    }

    /// A sum over the blocks of the first epoch of each corpus, computed in parallel.
    fn sum_over_blocks<T: Sum + Send>(
        &self,
        of: impl Fn(&Blocks, &mut Packer, RngCounter) -> Result<T> + Sync,
    ) -> Result<T> {
        let Shared { mixture, options, .. } = &*self.shared;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16) as u32);
        let sum_of = |blocks: &Blocks, first: u32| -> Result<T> {
            let mut packer = Packer::new(options, blocks.seed());
            let ours = (first..blocks.len()).step_by(threads as usize);
            let of_block = |block| {
                let _pins = blocks.pin_tables(block, packer.reads_lines())?;
                of(blocks, &mut packer, RngCounter { epoch: 0, block })
            };
            ours.map(of_block).sum()
        };
        let cancel = Cancel::default();
        let sum =
            |first: u32| cancel.carry(|| mixture.corpora().iter().map(|blocks| sum_of(blocks, first)).sum());
        std::thread::scope(|scope| {
            let sum = &sum;
            let threads: Vec<_> = (0..threads).map(|first| scope.spawn(move || sum(first))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(stopped()))).sum()
        })
    }

    /// The weights of the corpora in lowest terms.
    pub fn weights(&self) -> &[u64] {
        self.shared.mixture.weights()
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

/// How many planned windows of a corpus may wait between the planner and the caller: one for a corpus on disk, none in
/// a mixture.
///
/// The cache of a corpus in an object store must hold two windows for the caller, whose batch may span both, and the
/// one that is being fetched; if it holds more, more are fetched ahead.
fn windows_waiting(blocks: &Blocks, lines: bool, num_corpora: usize) -> Result<usize> {
    let Some(limit) = blocks.corpus().cache_limit() else { return Ok(usize::from(num_corpora == 1)) };
    let window = blocks.window_bytes(lines);
    let fit = limit / window.max(1);
    if fit < MIN_CACHED_WINDOWS {
        let needed = window.saturating_mul(MIN_CACHED_WINDOWS);
        let (corpus, given) = (blocks.corpus().dir().display(), limit.saturating_mul(num_corpora as u64));
        return Err(Error::Input(format!(
            "cache_bytes = {given}: {MIN_CACHED_WINDOWS} shuffle windows of {corpus} need {needed}; give at least {}",
            needed.saturating_mul(num_corpora as u64)
        )));
    }
    Ok((fit - MIN_CACHED_WINDOWS).min(MAX_WAITING) as usize)
}

fn beyond(what: &str, value: u64) -> Error {
    Error::Input(format!("state: {what} {value} is beyond the end of the corpus or of its epochs"))
}
