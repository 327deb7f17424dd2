//! The loader: an iterator of batches whose order does not depend on threads, ranks or interruptions.

use std::iter::Sum;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;

use super::mixture::Mixture;
use super::options::{LoaderOptions, largest_divisor};
use super::pack::{Packer, RngCounter, Rows, Span};
use super::shuffle_window::{Blocks, CorpusPosition, RowPosition};
use super::state::LoaderState;
use super::workers::{Pipeline, Poll, Shared, stopped};
use crate::error::{Error, Result};
use crate::format::Corpus;
use crate::store::Cancel;

/// Shuffle windows that the cache of a corpus in an object store must hold.
const MIN_CACHED_WINDOWS: u64 = 3;
/// Maximum number of windows fetched ahead; they also take memory for their rows.
const MAX_WAITING: u64 = 7;
/// The number of lanes of large corpora in object stores: the number of nodes that can read different blocks.
const AUTO_LANES: u64 = 64;
/// Minimum blocks per lane: with fewer, one block more or less would make one lane's epochs much longer than another's.
const MIN_LANE_BLOCKS: u64 = 16;

/// Masked, packed batches of one or several corpora. Only corpora, options and seed decide their content and order.
pub struct Loader {
    pub(super) shared: Arc<Shared>,
    pub(super) positions: Vec<Vec<CorpusPosition>>,
    pipeline: Option<Pipeline>,
}

impl Loader {
    /// A loader at its start, which has not read any tokens. A wrong option or an empty corpus is [`Error::Input`].
    pub fn new(corpus: Arc<Corpus>, options: &LoaderOptions) -> Result<Self> {
        Self::mixture(vec![(corpus, None)], options)
    }

    /// A loader with rows from several corpora in proportion to their weights or, without weights, to their numbers of
    /// tokens. After `epochs` epochs of a corpus, the others supply its rows. Corpora with different
    /// vocabularies, repeated corpora, and weights of 0 or less are [`Error::Input`].
    pub fn mixture(corpora: Vec<(Arc<Corpus>, Option<f64>)>, options: &LoaderOptions) -> Result<Self> {
        options.check()?;
        let mixture = Mixture::new(corpora, options.seed as u64, options.lanes as u32)?;
        options.check_words(&mixture.corpora[0].corpus)?;
        let (lanes, count) = (options.lanes_of_rank().len(), mixture.corpora.len());
        let lines = Packer::new(options, 0).reads_lines();
        let waiting = |blocks| windows_waiting(blocks, lanes as u32, lines, count);
        let windows_waiting = mixture.corpora.iter().map(waiting).collect::<Result<_>>()?;
        let options = options.clone();
        let shared = Arc::new(Shared { mixture, options, pool: Arc::default(), windows_waiting });
        Ok(Self { shared, positions: vec![vec![CorpusPosition::default(); count]; lanes], pipeline: None })
    }

    /// Waits for the next batch, at most `timeout`. After an error, the loader stays at the failed batch.
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

    /// The position after the last returned batch.
    pub fn state(&self) -> LoaderState {
        LoaderState::new(&self.positions, &self.shared.options, &self.shared.mixture)
    }

    /// Passes over each corpus: epochs and a fraction of the next one, averaged over this rank's lanes.
    pub fn passes(&self) -> Vec<f64> {
        let Shared { mixture, options, .. } = &*self.shared;
        let lanes = self.positions.len() as f64;
        let passes = |(number, blocks): (usize, &Blocks)| {
            let of_lanes = options.lanes_of_rank().zip(&self.positions);
            of_lanes.map(|(lane, positions)| blocks.passes(lane, &positions[number])).sum::<f64>() / lanes
        };
        mixture.corpora.iter().enumerate().map(passes).collect()
    }

    /// Resumes from the state of a loader with the same corpora, weights, seed, lanes and row options; batch size, ranks
    /// and threads may differ. After an error, the loader is unchanged.
    pub fn restore(&mut self, state: &LoaderState) -> Result<()> {
        let Shared { mixture, options, .. } = &*self.shared;
        let mut positions = state.positions(options, mixture)?;
        for (number, blocks) in mixture.corpora.iter().enumerate() {
            let lanes = options.lanes_of_rank().zip(positions.iter_mut().map(|lane| &mut lane[number]));
            self.count_windows(blocks, &mut lanes.collect::<Vec<_>>())?;
        }
        self.pipeline = None;
        self.positions = positions;
        Ok(())
    }

    fn count_windows(&self, blocks: &Blocks, positions: &mut [(u32, &mut CorpusPosition)]) -> Result<()> {
        let options = &self.shared.options;
        let is_end = |at: RowPosition| options.epochs == Some(at.epoch.into()) && at.window == 0;
        for (lane, CorpusPosition { at, .. }) in &*positions {
            if !is_end(*at) && at.epoch >= options.last_epoch() {
                return Err(beyond("epoch", u64::from(at.epoch)));
            }
            if at.window >= blocks.num_windows(*lane) {
                return Err(beyond("group", u64::from(at.window))); // "group" is its name in the JSON
            }
        }
        let windows: Vec<_> = positions
            .iter()
            .map(|(lane, position)| (*lane, position.at))
            .filter(|(_, at)| !is_end(*at))
            .collect();
        let mut packer = Packer::new(options, blocks.seed);
        // All at once, since the planner needs them next.
        let _pins = blocks.fetch(&packer, &windows, &Cancel::default())?;
        for (lane, position) in positions.iter_mut() {
            if !is_end(position.at) {
                position.window_rows = blocks.count_window(&mut packer, *lane, position.at)?;
            }
            if position.at.row > position.window_rows {
                return Err(beyond("row", position.at.row));
            }
        }
        Ok(())
    }

