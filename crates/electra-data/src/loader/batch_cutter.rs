//! The stream of rows cut into global batches, and a batch into the ranks' shares.

use std::sync::Arc;

use super::batch::Span;
use super::options::Position;
use super::shuffle_window::Group;

/// Cuts the stream of rows into global batches.
pub(super) struct Cutter {
    /// Behind the last batch.
    pub position: Position,
    num_groups: u32,
    batch_size: u64,
    /// The group being cut.
    pub group: Option<Arc<Group>>,
    batch: Vec<Span>,
    rows: u64,
}

impl Cutter {
    pub fn new(position: Position, num_groups: u32, batch_size: u64) -> Self {
        Self { position, num_groups, batch_size, group: None, batch: Vec::new(), rows: 0 }
    }

    /// The next whole batch, if the present group completes one. `None` asks for the next group.
    pub fn whole_batch(&mut self) -> Option<Vec<Span>> {
        let group = self.group.take()?;
        let start = self.position.row;
        let end = group.len().min(start + self.batch_size - self.rows);
        if end == group.len() {
            self.position = following(self.position, self.num_groups);
        } else {
            self.position.row = end;
            self.group = Some(group.clone());
        }
        if start < end {
            self.rows += end - start;
            self.batch.push(Span { group, rows: start..end });
        }
        (self.rows == self.batch_size).then(|| self.rest())
    }

    /// The rows that are waiting for a batch to fill.
    pub fn rest(&mut self) -> Vec<Span> {
        self.rows = 0;
        std::mem::take(&mut self.batch)
    }
}

/// The beginning of the group after the one at `position`.
pub(super) fn following(position: Position, num_groups: u32) -> Position {
    let group = position.group + 1;
    if group < num_groups {
        return Position { group, row: 0, ..position };
    }
    Position { epoch: position.epoch.saturating_add(1), group: 0, row: 0 }
}

/// The rows of a global batch that belong to a rank.
pub(super) fn share(rows: Vec<Span>, rank: u64, world_size: u64) -> Vec<Span> {
    let total: u64 = rows.iter().map(|span| span.rows.end - span.rows.start).sum();
    let (first, last) = (rank * total / world_size, (rank + 1) * total / world_size);
    let mut seen = 0;
    let shares = rows.into_iter().filter_map(|Span { group, rows }| {
        let base = seen;
        seen += rows.end - rows.start;
        let (from, to) = (first.max(base), last.min(seen));
        (from < to).then(|| Span { group, rows: rows.start + from - base..rows.start + to - base })
    });
    shares.collect()
}
