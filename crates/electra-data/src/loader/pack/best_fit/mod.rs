//! The lossless packer (`packing = "best-fit"`): each span is a separate attention segment.
//!
//! Documents are cut into spans of at most `sequence_length - 2` tokens. A full span fills a row;
//! the remainders share rows by best-fit decreasing or, if their lengths leave gaps in any packing, are cut
//! again to fill the rows. The epoch moves the cuts and breaks ties but never changes the lengths of the
//! spans, so a block has the same number of rows in every epoch.

use std::ops::Range;

use super::{Boundary, CutPoints, RngCounter, Rows, Span};
use crate::philox::{Purpose, Stream};

mod snapped;

pub(in crate::loader) use self::snapped::SnappedPacker;

const SPECIALS_PER_SEGMENT: usize = 2;
/// Remainders are cut to fill rows if packing would waste more than one row in this many.
const WASTE_DIVISOR: usize = 50;
/// Minimum length of a span that such a cut leaves at the end of a row: the row length divided by this.
const MIN_CUT_DIVISOR: u32 = 16;
const NONE: u32 = u32::MAX;

pub(in crate::loader) struct BestFitPacker {
    sequence_length: usize,
    seed: u64,
    open_rows: OpenRows,
}

impl BestFitPacker {
    pub(super) fn new(sequence_length: usize, seed: u64) -> Self {
        Self { sequence_length, seed, open_rows: OpenRows::new(sequence_length) }
    }

    pub(super) fn pack(&mut self, document_ends: &[u32], block: Range<u32>, counter: RngCounter) -> Rows {
        let full = self.max_span();
        let mut rows = Rows::default();
        let mut remainders = Vec::new();
        let mut cuts = Stream::new(self.seed, Purpose::Cut, counter.words(0));
        for part in parts(document_ends, block) {
            cut(part, full, &mut cuts, &mut rows, &mut remainders);
        }
        self.sort_remainders(&mut remainders, counter);
        self.pack_remainders(&remainders, rows.len(), &mut rows);
        rows
    }

    fn sort_remainders(&self, remainders: &mut [Span], counter: RngCounter) {
        let mut ties = Stream::new(self.seed, Purpose::Tie, counter.words(0));
        shuffle(remainders, &mut ties);
        remainders.sort_by_key(|span| std::cmp::Reverse(span.len)); // stable: ties stay shuffled
    }

    fn max_span(&self) -> u32 {
        (self.sequence_length - SPECIALS_PER_SEGMENT) as u32
    }

    /// The row that best-fit decreasing assigns to each of `remainders`, which are sorted by decreasing length.
    fn place(&mut self, remainders: &[Span]) -> Vec<u32> {
        self.open_rows.clear();
        remainders.iter().map(|span| self.open_rows.place(u32::from(span.len))).collect()
    }

    /// Appends rows that hold `remainders`, sorted by decreasing length. The number of rows depends only on
    /// these lengths and on the number of full rows.
    fn pack_remainders(&mut self, remainders: &[Span], full_rows: usize, rows: &mut Rows) {
        let assigned = self.place(remainders);
        let used: usize = remainders.iter().map(|s| s.num_positions()).sum();
        let ideal = used.div_ceil(self.sequence_length);
        if self.open_rows.below.len() <= ideal + (full_rows + ideal) / WASTE_DIVISOR + 1 {
            append_rows(remainders, &assigned, self.open_rows.below.len(), rows);
        } else {
            chain(remainders, self.sequence_length as u32, rows);
        }
    }
}

fn append_rows(remainders: &[Span], assigned: &[u32], count: usize, rows: &mut Rows) {
    let mut sizes = vec![0_u32; count];
    assigned.iter().for_each(|&row| sizes[row as usize] += 1);
    let mut next: Vec<u32> = Vec::with_capacity(count);
    let mut end = rows.spans.len() as u32;
    for size in sizes {
        next.push(end);
        end += size;
        rows.ends.push(end);
    }
    rows.spans.resize(end as usize, segment(0, 0));
    for (span, &row) in remainders.iter().zip(assigned) {
        rows.spans[next[row as usize] as usize] = *span;
        next[row as usize] += 1;
    }
}