    /// The contents of the rows of an epoch, over all corpora. If they depend on the epoch (`examples` packing, and cuts at
    /// words or lines), of the first epoch. Packs all blocks in parallel, which reads the ends of documents; for `examples`
    /// and cuts at lines also all line lengths, for cuts at words some tokens of every row.
    pub fn contents(&self) -> Result<Contents> {
        let Shared { mixture, options, .. } = &*self.shared;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(16) as u32);
        let sum_of = |blocks: &Blocks, first: u32| -> Result<Contents> {
            let mut packer = Packer::new(options, blocks.seed);
            let numbers = (first..blocks.len()).step_by(threads as usize);
            let of_block = |block| {
                let _pins = blocks.pin_tables(block, packer.reads_lines())?;
                Ok(Contents::of(&blocks.rows(&mut packer, RngCounter { epoch: 0, block })?))
            };
            numbers.map(of_block).sum()
        };
        let cancel = Cancel::default();
        let sum =
            |first: u32| cancel.carry(|| mixture.corpora.iter().map(|blocks| sum_of(blocks, first)).sum());
        std::thread::scope(|scope| {
            let sum = &sum;
            let threads: Vec<_> = (0..threads).map(|first| scope.spawn(move || sum(first))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(stopped()))).sum()
        })
    }

    pub fn num_rows(&self) -> Result<u64> {
        Ok(self.contents()?.rows)
    }

    pub fn weights(&self) -> &[u64] {
        &self.shared.mixture.weights
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    pub rows: u64,
    pub tokens: u64,
    /// Positions that are not padding: these tokens and the special tokens.
    pub positions: u64,
}

impl Contents {
    fn of(rows: &Rows) -> Self {
        let sum = |size: fn(&Span) -> usize| rows.spans.iter().map(|span| size(span) as u64).sum();
        Self {
            rows: rows.len() as u64,
            tokens: sum(|span| usize::from(span.len)),
            positions: sum(Span::num_positions),
        }
    }
}

impl Sum for Contents {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |a, b| Self {
            rows: a.rows + b.rows,
            tokens: a.tokens + b.tokens,
            positions: a.positions + b.positions,
        })
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

/// Number of a corpus's planned windows that may wait between planner and caller, per lane: one for a corpus on disk,
/// none in a mixture.
///
/// The cache of a corpus in an object store must hold two fetches of windows for the caller, whose batch may span
/// both, and the windows that are being fetched; a larger cache allows more windows to be fetched ahead.
fn windows_waiting(blocks: &Blocks, lanes: u32, lines: bool, num_corpora: usize) -> Result<usize> {
    let per_fetch = blocks.windows_per_fetch(lanes) * u64::from(lanes);
    let Some(limit) = blocks.corpus.cache_limit() else {
        return Ok(if num_corpora == 1 { per_fetch as usize } else { 0 });
    };
    let window = blocks.fetch_bytes(lanes, lines);
    let fit = limit / window.max(1);
    if fit < MIN_CACHED_WINDOWS {
        let needed = window.saturating_mul(MIN_CACHED_WINDOWS);
        let (corpus, bytes) = (blocks.corpus.dir().display(), limit.saturating_mul(num_corpora as u64));
        return Err(Error::Input(format!(
            "cache_bytes = {bytes}: must be at least {}; {MIN_CACHED_WINDOWS} shuffle windows of {corpus} need {needed}",
            needed.saturating_mul(num_corpora as u64)
        )));
    }
    Ok(((fit - MIN_CACHED_WINDOWS).min(MAX_WAITING) * per_fetch) as usize)
}

/// The number of lanes for a run: 1 if all corpora are on disk; for corpora in object stores, the maximum number of
/// nodes, provided that each lane has some blocks of every corpus.
pub fn auto_lanes(corpora: &[Arc<Corpus>], batch_size: i64) -> Result<i64> {
    let mut lanes = AUTO_LANES;
    for corpus in corpora {
        let blocks = Blocks::new(corpus.clone(), 0, 1)?.len();
        lanes = lanes.min(u64::from(blocks) / MIN_LANE_BLOCKS).max(1);
    }
    let is_stored = corpora.iter().any(|corpus| corpus.is_stored());
    Ok(if is_stored { largest_divisor(batch_size.max(1) as u64, lanes) as i64 } else { 1 })
}

fn beyond(name: &str, value: u64) -> Error {
    Error::Input(format!("state: {name} = {value}: beyond the end of the corpus or of its epochs"))
}
