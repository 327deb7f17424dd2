//! Cutting the stream of rows into global batches, and a batch into the shares of the ranks.

use std::sync::Arc;

use super::batch::RowRange;
use super::mixture::{Mixture, Turns};
use super::options::Settings;
use super::shuffle_window::{Blocks, ShuffleWindow};
use super::state::{Place, Position};

/// Cuts the stream of rows, which a mixture's corpora give in turn, into global batches.
pub(super) struct BatchCutter {
    corpora: Vec<Source>,
    turns: Turns,
    epochs: u32,
    batch_size: u64,
    batch: Vec<RowRange>,
    /// Rows in the batch.
    rows: u64,
}

/// A corpus that is being cut.
struct Source {
    num_windows: u32,
    place: Place,
    /// The window at `place`, if it is planned.
    window: Option<Arc<ShuffleWindow>>,
}

/// What comes of cutting.
pub(super) enum Cut {
    /// The rows of the next batch; fewer than the batch size at the end.
    Batch(Vec<RowRange>),
    /// The next window of this corpus is needed.
    Awaits(usize),
    /// All epochs are finished.
    Ended,
}

impl BatchCutter {
    /// A cutter of a mixture whose corpora stand at `places`.
    pub fn new(places: &[Place], mixture: &Mixture, settings: &Settings) -> Self {
        let source = |(&place, blocks): (&Place, &Blocks)| Source {
            num_windows: blocks.num_windows(),
            place,
            window: None,
        };
        Self {
            corpora: places.iter().zip(mixture.streams()).map(source).collect(),
            turns: mixture.turns(places, settings.last_epoch()),
            epochs: settings.last_epoch(),
            batch_size: settings.batch_size,
            batch: Vec::new(),
            rows: 0,
        }
    }

    /// The next batch, or what it is that it awaits.
    pub fn cut(&mut self) -> Cut {
        while self.rows < self.batch_size {
            let Some(corpus) = self.turns.next() else {
                return if self.rows > 0 { self.take_batch() } else { Cut::Ended };
            };
            let Some(window) = self.corpora[corpus].window.take() else { return Cut::Awaits(corpus) };
            let wanted = if self.turns.is_decided { self.batch_size - self.rows } else { 1 };
            self.take_rows(corpus, window, wanted);
        }
        self.take_batch()
    }

    /// The window that a corpus awaits.
    pub fn accept(&mut self, corpus: usize, window: Arc<ShuffleWindow>) {
        let source = &mut self.corpora[corpus];
        source.place.window_rows = window.len();
        source.window = Some(window);
    }

    /// Where the corpora stand after the last batch.
    pub fn places(&self) -> Vec<Place> {
        let place =
            |(corpus, source): (usize, &Source)| Place { turns: self.turns.given(corpus), ..source.place };
        self.corpora.iter().enumerate().map(place).collect()
    }

    /// Adds at most `wanted` rows of a window to the batch.
    fn take_rows(&mut self, corpus: usize, window: Arc<ShuffleWindow>, wanted: u64) {
        let source = &mut self.corpora[corpus];
        let start = source.place.position.row;
        let end = window.len().min(start + wanted);
        self.rows += end - start;
        self.turns.give(corpus, end - start);
        if end < window.len() {
            source.place.position.row = end;
            source.window = Some(window.clone());
        } else {
            source.place.position = next_window(source.place.position, source.num_windows);
            source.place.window_rows = 0;
            if source.place.position.epoch >= self.epochs {
                self.turns.finish(corpus);
            }
        }
        match self.batch.last_mut() {
            Some(last) if Arc::ptr_eq(&last.window, &window) && last.rows.end == start => last.rows.end = end,
            _ if start < end => self.batch.push(RowRange { window, rows: start..end }),
            _ => {}
        }
    }

    fn take_batch(&mut self) -> Cut {
        self.rows = 0;
        Cut::Batch(std::mem::take(&mut self.batch))
    }
}

/// The start of the window after the one at `position`.
pub(super) fn next_window(position: Position, num_windows: u32) -> Position {
    let window = position.window + 1;
    if window < num_windows {
        return Position { window, row: 0, ..position };
    }
    Position { epoch: position.epoch.saturating_add(1), window: 0, row: 0 }
}

/// The rows of a global batch that belong to a rank.
pub(super) fn rank_share(rows: Vec<RowRange>, rank: u64, world_size: u64) -> Vec<RowRange> {
    let total: u64 = rows.iter().map(RowRange::len).sum();
    let (first, last) = (rank * total / world_size, (rank + 1) * total / world_size);
    let mut seen = 0;
    let shares = rows.into_iter().filter_map(|RowRange { window, rows }| {
        let base = seen;
        seen += rows.end - rows.start;
        let (from, to) = (first.max(base), last.min(seen));
        (from < to).then(|| RowRange { window, rows: rows.start + from - base..rows.start + to - base })
    });
    shares.collect()
}
