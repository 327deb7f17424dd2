//! The order of rows: an epoch of a lane is a sequence of shuffle windows, and rows are shuffled within a window.
//!
//! A shard is divided into blocks of about 262,144 tokens. A lane visits its blocks in a pseudorandom order
//! (`block_order`); the windows of all lanes together have 64 consecutive blocks of this order, and the rows of a window are
//! ordered pseudorandomly. So rows are shuffled over sixteen million tokens and blocks over the whole corpus, and a
//! position in the stream of a lane is three integers: epoch, window, row.

use std::ops::Range;
use std::sync::Arc;

use super::block_order::BlockOrder;
use super::pack::{Packer, RngCounter, Rows, Span};
use super::permutation::Permutation;
use crate::error::{Error, Result};
use crate::format::{Corpus, Pins, Shard};
use crate::philox::Purpose;
use crate::store::Cancel;

const BLOCK_TOKENS: u64 = 262_144;
const FETCHED_BLOCKS: u64 = 64;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RowPosition {
    pub epoch: u32,
    pub window: u32,
    pub row: u64,
}

impl RowPosition {
    pub fn next_window(self, num_windows: u32) -> Self {
        let window = self.window + 1;
        if window < num_windows {
            return Self { window, row: 0, ..self };
        }
        Self { epoch: self.epoch.saturating_add(1), window: 0, row: 0 }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CorpusPosition {
    pub at: RowPosition,
    /// Rows of the current window; 0 at its start, when the number may not be known yet.
    pub window_rows: u64,
    /// Rows supplied since a corpus last left the mixture; unused for a single corpus.
    pub turns: u64,
}

#[derive(Debug)]
pub(super) struct Blocks {
    pub corpus: Arc<Corpus>,
    pub seed: u64,
    order: BlockOrder,
}

impl Blocks {
    /// Divides a corpus, without reading its tokens. Fewer blocks than lanes are an error.
    pub fn new(corpus: Arc<Corpus>, seed: u64, num_lanes: u32) -> Result<Self> {
        let mut first = vec![0_u32];
        for shard in 0..corpus.num_shards() {
            let total = u64::from(first[first.len() - 1]) + blocks_in(corpus.shard_size(shard).1);
            let total = u32::try_from(total).map_err(|_| {
                Error::Input(format!("the corpus has more than {} blocks; split it", u32::MAX))
            })?;
            first.push(total);
        }
        let order = BlockOrder::new(first, seed, num_lanes);
        let num_blocks = order.num_blocks();
        if num_blocks < num_lanes {
            let dir = corpus.dir().display();
            return Err(Error::Input(format!(
                "lanes = {num_lanes}: must be at most {num_blocks}, the number of blocks of {BLOCK_TOKENS} tokens in {dir}"
            )));
        }
        Ok(Self { corpus, seed, order })
    }

    /// A lane's passes over its part up to a position: finished epochs and a fraction of the next one.
    pub fn passes(&self, lane: u32, position: &CorpusPosition) -> f64 {
        let CorpusPosition { at, window_rows, .. } = position;
        let (total, size) = (self.order.lane_blocks(lane), self.order.window_blocks());
        let before = u64::from(at.window) * size;
        let blocks = size.min(total.saturating_sub(before));
        let current = blocks as f64 * at.row as f64 / (*window_rows).max(1) as f64;
        f64::from(at.epoch) + (before as f64 + current) / total as f64
    }

    pub fn len(&self) -> u32 {
        self.order.num_blocks()
    }

    pub fn num_windows(&self, lane: u32) -> u32 {
        self.order.num_windows(lane)
    }

    /// Windows per lane that are fetched at the same time from an object store.
    pub fn windows_per_fetch(&self, lanes: u32) -> u64 {
        (FETCHED_BLOCKS / (self.order.window_blocks() * u64::from(lanes)).max(1)).max(1)
    }

    /// The shard of a block, and the block's range of that shard's tokens.
    ///
    /// With several lanes, blocks begin at the starts of checksummed blocks, so that no two blocks share one.
    fn locate(&self, block: u32) -> (usize, Range<u32>) {
        let (shard, blocks) = self.order.shard_of(block);
        let tokens = self.corpus.shard_size(shard).1;
        let (index, count) = (u64::from(block - blocks.start), u64::from(blocks.end - blocks.start));
        let edge = |index: u64| match self.order.num_lanes {
            1 => (tokens * index / count) as u32,
            _ => self.corpus.aligned(tokens, index, count),
        };
        (shard, edge(index)..edge(index + 1))
    }

    pub fn pin_tables(&self, block: u32, lines: bool) -> Result<Option<Pins>> {
        self.corpus.prefetch_tables(self.locate(block).0, lines)
    }

    pub fn rows(&self, packer: &mut Packer, counter: RngCounter) -> Result<Rows> {
        let (shard, range) = self.locate(counter.block);
        packer.pack(&self.corpus.shard(shard), range, counter)
    }

    pub fn count_window(&self, packer: &mut Packer, lane: u32, at: RowPosition) -> Result<u64> {
        let RowPosition { epoch, window, .. } = at;
        let counters = self.order.window(epoch, lane, window).into_iter();
        counters.map(|block| Ok(self.rows(packer, RngCounter { epoch, block })?.len() as u64)).sum()
    }

    pub fn fetch(
        &self,
        packer: &Packer,
        windows: &[(u32, RowPosition)],
        cancel: &Cancel,
    ) -> Result<Option<Vec<Pins>>> {
        let blocks = windows.iter().flat_map(|(lane, at)| self.order.window(at.epoch, *lane, at.window));
        let parts: Vec<_> = blocks.map(|block| self.locate(block)).collect();
        self.corpus.prefetch(&parts, packer.margins(), packer.reads_lines(), cancel)
    }

    /// Packs and orders the rows of a window. `pins` keep its blocks in the cache of a corpus in a store.
    pub fn plan(
        &self,
        packer: &mut Packer,
        lane: u32,
        at: RowPosition,
        pins: Option<Arc<Vec<Pins>>>,
    ) -> Result<ShuffleWindow> {
        let RowPosition { epoch, window, .. } = at;
        self.corpus.close_idle();
        let mut blocks = Vec::new();
        let mut ends = Vec::new();
        let mut total = 0;
        for block in self.order.window(epoch, lane, window) {
            let shard = self.corpus.shard(self.locate(block).0);
            shard.expect_unchanged()?;
            let rows = self.rows(packer, RngCounter { epoch, block })?;
            total += rows.len() as u64;
            ends.push(total);
            blocks.push(PackedBlock { block, shard, rows });
        }
        let order = Permutation::new(total, self.seed, Purpose::RowOrder, [epoch, window, lane]);
        Ok(ShuffleWindow { seed: self.seed, epoch, blocks, ends, order, _pins: pins })
    }

    /// Upper bound on the bytes of one fetch for `lanes` lanes in the cache of a corpus in an object store.
    pub fn fetch_bytes(&self, lanes: u32, lines: bool) -> u64 {
        let sizes = (0..self.corpus.num_shards()).map(|shard| {
            let tokens = self.corpus.shard_size(shard).1;
            self.corpus.prefetch_bytes(shard, tokens.div_ceil(blocks_in(tokens)), lines)
        });
        let largest = sizes.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))).unwrap_or((0, 0));
        let fetched = self.windows_per_fetch(lanes) * self.order.window_blocks() * u64::from(lanes);
        let num_blocks = u64::from(self.len()).min(fetched);
        let tables = num_blocks.min(self.corpus.num_shards() as u64);
        largest.0.saturating_mul(num_blocks).saturating_add(largest.1.saturating_mul(tables))
    }
}

