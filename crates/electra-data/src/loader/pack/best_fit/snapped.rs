//! Best-fit packing with cuts at words or lines only (`cut_at`).
//!
//! Each cut moves back to the last cut point of its span, and so do the edges of the block. A span without
//! cut points, for example one long word, is cut at a token. Spans are never cut again to fill rows, so documents
//! whose lengths leave gaps in any packing leave gaps here. The number of rows depends on the epoch.

use std::ops::Range;

use super::{BestFitPacker, CutPoints, RngCounter, Rows, Span, append_rows, cut, parts, segment};
use crate::error::Result;
use crate::format::Shard;
use crate::philox::{Purpose, Stream};

pub(in crate::loader) struct SnappedPacker {
    best_fit: BestFitPacker,
    points: CutPoints,
}

impl SnappedPacker {
    pub fn reads_lines(&self) -> bool {
        matches!(self.points, CutPoints::Lines { .. })
    }

    pub(in crate::loader::pack) fn new(sequence_length: usize, seed: u64, points: CutPoints) -> Self {
        Self { best_fit: BestFitPacker::new(sequence_length, seed), points }
    }

    pub fn pack(&mut self, shard: &Shard, block: Range<u32>, counter: RngCounter) -> Result<Rows> {
        let full = self.best_fit.max_span();
        let mut edge = |edge| self.points.snap(shard, edge, full);
        let block = edge(block.start)?..edge(block.end)?;
        let (mut rows, mut remainders) = (Rows::default(), Vec::new());
        let mut cuts = Stream::new(self.best_fit.seed, Purpose::Cut, counter.words(0));
        for part in parts(shard.document_ends()?, block) {
            if part.end - part.start <= full {
                cut(part, full, &mut cuts, &mut rows, &mut remainders);
            } else {
                self.cut(shard, part, &mut cuts, &mut rows, &mut remainders)?;
            }
        }
        self.best_fit.sort_remainders(&mut remainders, counter);
        let assigned = self.best_fit.place(&remainders);
        append_rows(&remainders, &assigned, self.best_fit.open_rows.below.len(), &mut rows);
        Ok(rows)
    }

    /// Cuts a part of a document that is longer than a row: as without cut points, one span at a random position
    /// has the length that full rows would leave over, and then each cut moves back.
    fn cut(
        &mut self,
        shard: &Shard,
        part: Range<u32>,
        cuts: &mut Stream,
        rows: &mut Rows,
        remainders: &mut Vec<Span>,
    ) -> Result<()> {
        self.points.enter(shard, part.start)?;
        let full = self.best_fit.max_span();
        let len = part.end - part.start;
        let (spans, rest) = (len / full, len % full);
        let short = (rest > 0).then(|| cuts.below(spans + 1));
        let mut start = part.start;
        for number in 0.. {
            let wanted = if short == Some(number) { rest } else { full };
            let end = self.end(shard, start..part.end, wanted)?;
            let span = segment(start, end - start);
            if end - start == full {
                rows.spans.push(span);
                rows.end_row();
            } else {
                remainders.push(span);
            }
            start = end;
            if start == part.end {
                break;
            }
        }
        Ok(())
    }

    /// The end of the first span of `rest`, which has `wanted` tokens before its cut moves back. If that leaves
    /// no tokens, the span may fill a row; if the row has no cut point either, it is cut at a token.
    fn end(&self, shard: &Shard, rest: Range<u32>, wanted: u32) -> Result<u32> {
        let full = self.best_fit.max_span();
        for len in [wanted, full] {
            if rest.end - rest.start <= len {
                return Ok(rest.end);
            }
            if let Some(end) = self.points.last(shard, rest.start, rest.start + len)? {
                return Ok(end);
            }
        }
        Ok(rest.start + full)
    }
}

#[cfg(test)]
mod tests;
