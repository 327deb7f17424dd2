//! The loss-free packer (`packing = "best-fit"`): each piece is an attention segment of its own.
//!
//! Documents are cut into pieces of at most `sequence_length - 2` tokens; full pieces fill a row each,
//! the remainders share rows by best-fit decreasing, or, where their lengths leave gaps whatever one
//! does, are cut again to fill the rows. The epoch moves the cuts and breaks ties, but never changes
//! how long the pieces are, so a block has the same number of rows in every epoch and counting them needs no plan.

use std::ops::Range;

use super::{Joint, Piece, Place, Rows};
use crate::philox::{Purpose, Stream};

/// Tokens that the row adds to each piece: `[CLS]` before it and `[SEP]` behind it.
const SPECIALS_PER_PIECE: usize = 2;
/// One row of a block in so many may be wasted before remainders are cut to fill rows.
const TOLERATED: usize = 50;
/// Such a cut leaves no piece at a row's end that is shorter than this part of a row.
const SHORTEST_CUT: u32 = 16;
const NONE: u32 = u32::MAX;

/// Packs the blocks of a corpus for one row length; keeps its working memory from block to block.
pub(super) struct Packer {
    sequence_length: usize,
    shelves: Shelves,
}

impl Packer {
    /// A packer of rows of `sequence_length` tokens, special tokens included.
    pub(super) fn new(sequence_length: usize) -> Self {
        Self { sequence_length, shelves: Shelves::new(sequence_length) }
    }

    /// The rows of `block`, a range of the tokens of the shard that has these document ends.
    pub(super) fn pack(&mut self, document_ends: &[u32], block: Range<u32>, place: Place) -> Rows {
        let full = self.piece_length();
        let mut rows = Rows::default();
        let mut remainders = Vec::new();
        let mut cuts = Stream::new(place.seed, Purpose::Cut, [place.epoch, place.block, 0]);
        for part in parts(document_ends, block) {
            cut(part, full, &mut cuts, &mut rows, &mut remainders);
        }
        let mut ties = Stream::new(place.seed, Purpose::Tie, [place.epoch, place.block, 0]);
        shuffle(&mut remainders, &mut ties);
        remainders.sort_by_key(|piece| std::cmp::Reverse(piece.len)); // stable: ties stay shuffled
        self.pack_remainders(&remainders, rows.len(), &mut rows);
        rows
    }

    /// How many rows `pack` makes of the block, whatever the epoch.
    pub(super) fn count(&mut self, document_ends: &[u32], block: Range<u32>) -> usize {
        let full = self.piece_length();
        let mut full_rows = 0;
        let mut remainders = Vec::new();
        for part in parts(document_ends, block) {
            let len = part.end - part.start;
            full_rows += (len / full) as usize;
            remainders.extend((len % full != 0).then(|| opening(0, len % full)));
        }
        remainders.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.len));
        let mut rows = Rows::default();
        self.pack_remainders(&remainders, full_rows, &mut rows);
        full_rows + rows.len()
    }

    fn piece_length(&self) -> u32 {
        (self.sequence_length - SPECIALS_PER_PIECE) as u32
    }

    /// Appends the rows that hold `remainders` (sorted, longest first). Only their lengths and the
    /// number of full rows of the block decide how many rows that takes.
    fn pack_remainders(&mut self, remainders: &[Piece], full_rows: usize, rows: &mut Rows) {
        self.shelves.clear();
        let homes: Vec<u32> = remainders.iter().map(|s| self.shelves.place(u32::from(s.len))).collect();
        let used: usize = remainders.iter().map(|s| s.num_positions()).sum();
        let ideal = used.div_ceil(self.sequence_length);
        if self.shelves.len() <= ideal + (full_rows + ideal) / TOLERATED + 1 {
            share_rows(remainders, &homes, self.shelves.len(), rows);
        } else {
            chain(remainders, self.sequence_length as u32, rows);
        }
    }
}

/// Appends `count` rows, putting each remainder into the row that `homes` names.
fn share_rows(remainders: &[Piece], homes: &[u32], count: usize, rows: &mut Rows) {
    let mut sizes = vec![0_u32; count];
    homes.iter().for_each(|&home| sizes[home as usize] += 1);
    let mut next: Vec<u32> = Vec::with_capacity(count);
    let mut end = rows.pieces.len() as u32;
    for size in sizes {
        next.push(end);
        end += size;
        rows.ends.push(end);
    }
    rows.pieces.resize(end as usize, opening(0, 0));
    for (piece, &home) in remainders.iter().zip(homes) {
        rows.pieces[next[home as usize] as usize] = *piece;
        next[home as usize] += 1;
    }
}

/// Appends rows filled one after the other, cutting a remainder where its row ends. For lengths that
/// no packing without cuts puts together well, such as all a little over half a row.
fn chain(remainders: &[Piece], sequence_length: u32, rows: &mut Rows) {
    let specials = SPECIALS_PER_PIECE as u32;
    let least = (sequence_length / SHORTEST_CUT).max(1);
    let mut free = sequence_length;
    for piece in remainders {
        let (mut start, end) = (piece.start, piece.start + u32::from(piece.len));
        while start < end {
            if free < specials + least.min(end - start) {
                rows.end_row();
                free = sequence_length;
            }
            let len = (end - start).min(free - specials);
            rows.pieces.push(opening(start, len));
            start += len;
            free -= len + specials;
        }
    }
    rows.end_row();
}

/// The documents that reach into `block`, as far as they do.
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

/// Cuts a part of a document into full pieces, a row each, and a remainder whose place among them
/// is drawn.
fn cut(part: Range<u32>, full: u32, cuts: &mut Stream, rows: &mut Rows, remainders: &mut Vec<Piece>) {
    let len = part.end - part.start;
    let (pieces, rest) = (len / full, len % full);
    let before = if rest == 0 || pieces == 0 { 0 } else { cuts.below(pieces + 1) };
    let mut start = part.start;
    for piece in 0..pieces {
        if piece == before {
            start += rest;
        }
        rows.pieces.push(opening(start, full));
        rows.end_row();
        start += full;
    }
    if rest > 0 {
        remainders.push(opening(part.start + before * full, rest));
    }
}

/// A piece with an attention segment of its own. Its length is below that of a row, which fits.
fn opening(start: u32, len: u32) -> Piece {
    Piece { start, len: len as u16, joint: Joint::Opens }
}

fn shuffle(pieces: &mut [Piece], stream: &mut Stream) {
    for last in (1..pieces.len()).rev() {
        pieces.swap(last, stream.below(last as u32 + 1) as usize);
    }
}

/// Open rows, stacked by how much space is left in them. A bit per stack tells which are not empty,
/// so the tightest row that is wide enough is found by looking at a few words.
struct Shelves {
    sequence_length: usize,
    /// Per free space: the topmost row of the stack.
    tops: Vec<u32>,
    /// Per row: the row below it in its stack.
    below: Vec<u32>,
    occupied: Vec<u64>,
}

impl Shelves {
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

    fn len(&self) -> usize {
        self.below.len()
    }

    /// Puts a piece of `len` tokens into the fullest row that takes it, or a new one.
    fn place(&mut self, len: u32) -> u32 {
        let need = len as usize + SPECIALS_PER_PIECE;
        let (row, free) = match self.tightest(need) {
            Some(free) => (self.pop(free), free),
            None => (self.open(), self.sequence_length),
        };
        self.push(row, free - need);
        row
    }

    fn open(&mut self) -> u32 {
        self.below.push(NONE);
        self.below.len() as u32 - 1
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