fn blocks_in(tokens: u64) -> u64 {
    ((tokens + BLOCK_TOKENS / 2) / BLOCK_TOKENS).max(1)
}

#[derive(Debug)]
struct PackedBlock {
    block: u32,
    shard: Arc<Shard>,
    rows: Rows,
}

#[derive(Debug)]
pub(super) struct ShuffleWindow {
    seed: u64,
    epoch: u32,
    blocks: Vec<PackedBlock>,
    /// Cumulative numbers of rows of the blocks.
    ends: Vec<u64>,
    order: Permutation,
    /// Keeps the blocks in the cache of a corpus in an object store.
    _pins: Option<Arc<Vec<Pins>>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    pub shard: &'a Shard,
    pub spans: &'a [Span],
    pub seed: u64,
    pub counter: [u32; 3],
}

impl Row<'_> {
    #[inline]
    pub fn prefetch(&self) {
        for span in self.spans {
            self.shard.prefetch_tokens(u64::from(span.start), span.len.into());
        }
    }
}

impl ShuffleWindow {
    pub fn len(&self) -> u64 {
        self.order.len
    }

    #[inline]
    pub fn row(&self, index: u64) -> Row<'_> {
        let at = self.order.at(index);
        let number = self.ends.partition_point(|&end| end <= at);
        let first = if number == 0 { 0 } else { self.ends[number - 1] };
        let row = (at - first) as usize;
        let block = &self.blocks[number];
        Row {
            shard: &block.shard,
            spans: block.rows.row(row),
            seed: self.seed,
            counter: RngCounter { epoch: self.epoch, block: block.block }.words(row as u32),
        }
    }
}
