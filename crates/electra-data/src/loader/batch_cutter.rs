//! Cutting the streams of rows into batches: selects the rows and windows of a rank's part of a batch.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::batch::RowRange;
use super::mixture::{Mixture, Turns};
use super::options::LoaderOptions;
use super::shuffle_window::{Blocks, CorpusPosition, ShuffleWindow};

pub(super) struct BatchCutter {
    lanes: Vec<LaneCutter>,
    lane_rows: u64,
    current: usize,
    batch: Vec<RowRange>,
}

struct LaneCutter {
    corpora: Vec<CorpusCursor>,
    turns: Turns,
    epochs: u32,
    rows: u64,
}

struct CorpusCursor {
    num_windows: u32,
    position: CorpusPosition,
    /// The planned windows, starting with the window at `position`.
    windows: VecDeque<Arc<ShuffleWindow>>,
}

pub(super) enum NextBatch {
    /// The rows of all lanes of the rank; with one lane, the last batch may be smaller.
    Ready(Vec<RowRange>),
    NeedsWindow(usize),
    Finished,
}

impl BatchCutter {
    pub fn new(positions: &[Vec<CorpusPosition>], mixture: &Mixture, options: &LoaderOptions) -> Self {
        let epochs = options.last_epoch();
        let lanes = options.lanes_of_rank().zip(positions);
        let lanes = lanes.map(|(lane, positions)| LaneCutter::new(lane, positions, mixture, epochs));
        Self { lanes: lanes.collect(), lane_rows: options.lane_rows(), current: 0, batch: Vec::new() }
    }

    pub fn next(&mut self) -> NextBatch {
        while let Some(lane) = self.lanes.get_mut(self.current) {
            if let Some(corpus) = lane.give(self.lane_rows, &mut self.batch) {
                return NextBatch::NeedsWindow(corpus);
            }
            self.current += 1;
        }
        self.current = 0;
        self.lanes.iter_mut().for_each(|lane| lane.rows = 0);
        match self.batch.is_empty() {
            true => NextBatch::Finished,
            false => NextBatch::Ready(std::mem::take(&mut self.batch)),
        }
    }

    /// Receives the next window of a corpus in a lane, counted from the rank's first lane.
    pub fn accept(&mut self, lane: usize, corpus: usize, window: Arc<ShuffleWindow>) {
        let source = &mut self.lanes[lane].corpora[corpus];
        source.windows.push_back(window);
        source.position.window_rows = source.windows[0].len();
    }

    pub fn positions(&self) -> Vec<Vec<CorpusPosition>> {
        self.lanes.iter().map(LaneCutter::positions).collect()
    }
}

impl LaneCutter {
    fn new(lane: u32, positions: &[CorpusPosition], mixture: &Mixture, epochs: u32) -> Self {
        let source = |(&position, blocks): (&CorpusPosition, &Blocks)| CorpusCursor {
            num_windows: blocks.num_windows(lane),
            position,
            windows: VecDeque::new(),
        };
        Self {
            corpora: positions.iter().zip(&mixture.corpora).map(source).collect(),
            turns: mixture.turns(positions, epochs),
            epochs,
            rows: 0,
        }
    }

    /// Adds rows until the lane has supplied `wanted` rows or is finished; otherwise returns the corpus whose window is missing.
    fn give(&mut self, wanted: u64, batch: &mut Vec<RowRange>) -> Option<usize> {
        while self.rows < wanted {
            let corpus = self.turns.next()?;
            let Some(window) = self.corpora[corpus].windows.front().cloned() else { return Some(corpus) };
            self.take_rows(corpus, window, if self.turns.is_decided { wanted - self.rows } else { 1 }, batch);
        }
        None
    }

    fn positions(&self) -> Vec<CorpusPosition> {
        let position = |(corpus, source): (usize, &CorpusCursor)| CorpusPosition {
            turns: self.turns.rows[corpus],
            ..source.position
        };
        self.corpora.iter().enumerate().map(position).collect()
    }

    /// Adds at most `wanted` rows of a window to the batch.
    fn take_rows(
        &mut self,
        corpus: usize,
        window: Arc<ShuffleWindow>,
        wanted: u64,
        batch: &mut Vec<RowRange>,
    ) {
        let source = &mut self.corpora[corpus];
        let start = source.position.at.row;
        let end = window.len().min(start + wanted);
        self.rows += end - start;
        self.turns.give(corpus, end - start);
        if end < window.len() {
            source.position.at.row = end;
        } else {
            source.windows.pop_front();
            source.position.at = source.position.at.next_window(source.num_windows);
            source.position.window_rows = source.windows.front().map_or(0, |next| next.len());
            if source.position.at.epoch >= self.epochs {
                self.turns.finish(corpus);
            }
        }
        match batch.last_mut() {
            Some(last) if Arc::ptr_eq(&last.window, &window) && last.rows.end == start => last.rows.end = end,
            _ if start < end => batch.push(RowRange { window, rows: start..end }),
            _ => {}
        }
    }
}

pub(super) fn part_of(rows: Vec<RowRange>, part: Range<u64>) -> Vec<RowRange> {
    let mut seen = 0;
    let slices = rows.into_iter().filter_map(|RowRange { window, rows }| {
        let base = seen;
        seen += rows.end - rows.start;
        let (from, to) = (part.start.max(base), part.end.min(seen));
        (from < to).then(|| RowRange { window, rows: rows.start + from - base..rows.start + to - base })
    });
    slices.collect()
}
