//! Cutting the stream of rows into global batches, and a batch into the shares of the ranks.

use std::sync::Arc;

use super::batch::RowRange;
use super::options::Position;
use super::shuffle_window::ShuffleWindow;

/// Cuts the stream of rows into global batches.
pub(super) struct BatchCutter {
    /// The position after the last batch.
    pub position: Position,
    num_windows: u32,
    batch_size: u64,
    /// The window being cut.
    pub window: Option<Arc<ShuffleWindow>>,
    batch: Vec<RowRange>,
    rows: u64,
}

impl BatchCutter {
    pub fn new(position: Position, num_windows: u32, batch_size: u64) -> Self {
        Self { position, num_windows, batch_size, window: None, batch: Vec::new(), rows: 0 }
    }

    /// The next full batch, if the current window completes one; otherwise the next window is needed.
    pub fn next_full_batch(&mut self) -> Option<Vec<RowRange>> {
        let window = self.window.take()?;
        let start = self.position.row;
        let end = window.len().min(start + self.batch_size - self.rows);
        if end == window.len() {
            self.position = next_window(self.position, self.num_windows);
        } else {
            self.position.row = end;
            self.window = Some(window.clone());
        }
        if start < end {
            self.rows += end - start;
            self.batch.push(RowRange { window, rows: start..end });
        }
        (self.rows == self.batch_size).then(|| self.take_rest())
    }

    /// The rows of the unfinished batch.
    pub fn take_rest(&mut self) -> Vec<RowRange> {
        self.rows = 0;
        std::mem::take(&mut self.batch)
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
