//! Documents to rows: what every packer produces, and which packers there are.
//!
//! A packer works on one block (a range of a shard's tokens) at a time, and what it makes of it is a
//! pure function of the corpus, the row length, the seed, the epoch and the block. `best_fit` loses
//! nothing and fills rows; `google` builds examples as the published code does.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::format::Shard;

mod best_fit;
mod google;

/// How documents become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Every token in a row, rows filled with as many documents as fit.
    BestFit,
    /// The published builder: one or two segments of one document's lines, the overflow thrown away.
    Google,
}

impl Packing {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::BestFit, Self::Google];

    /// The packing of that name.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|packing| packing.name() == name).ok_or_else(|| {
            Error::Input(format!("packing = {name:?}: unknown; choose \"best-fit\" or \"google\""))
        })
    }

    /// The name it has in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::BestFit => "best-fit",
            Self::Google => "google",
        }
    }
}

/// What comes before a piece in its row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joint {
    /// An attention segment begins: `[CLS]` before the piece, `[SEP]` at the segment's end.
    Opens,
    /// The segment's second text begins: `[SEP]` before the piece, token type 1 from it on.
    Second,
    /// Nothing: the piece goes on where the one before it ended.
    Continues,
}

impl Joint {
    /// Special tokens that such a piece adds to the row.
    pub fn num_specials(self) -> usize {
        match self {
            Self::Opens => 2,
            Self::Second => 1,
            Self::Continues => 0,
        }
    }
}

/// A run of a shard's tokens that stands in a row as it stands in the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// First token, counted from the shard's beginning.
    pub start: u32,
    /// Number of tokens. Rows are at most 32,768 long; eight bytes a piece keep plans small.
    pub len: u16,
    /// How it is joined to the piece before it.
    pub joint: Joint,
}

impl Piece {
    /// Places that the piece takes in its row, with the special tokens that it brings.
    pub fn num_positions(&self) -> usize {
        usize::from(self.len) + self.joint.num_specials()
    }
}

/// Where a plan's randomness comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The loader's seed.
    pub seed: u64,
    /// The epoch, counted from 0.
    pub epoch: u32,
    /// The block, counted over the whole corpus.
    pub block: u32,
}

/// The rows of one block: what any packer produces and all that later steps know of packing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rows {
    ends: Vec<u32>,
    pieces: Vec<Piece>,
}

impl Rows {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The pieces of a row in order; the first one opens an attention segment.
    #[inline]
    pub fn row(&self, row: usize) -> &[Piece] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.pieces[start as usize..self.ends[row] as usize]
    }

    /// The pieces of all rows.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Ends a row behind the pieces added so far.
    fn end_row(&mut self) {
        self.ends.push(self.pieces.len() as u32);
    }
}

/// Packs the blocks of a corpus for one row length; keeps its working memory from block to block.
pub(super) struct Packer(Kind);

enum Kind {
    BestFit(best_fit::Packer),
    Google(google::Packer),
}

impl Packer {
    /// A packer of rows of `sequence_length` tokens (8 to 32,768), special tokens included.
    pub fn new(packing: Packing, sequence_length: usize) -> Self {
        Self(match packing {
            Packing::BestFit => Kind::BestFit(best_fit::Packer::new(sequence_length)),
            Packing::Google => Kind::Google(google::Packer::new(sequence_length)),
        })
    }

    /// The rows of `block`, a range of the shard's tokens.
    pub fn pack(&mut self, shard: &Shard, block: Range<u32>, place: Place) -> Result<Rows> {
        match &mut self.0 {
            Kind::BestFit(packer) => Ok(packer.pack(shard.document_ends()?, block, place)),
            Kind::Google(packer) => packer.pack(shard, block, place),
        }
    }

    /// How many rows `pack` makes of the block: with best-fit the same in every epoch.
    pub fn count(&mut self, shard: &Shard, block: Range<u32>, place: Place) -> Result<usize> {
        match &mut self.0 {
            Kind::BestFit(packer) => Ok(packer.count(shard.document_ends()?, block)),
            Kind::Google(packer) => packer.pack(shard, block, place).map(|rows| rows.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_refused() {
        for packing in Packing::ALL {
            assert_eq!(Packing::from_name(packing.name()).unwrap(), packing);
        }
        let message = Packing::from_name("none").unwrap_err().to_string();
        assert_eq!(message, "packing = \"none\": unknown; choose \"best-fit\" or \"google\"");
    }

    #[test]
    fn plans_are_small() {
        assert_eq!(size_of::<Piece>(), 8);
    }
}
