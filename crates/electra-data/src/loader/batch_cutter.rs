//! Cutting the stream of rows into global batches, and a batch into the slices of the ranks.

use std::sync::Arc;

use super::batch::RowRange;
use super::mixture::{Mixture, Turns};
use super::options::LoaderOptions;
use super::position::CorpusPosition;
use super::shuffle_window::{Blocks, ShuffleWindow};

/// Cuts the stream of rows, which a mixture's corpora give in turn, into global batches.
pub(super) struct BatchCutter {
    corpora: Vec<CorpusCursor>,
    turns: Turns,
    epochs: u32,
    batch_size: u64,
    batch: Vec<RowRange>,
    /// Rows in the batch.
    rows: u64,
}

/// A corpus that is being cut.
struct CorpusCursor {
    num_windows: u32,
    position: CorpusPosition,
    /// The window at `position`, if it is planned.
    window: Option<Arc<ShuffleWindow>>,
}

/// The outcome of asking for the next batch.
pub(super) enum NextBatch {
    /// The rows of the next batch; fewer than the batch size at the end.
    Ready(Vec<RowRange>),
    /// The next window of this corpus is needed first.
    NeedsWindow(usize),
    /// All epochs are finished.
    Finished,
}

impl BatchCutter {
    /// A cutter of a mixture whose corpora are at `positions`.
    pub fn new(positions: &[CorpusPosition], mixture: &Mixture, options: &LoaderOptions) -> Self {
        let source = |(&position, blocks): (&CorpusPosition, &Blocks)| CorpusCursor {
            num_windows: blocks.num_windows(),
            position,
            window: None,
        };
        Self {
            corpora: positions.iter().zip(mixture.corpora()).map(source).collect(),
            turns: mixture.turns(positions, options.last_epoch()),
            epochs: options.last_epoch(),
            batch_size: options.batch_size as u64,
            batch: Vec::new(),
            rows: 0,
        }
    }

    /// The next batch, unless a window is needed first.
    pub fn next(&mut self) -> NextBatch {
        while self.rows < self.batch_size {
            let Some(corpus) = self.turns.next() else {
                return if self.rows > 0 { self.take_batch() } else { NextBatch::Finished };
            };
            let Some(window) = self.corpora[corpus].window.take() else {
                return NextBatch::NeedsWindow(corpus);
            };
            let wanted = if self.turns.is_decided { self.batch_size - self.rows } else { 1 };
            self.take_rows(corpus, window, wanted);
        }
        self.take_batch()
    }

    /// Takes the window that a corpus needed.
    pub fn accept(&mut self, corpus: usize, window: Arc<ShuffleWindow>) {
        let source = &mut self.corpora[corpus];
        source.position.window_rows = window.len();
        source.window = Some(window);
    }

    /// Where the corpora stand after the last batch.
    pub fn positions(&self) -> Vec<CorpusPosition> {
        let position = |(corpus, source): (usize, &CorpusCursor)| CorpusPosition {
            turns: self.turns.given(corpus),
            ..source.position
        };
        self.corpora.iter().enumerate().map(position).collect()
    }

    /// Adds at most `wanted` rows of a window to the batch.
    fn take_rows(&mut self, corpus: usize, window: Arc<ShuffleWindow>, wanted: u64) {
        let source = &mut self.corpora[corpus];
        let start = source.position.at.row;
        let end = window.len().min(start + wanted);
        self.rows += end - start;
        self.turns.give(corpus, end - start);
        if end < window.len() {
            source.position.at.row = end;
            source.window = Some(window.clone());
        } else {
            source.position.at = source.position.at.next_window(source.num_windows);
            source.position.window_rows = 0;
            if source.position.at.epoch >= self.epochs {
                self.turns.finish(corpus);
            }
        }
        match self.batch.last_mut() {
            Some(last) if Arc::ptr_eq(&last.window, &window) && last.rows.end == start => last.rows.end = end,
            _ if start < end => self.batch.push(RowRange { window, rows: start..end }),
            _ => {}
        }
    }

    fn take_batch(&mut self) -> NextBatch {
        self.rows = 0;
        NextBatch::Ready(std::mem::take(&mut self.batch))
    }
}

/// The rows of a global batch that belong to a rank.
pub(super) fn rank_slice(rows: Vec<RowRange>, rank: u64, world_size: u64) -> Vec<RowRange> {
    let total: u64 = rows.iter().map(RowRange::len).sum();
    let (first, last) = (rank * total / world_size, (rank + 1) * total / world_size);
    let mut seen = 0;
    let slices = rows.into_iter().filter_map(|RowRange { window, rows }| {
        let base = seen;
        seen += rows.end - rows.start;
        let (from, to) = (first.max(base), last.min(seen));
        (from < to).then(|| RowRange { window, rows: rows.start + from - base..rows.start + to - base })
    });
    slices.collect()
}
