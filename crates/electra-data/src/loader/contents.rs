//! What a packing keeps of a corpus, counted on its plans.

use std::iter::Sum;

use super::pack::{Piece, Rows};

/// What the rows of an epoch hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// How many rows there are.
    pub rows: u64,
    /// Tokens of the corpus in them.
    pub tokens: u64,
    /// Places that are not padding: those tokens and the special ones.
    pub positions: u64,
}

impl Contents {
    pub(super) fn of(rows: &Rows) -> Self {
        let sum = |size: fn(&Piece) -> usize| rows.pieces().iter().map(|piece| size(piece) as u64).sum();
        Self {
            rows: rows.len() as u64,
            tokens: sum(|piece| usize::from(piece.len)),
            positions: sum(Piece::num_positions),
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
