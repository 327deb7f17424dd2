//! The loader: an iterator of batches whose order does not depend on threads, ranks or interruptions.

use std::iter::Sum;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;

use super::contents::Contents;
use super::mixture::Mixture;
use super::options::LoaderOptions;
use super::pack::{Packer, RngCounter};
use super::shuffle_window::Blocks;
use super::state::{LoaderState, Place, Position};
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
    places: Vec<Place>,
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
        let settings = options.check()?;
        let mixture = Mixture::new(corpora, settings.seed)?;
        settings.check_words(mixture.streams()[0].corpus())?;
        let places = vec![Place::default(); mixture.streams().len()];
        let lines = settings.packer(settings.seed).reads_lines();
        let waiting = mixture.streams().iter().map(|blocks| windows_waiting(blocks, lines, places.len()));
        let windows_waiting = waiting.collect::<Result<_>>()?;
        let shared = Arc::new(Shared { mixture, settings, pool: Arc::default(), windows_waiting });
        Ok(Self { shared, places, pipeline: None })
    }

    /// Waits for the next batch for at most `timeout`. After an error, the loader is at the position before
    /// the batch that failed.
    pub fn poll_next(&mut self, timeout: Duration) -> Result<Poll> {
        let pipeline = match &mut self.pipeline {
            Some(pipeline) => pipeline,
            empty => empty.insert(Pipeline::start(&self.shared, &self.places)?),
        };
        match pipeline.poll_next(Instant::now() + timeout) {
            Ok(poll) => {
                self.places.clone_from(&pipeline.places);
                Ok(poll)
            }
            Err(error) => {
                self.pipeline = None;
                Err(error)
            }
        }
    }

    /// Where the loader stands after the last batch that was returned.
    pub fn state(&self) -> LoaderState {
        LoaderState::new(&self.places, &self.shared.settings, &self.shared.mixture)
    }

    /// How often each corpus has been read: finished epochs and a share of the current one.
    pub fn passes(&self) -> Vec<f64> {
        let streams = self.shared.mixture.streams();
        streams.iter().zip(&self.places).map(|(blocks, place)| blocks.passes(place)).collect()
    }

    /// Resumes from the state of a loader with the same corpora, weights, seed and row options; batch size, ranks
    /// and threads may differ. An error leaves the loader as it was.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let Shared { mixture, settings, .. } = &*self.shared;
        let mut places = state.places(settings, mixture)?;
        for (place, blocks) in places.iter_mut().zip(mixture.streams()) {
            place.window_rows = self.rows_of_window(blocks, place.position)?;
            if place.position.row > place.window_rows {
                return Err(beyond("row", place.position.row));
            }
        }
        self.pipeline = None;
        self.places = places;
        Ok(())
    }

    /// The rows of the window at a position; 0 at the end of the last epoch.
    fn rows_of_window(&self, blocks: &Blocks, position: Position) -> Result<u64> {
        let settings = &self.shared.settings;
        if settings.epochs == Some(position.epoch) && position.window == 0 {
            return Ok(0);
        }
        if settings.epochs.is_some_and(|epochs| position.epoch >= epochs) {
            return Err(beyond("epoch", u64::from(position.epoch)));
        }
        if position.window >= blocks.num_windows() {
            return Err(beyond("group", u64::from(position.window))); // its name in the JSON
        }
        blocks.count_window(&mut settings.packer(blocks.seed()), position.epoch, position.window)
    }

    /// Rows per epoch, over all corpora; in the first one, where the number depends on the epoch (`google` packing, and
    /// cuts at words or lines). Reads where documents end, for `google` and cuts at lines all line lengths, for cuts
    /// at words some tokens of every row.
    pub fn num_rows(&self) -> Result<u64> {
        self.sum_over_blocks(|blocks, packer, counter| blocks.count_rows(packer, counter))
    }

    /// What the rows of the first epoch hold, over all corpora. Packs all blocks, which reads no token, except for cuts
    /// at words.
    pub fn contents(&self) -> Result<Contents> {
        self.sum_over_blocks(|blocks, packer, counter| Ok(Contents::of(&blocks.rows(packer, counter)?)))
    }

    /// A sum over the blocks of the first epoch of each corpus, computed in parallel.
    fn sum_over_blocks<T: Sum + Send>(
        &self,
        of: impl Fn(&Blocks, &mut Packer, RngCounter) -> Result<T> + Sync,
    ) -> Result<T> {
        let Shared { mixture, settings, .. } = &*self.shared;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16) as u32);
        let sum_of = |blocks: &Blocks, first: u32| -> Result<T> {
            let mut packer = settings.packer(blocks.seed());
            let ours = (first..blocks.len()).step_by(threads as usize);
            let of_block = |block| {
                let _pins = blocks.pin_tables(block, packer.reads_lines())?;
                of(blocks, &mut packer, RngCounter { epoch: 0, block })
            };
            ours.map(of_block).sum()
        };
        let cancel = Cancel::default();
        let sum =
            |first: u32| cancel.carry(|| mixture.streams().iter().map(|blocks| sum_of(blocks, first)).sum());
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

/// How many planned windows of a corpus may wait between the planner and the caller.
///
/// On disk one, in a mixture none. The cache of a corpus in an object store must hold two windows for the caller, which
/// may be between them, and the one that is being fetched; if it holds more, more are fetched ahead.
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
