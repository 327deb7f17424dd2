//! Positions in the streams of rows.

/// A position between two rows of a corpus's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowPosition {
    /// Number of finished epochs.
    pub epoch: u32,
    /// Number of finished windows of this epoch.
    pub window: u32,
    /// Number of finished rows of this window.
    pub row: u64,
}

impl RowPosition {
    /// The start of the next window, given the number of windows per epoch.
    pub fn next_window(self, num_windows: u32) -> Self {
        let window = self.window + 1;
        if window < num_windows {
            return Self { window, row: 0, ..self };
        }
        Self { epoch: self.epoch.saturating_add(1), window: 0, row: 0 }
    }
}

/// A corpus's position, and its turns in the mixture.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CorpusPosition {
    /// The position in the corpus's stream.
    pub at: RowPosition,
    /// Rows of the current window; 0 at its start, where the number may not be known yet.
    pub window_rows: u64,
    /// Rows given since a corpus last left the mixture; unused for a single corpus.
    pub turns: u64,
}
