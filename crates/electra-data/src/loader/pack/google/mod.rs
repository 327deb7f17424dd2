//! The published example builder (`packing = "google"`): lossy, for results that compare.
//!
//! Follows the rules of `build_pretraining_dataset.py` of the published code. Lines are gathered until
//! they reach a target length (usually that of a row), or to a blank line or a document's end; the
//! first about half of them become the row's first segment, the others its second, and what is too
//! long for the row is thrown away. An example is one attention segment, `[CLS] 1 [SEP] (2 [SEP])`.
//!
//! A line without any token (blank, or of nothing but control characters) counts as blank, and with the
//! documents' ends these are all that separates examples, as with the published code's default.
//!
//! A block is what a file is to the published code: the first target is a whole row, and all draws of
//! an epoch come from one stream. It takes the documents that *begin* in it, so block edges cut no
//! line and every document is built in one go; of a document longer than a block the blocks that it
//! runs through stay empty. How many rows there are depends on the draws, and so on the epoch.

use std::ops::Range;

use super::{Joint, Piece, Place, Rows};
use crate::error::Result;
use crate::format::Shard;
use crate::philox::{Purpose, Stream, probability};

/// How often an example has one segment only.
const ONE_SEGMENT: u32 = probability(0.1);
/// What its first segment is then told to aim at.
const UNREACHABLE: u32 = 100_000;
/// How often a line that is too long for the first segment is put there all the same.
const FAIR: u32 = probability(0.5);
/// How often an example aims at a length drawn from `SHORTEST` to a whole row.
const SHORT: u32 = probability(0.05);
const SHORTEST: u32 = 5;
/// `[CLS]`, and a `[SEP]` behind each segment.
const SPECIALS: [u32; 2] = [2, 3];

/// Builds the examples of blocks for one row length.
pub(super) struct Packer {
    sequence_length: u32,
    lengths: Vec<u32>,
}

impl Packer {
    /// A packer of rows of `sequence_length` tokens, special tokens included.
    pub(super) fn new(sequence_length: usize) -> Self {
        Self { sequence_length: sequence_length as u32, lengths: Vec::new() }
    }

    /// The rows of the documents that begin in `block`, a range of the shard's tokens.
    pub(super) fn pack(&mut self, shard: &Shard, block: Range<u32>, place: Place) -> Result<Rows> {
        let draws = Stream::new(place.seed, Purpose::Example, [place.epoch, place.block, 0]);
        let mut builder = Builder::new(self.sequence_length, draws);
        let ends = shard.document_ends()?;
        for document in beginning_in(ends, block) {
            let start = if document == 0 { 0 } else { ends[document - 1] };
            shard.read_line_lengths(document as u64, &mut self.lengths)?;
            if builder.add_document(start, &self.lengths) != Some(ends[document]) {
                return Err(shard.contradicted(document));
            }
        }
        Ok(builder.rows)
    }
}

/// The documents whose first token lies in `block`. All blocks together have each once.
fn beginning_in(ends: &[u32], block: Range<u32>) -> Range<usize> {
    let first_from = |edge: u32| match edge {
        0 => 0,
        _ => ends.len().min(ends.partition_point(|&end| end < edge) + 1),
    };
    first_from(block.start)..first_from(block.end)
}

/// The state between two lines.
struct Builder {
    sequence_length: u32,
    /// Tokens at which the example is complete.
    target: u32,
    draws: Stream,
    /// Lines gathered for the next example, as ranges of the shard's tokens, and their tokens.
    lines: Vec<Range<u32>>,
    gathered: u32,
    first: Segment,
    second: Segment,
    rows: Rows,
}

impl Builder {
    fn new(sequence_length: u32, draws: Stream) -> Self {
        Self {
            sequence_length,
            target: sequence_length,
            draws,
            lines: Vec::new(),
            gathered: 0,
            first: Segment::default(),
            second: Segment::default(),
            rows: Rows::default(),
        }
    }

    /// Reads a document's lines, the first of which begins at token `start`; an example ends where
    /// the document does. Returns where that is, or `None` beyond what a shard can hold.
    fn add_document(&mut self, mut start: u32, lengths: &[u32]) -> Option<u32> {
        for &len in lengths {
            let end = start.checked_add(len)?;
            if len == 0 {
                self.finish_example();
            } else {
                self.add_line(start..end);
            }
            start = end;
        }
        self.finish_example();
        Some(start)
    }

    fn add_line(&mut self, line: Range<u32>) {
        self.gathered += line.end - line.start;
        self.lines.push(line);
        if self.gathered >= self.target {
            self.finish_example();
        }
    }

    fn finish_example(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        self.divide();
        let [one, two] = SPECIALS;
        let used = self.first.write(&mut self.rows, Joint::Opens, self.sequence_length - one);
        self.second.write(&mut self.rows, Joint::Second, self.sequence_length.saturating_sub(used + two));
        self.rows.end_row();
        self.gathered = 0;
        self.target = match self.draws.happens(SHORT) {
            true => SHORTEST + self.draws.below(self.sequence_length - SHORTEST + 1),
            false => self.sequence_length,
        };
    }

    /// Deals the gathered lines out to the two segments. A later, shorter line can still join the
    /// first segment when the second has begun.
    fn divide(&mut self) {
        let aim = match self.draws.happens(ONE_SEGMENT) {
            true => UNREACHABLE,
            false => (self.target - SPECIALS[1]) / 2,
        };
        self.first.clear();
        self.second.clear();
        for line in self.lines.drain(..) {
            let joins_first = self.first.len == 0
                || self.first.len + (line.end - line.start) < aim
                || self.second.len == 0 && self.first.len < aim && self.draws.happens(FAIR);
            let segment = if joins_first { &mut self.first } else { &mut self.second };
            segment.add(line);
        }
    }
}

/// Runs of tokens that are read one after the other.
#[derive(Default)]
struct Segment {
    runs: Vec<Range<u32>>,
    len: u32,
}

impl Segment {
    fn clear(&mut self) {
        self.runs.clear();
        self.len = 0;
    }

    fn add(&mut self, line: Range<u32>) {
        self.len += line.end - line.start;
        match self.runs.last_mut() {
            Some(run) if run.end == line.start => run.end = line.end,
            _ => self.runs.push(line),
        }
    }

    /// Appends its first tokens to the row, at most `room`; says how many.
    fn write(&self, rows: &mut Rows, joint: Joint, room: u32) -> u32 {
        let (mut left, mut joint) = (room, joint);
        for run in &self.runs {
            let len = left.min(run.end - run.start);
            if len == 0 {
                break;
            }
            rows.pieces.push(Piece { start: run.start, len: len as u16, joint });
            joint = Joint::Continues;
            left -= len;
        }
        room - left
    }
}

#[cfg(test)]
mod tests;
