//! Packing documents into rows: the packers and their results.
//!
//! A packer works on one block (a range of a shard's tokens) at a time. Its rows are a pure function of corpus, row
//! length, seed, epoch and block. `best_fit` keeps every token and fills rows; `examples` builds examples like the
//! published code.

use std::ops::Range;

use self::cut_points::CutPoints;
use super::options::{CutAt, LoaderOptions, Packing};
use crate::error::Result;
use crate::format::Shard;

mod best_fit;
mod cut_points;
mod examples;

/// Tokens beyond the edge of a block that are fetched with it. Tokens further away are fetched when they are read.
const MARGIN: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// A new attention segment: `[CLS]` before the span, `[SEP]` at the end of the segment.
    NewSegment,
    /// The second text of the segment: `[SEP]` before the span, token type 1 from the span on.
    SecondText,
    /// None: the span continues the text.
    Continuation,
}

impl Boundary {
    pub fn num_specials(self) -> usize {
        match self {
            Self::NewSegment => 2,
            Self::SecondText => 1,
            Self::Continuation => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// First token, counted from the start of the shard.
    pub start: u32,
    /// At most 32,768, so that a span takes eight bytes.
    pub len: u16,
    pub boundary: Boundary,
}

const _: () = assert!(size_of::<Span>() == 8);

impl Span {
    /// Positions of the span in its row, including its special tokens.
    pub fn num_positions(&self) -> usize {
        usize::from(self.len) + self.boundary.num_specials()
    }
}

/// The part of a Philox counter that determines a block's random numbers, together with the seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RngCounter {
    pub epoch: u32,
    pub block: u32,
}

impl RngCounter {
    /// The counter for a row of the block; 0 for random numbers about the block as a whole.
    pub fn words(self, row: u32) -> [u32; 3] {
        [self.epoch, self.block, row]
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rows {
    ends: Vec<u32>,
    pub spans: Vec<Span>,
}

impl Rows {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    #[inline]
    pub fn row(&self, row: usize) -> &[Span] {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        &self.spans[start as usize..self.ends[row] as usize]
    }

    fn end_row(&mut self) {
        self.ends.push(self.spans.len() as u32);
    }
}

/// Packs blocks for one row length and seed. Reuses its working memory from block to block.
pub(super) enum Packer {
    BestFit(best_fit::BestFitPacker),
    Snapped(best_fit::SnappedPacker),
    Examples(examples::ExamplePacker),
}

impl Packer {
    pub fn new(options: &LoaderOptions, seed: u64) -> Self {
        let length = options.sequence_length as usize;
        if options.packing == Packing::Examples {
            return Self::Examples(examples::ExamplePacker::new(length, seed));
        }
        let points = match options.cut_at {
            CutAt::Token => None,
            CutAt::Word => options.word_starts.clone().map(CutPoints::Words),
            CutAt::Line => Some(CutPoints::lines()),
        };
        match points {
            Some(points) => Self::Snapped(best_fit::SnappedPacker::new(length, seed, points)),
            None => Self::BestFit(best_fit::BestFitPacker::new(length, seed)),
        }
    }

    pub fn reads_lines(&self) -> bool {
        match self {
            Self::BestFit(_) => false,
            Self::Snapped(packer) => packer.reads_lines(),
            Self::Examples(_) => true,
        }
    }

    /// Tokens that the packer usually reads before and after a block: edges move to words, and documents reach beyond.
    pub fn margins(&self) -> (u32, u32) {
        match self {
            Self::BestFit(_) => (0, 0),
            Self::Snapped(_) => (MARGIN, MARGIN),
            Self::Examples(_) => (0, MARGIN),
        }
    }

    pub fn pack(&mut self, shard: &Shard, block: Range<u32>, counter: RngCounter) -> Result<Rows> {
        match self {
            Self::BestFit(packer) => Ok(packer.pack(shard.document_ends()?, block, counter)),
            Self::Snapped(packer) => packer.pack(shard, block, counter),
            Self::Examples(packer) => packer.pack(shard, block, counter),
        }
    }
}
