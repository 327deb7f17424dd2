//! The published example builder (`packing = "examples"`): lossy, for comparable results.
//!
//! Follows the rules of `build_pretraining_dataset.py` of the published code. Lines are collected up to a
//! target length (usually the row length), a blank line or the end of the document. About the first half of
//! them become the example's first text, the others its second, and the overflow of the row is
//! truncated. An example is one attention segment, `[CLS] 1 [SEP] (2 [SEP])`.
//!
//! A line without tokens (blank, or only control characters) counts as blank. Only blank lines and the ends of
//! documents separate examples, as with the published code's default.
//!
//! A block corresponds to a file of the published code: its first target is a whole row, and all its draws in
//! an epoch come from one stream. It has the documents that *begin* in it, so no line is cut at the edge of a
//! block; if a document spans several blocks, the later ones are empty. The number of rows depends on the
//! draws, and so on the epoch.

use std::ops::Range;

use super::{Boundary, RngCounter, Rows, Span};
use crate::error::Result;
use crate::format::Shard;
use crate::philox::{Purpose, Stream, probability};

const ONE_TEXT: u32 = probability(0.1);
const UNREACHABLE: u32 = 100_000;
/// Probability that a line that is too long for the first text joins it nevertheless.
const FAIR: u32 = probability(0.5);
/// Probability of a target length drawn from `MIN_TARGET` to a whole row.
const SHORT: u32 = probability(0.05);
const MIN_TARGET: u32 = 5;
/// Special tokens of an example with one text and with two: `[CLS]`, and `[SEP]` after each text.
const SPECIALS: [u32; 2] = [2, 3];

pub(in crate::loader) struct ExamplePacker {
    sequence_length: u32,
    seed: u64,
    lengths: Vec<u32>,
}

impl ExamplePacker {
    pub(super) fn new(sequence_length: usize, seed: u64) -> Self {
        Self { sequence_length: sequence_length as u32, seed, lengths: Vec::new() }
    }

    pub(super) fn pack(&mut self, shard: &Shard, block: Range<u32>, counter: RngCounter) -> Result<Rows> {
        let draws = Stream::new(self.seed, Purpose::Example, counter.words(0));
        let mut builder = Builder::new(self.sequence_length, draws);
        let ends = shard.document_ends()?;
        for document in beginning_in(ends, block) {
            let start = if document == 0 { 0 } else { ends[document - 1] };
            shard.read_line_lengths(document as u64, &mut self.lengths)?;
            if builder.add_document(start, &self.lengths) != Some(ends[document]) {
                return Err(shard.lines_mismatch(document));
            }
        }
        Ok(builder.rows)
    }
}

/// The documents whose first token lies in `block`. Each belongs to exactly one block.
fn beginning_in(ends: &[u32], block: Range<u32>) -> Range<usize> {
    let first_from = |edge: u32| match edge {
        0 => 0,
        _ => ends.len().min(ends.partition_point(|&end| end < edge) + 1),
    };
    first_from(block.start)..first_from(block.end)
}

struct Builder {
    sequence_length: u32,
    target: u32,
    draws: Stream,
    /// Lines collected for the next example, as ranges of the shard's tokens, and their total length.
    lines: Vec<Range<u32>>,
    num_collected: u32,
    first: Text,
    second: Text,
    rows: Rows,
}

impl Builder {
    fn new(sequence_length: u32, draws: Stream) -> Self {
        Self {
            sequence_length,
            target: sequence_length,
            draws,
            lines: Vec::new(),
            num_collected: 0,
            first: Text::default(),
            second: Text::default(),
            rows: Rows::default(),
        }
    }

    /// Adds a document's lines; the end of the document also ends an example. Returns the end of its last token; `None` on
    /// overflow.
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
        self.num_collected += line.end - line.start;
        self.lines.push(line);
        if self.num_collected >= self.target {
            self.finish_example();
        }
    }

    fn finish_example(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        self.divide();
        let [one, two] = SPECIALS;
        let used = self.first.write(&mut self.rows, Boundary::NewSegment, self.sequence_length - one);
        self.second.write(
            &mut self.rows,
            Boundary::SecondText,
            self.sequence_length.saturating_sub(used + two),
        );
        self.rows.end_row();
        self.num_collected = 0;
        self.target = match self.draws.happens(SHORT) {
            true => MIN_TARGET + self.draws.below(self.sequence_length - MIN_TARGET + 1),
            false => self.sequence_length,
        };
    }

    /// Divides the lines into the two texts. A short line can join the first text even after the second has begun.
    fn divide(&mut self) {
        let aim = match self.draws.happens(ONE_TEXT) {
            true => UNREACHABLE,
            false => (self.target - SPECIALS[1]) / 2,
        };
        self.first.clear();
        self.second.clear();
        for line in self.lines.drain(..) {
            let joins_first = self.first.len == 0
                || self.first.len + (line.end - line.start) < aim
                || self.second.len == 0 && self.first.len < aim && self.draws.happens(FAIR);
            let text = if joins_first { &mut self.first } else { &mut self.second };
            text.add(line);
        }
    }
}

/// One of the two texts of an example: ranges of tokens, in order.
#[derive(Default)]
struct Text {
    ranges: Vec<Range<u32>>,
    len: u32,
}

impl Text {
    fn clear(&mut self) {
        self.ranges.clear();
        self.len = 0;
    }

    fn add(&mut self, line: Range<u32>) {
        self.len += line.end - line.start;
        match self.ranges.last_mut() {
            Some(last) if last.end == line.start => last.end = line.end,
            _ => self.ranges.push(line),
        }
    }

    /// Appends the text's first tokens, at most `room`, to the row; returns their number.
    fn write(&self, rows: &mut Rows, boundary: Boundary, room: u32) -> u32 {
        let (mut left, mut boundary) = (room, boundary);
        for range in &self.ranges {
            let len = left.min(range.end - range.start);
            if len == 0 {
                break;
            }
            rows.spans.push(Span { start: range.start, len: len as u16, boundary });
            boundary = Boundary::Continuation;
            left -= len;
        }
        room - left
    }
}

#[cfg(test)]
mod tests;
