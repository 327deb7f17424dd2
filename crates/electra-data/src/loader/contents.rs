//! Documents and tokens that a packing keeps of a corpus, counted on packed rows.

use std::iter::Sum;

use super::pack::{Rows, Span};

/// Contents of the rows of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Number of rows.
    pub rows: u64,
    /// Tokens of the corpus, without special tokens.
    pub tokens: u64,
    /// Positions that are not padding: these tokens and the special ones.
    pub positions: u64,
}

impl Contents {
    pub(super) fn of(rows: &Rows) -> Self {
        let sum = |size: fn(&Span) -> usize| rows.spans().iter().map(|span| size(span) as u64).sum();
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