/// Appends rows filled one after the other, cutting a remainder at the end of a row. Used for lengths that do not
/// pack well without cuts, for example if all are slightly over half a row.
fn chain(remainders: &[Span], sequence_length: u32, rows: &mut Rows) {
    let specials = SPECIALS_PER_SEGMENT as u32;
    let min_cut = (sequence_length / MIN_CUT_DIVISOR).max(1);
    let mut free = sequence_length;
    for span in remainders {
        let (mut start, end) = (span.start, span.start + u32::from(span.len));
        while start < end {
            if free < specials + min_cut.min(end - start) {
                rows.end_row();
                free = sequence_length;
            }
            let len = (end - start).min(free - specials);
            rows.spans.push(segment(start, len));
            start += len;
            free -= len + specials;
        }
    }
    rows.end_row();
}

fn parts(document_ends: &[u32], block: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let first = document_ends.partition_point(|&end| end <= block.start);
    let mut start = block.start;
    let ends = document_ends[first..].iter().map(move |&end| {
        let part = start..end.min(block.end);
        start = end;
        part
    });
    ends.take_while(move |part| part.start < block.end).filter(|part| !part.is_empty())
}

/// Cuts a part of a document into full spans, one per row, and a remainder at a random place among them.
fn cut(part: Range<u32>, full: u32, cuts: &mut Stream, rows: &mut Rows, remainders: &mut Vec<Span>) {
    let len = part.end - part.start;
    let (spans, rest) = (len / full, len % full);
    let before = if rest == 0 || spans == 0 { 0 } else { cuts.below(spans + 1) };
    let mut start = part.start;
    for span in 0..spans {
        if span == before {
            start += rest;
        }
        rows.spans.push(segment(start, full));
        rows.end_row();
        start += full;
    }
    if rest > 0 {
        remainders.push(segment(part.start + before * full, rest));
    }
}

/// A span that is a separate attention segment; it is shorter than a row, so its length fits into u16.
fn segment(start: u32, len: u32) -> Span {
    Span { start, len: len as u16, boundary: Boundary::NewSegment }
}

fn shuffle(spans: &mut [Span], stream: &mut Stream) {
    for last in (1..spans.len()).rev() {
        spans.swap(last, stream.below(last as u32 + 1) as usize);
    }
}

/// Rows with free space, in one stack per amount of free space. A bitmap of non-empty stacks finds the
/// tightest row that fits by reading a few words.
struct OpenRows {
    sequence_length: usize,
    /// The top row of each stack, indexed by free space.
    tops: Vec<u32>,
    /// For each row, the row below it in its stack.
    below: Vec<u32>,
    occupied: Vec<u64>,
}

impl OpenRows {
    fn new(sequence_length: usize) -> Self {
        Self {
            sequence_length,
            tops: vec![NONE; sequence_length + 1],
            below: Vec::new(),
            occupied: vec![0; sequence_length / 64 + 1],
        }
    }

    fn clear(&mut self) {
        self.tops.fill(NONE);
        self.occupied.fill(0);
        self.below.clear();
    }

    /// Puts a span of `len` tokens into the fullest row with enough space, or into a new one.
    fn place(&mut self, len: u32) -> u32 {
        let need = len as usize + SPECIALS_PER_SEGMENT;
        let (row, free) = match self.tightest(need) {
            Some(free) => (self.pop(free), free),
            None => {
                self.below.push(NONE);
                (self.below.len() as u32 - 1, self.sequence_length)
            }
        };
        self.push(row, free - need);
        row
    }

    fn tightest(&self, need: usize) -> Option<usize> {
        let first = need / 64;
        let masked = self.occupied[first] & (u64::MAX << (need % 64));
        let rest = self.occupied.iter().enumerate().skip(first + 1).map(|(word, &bits)| (word, bits));
        let (word, bits) = std::iter::once((first, masked)).chain(rest).find(|&(_, bits)| bits != 0)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn push(&mut self, row: u32, free: usize) {
        self.below[row as usize] = self.tops[free];
        self.tops[free] = row;
        self.occupied[free / 64] |= 1 << (free % 64);
    }

    fn pop(&mut self, free: usize) -> u32 {
        let row = self.tops[free];
        self.tops[free] = self.below[row as usize];
        if self.tops[free] == NONE {
            self.occupied[free / 64] &= !(1 << (free % 64));
        }
        row
    }
}

#[cfg(test)]
mod tests;
