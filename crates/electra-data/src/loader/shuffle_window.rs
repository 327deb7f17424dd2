//! The order of rows: an epoch is a sequence of shuffle windows, and rows are shuffled within a window.
//!
//! A shard is divided into blocks of about 262,144 tokens. An epoch visits all blocks in a pseudorandom
//! order; 64 consecutive blocks of it form a window, and the rows of a window are ordered pseudorandomly. So
//! rows are shuffled over sixteen million tokens and blocks over the whole corpus, and a position in the
//! stream is three integers: epoch, window, row.

use std::ops::Range;
use std::sync::Arc;

use super::pack::{Packer, RngCounter, Rows, Span};
use super::permutation::Permutation;
use super::position::CorpusPosition;
use crate::error::{Error, Result};
use crate::format::{Corpus, Pins, Shard};
use crate::philox::Purpose;
use crate::store::Cancel;

const BLOCK_TOKENS: u64 = 262_144;
const BLOCKS_PER_WINDOW: u64 = 64;

/// A corpus divided into blocks, with the seed of their order.
#[derive(Debug)]
pub(super) struct Blocks {
    corpus: Arc<Corpus>,
    seed: u64,
    /// The first block of each shard, and the total at the end.
    first: Vec<u32>,
}

impl Blocks {
    /// Divides a corpus, without reading its tokens.
    pub fn new(corpus: Arc<Corpus>, seed: u64) -> Result<Self> {
        let mut first = vec![0_u32];
        for shard in 0..corpus.num_shards() {
            let blocks = ((corpus.shard_size(shard).1 + BLOCK_TOKENS / 2) / BLOCK_TOKENS).max(1);
            let total = u64::from(first[first.len() - 1]) + blocks;
            let total = u32::try_from(total).map_err(|_| {
                Error::Input(format!("the corpus has more than {} blocks; divide it", u32::MAX))
            })?;
            first.push(total);
        }
        Ok(Self { corpus, seed, first })
    }

    /// The corpus.
    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    /// The seed of everything random in this corpus's stream.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// How often the corpus has been read at a position: finished epochs and a fraction of the next.
    pub fn passes(&self, position: &CorpusPosition) -> f64 {
        let CorpusPosition { at, window_rows, .. } = position;
        let (total, before) = (u64::from(self.len()), u64::from(at.window) * BLOCKS_PER_WINDOW);
        let blocks = BLOCKS_PER_WINDOW.min(total.saturating_sub(before));
        let current = blocks as f64 * at.row as f64 / (*window_rows).max(1) as f64;
        f64::from(at.epoch) + (before as f64 + current) / total.max(1) as f64
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.first[self.first.len() - 1]
    }

    /// Windows per epoch.
    pub fn num_windows(&self) -> u32 {
        u64::from(self.len()).div_ceil(BLOCKS_PER_WINDOW) as u32
    }

    /// The shard of a block, and the block's range of that shard's tokens.
    fn locate(&self, block: u32) -> (usize, Range<u32>) {
        let shard = self.first.partition_point(|&first| first <= block) - 1;
        let tokens = self.corpus.shard_size(shard).1;
        let blocks = u64::from(self.first[shard + 1] - self.first[shard]);
        let index = u64::from(block - self.first[shard]);
        let edge = |index: u64| (tokens * index / blocks) as u32;
        (shard, edge(index)..edge(index + 1))
    }

    /// The blocks of a window, in order.
    fn blocks_of(&self, epoch: u32, window: u32) -> impl Iterator<Item = u32> {
        let total = u64::from(self.len());
        let order = Permutation::new(total, self.seed, Purpose::BlockOrder, [epoch, 0, 0]);
        let start = u64::from(window) * BLOCKS_PER_WINDOW;
        (start..total.min(start + BLOCKS_PER_WINDOW)).map(move |index| order.at(index) as u32)
    }

    /// Keeps the tables of a block's shard in the cache of a corpus in an object store.
    pub fn pin_tables(&self, block: u32, lines: bool) -> Result<Option<Pins>> {
        self.corpus.prefetch_tables(self.locate(block).0, lines)
    }

    /// The number of rows of one block.
    pub fn count_rows(&self, packer: &mut Packer, counter: RngCounter) -> Result<u64> {
        let (shard, range) = self.locate(counter.block);
        Ok(packer.count(&self.corpus.shard(shard), range, counter)? as u64)
    }

    /// The rows of one block.
    pub fn rows(&self, packer: &mut Packer, counter: RngCounter) -> Result<Rows> {
        let (shard, range) = self.locate(counter.block);
        packer.pack(&self.corpus.shard(shard), range, counter)
    }

    /// The number of rows of one window.
    pub fn count_window(&self, packer: &mut Packer, epoch: u32, window: u32) -> Result<u64> {
        let counters = self.blocks_of(epoch, window).map(|block| RngCounter { epoch, block });
        counters.map(|counter| self.count_rows(packer, counter)).sum()
    }

    /// Packs the blocks of one window and orders their rows. Fetches them first, if they are in an object store.
    pub fn plan(
        &self,
        packer: &mut Packer,
        epoch: u32,
        window: u32,
        cancel: &Cancel,
    ) -> Result<ShuffleWindow> {
        self.corpus.close_idle();
        let parts: Vec<_> = self.blocks_of(epoch, window).map(|block| self.locate(block)).collect();
        let pins = self.corpus.prefetch(&parts, packer.reads_lines(), cancel)?;
        let mut blocks = Vec::new();
        let mut ends = Vec::new();
        let mut total = 0;
        for block in self.blocks_of(epoch, window) {
            let shard = self.corpus.shard(self.locate(block).0);
            shard.expect_unchanged()?;
            let rows = self.rows(packer, RngCounter { epoch, block })?;
            total += rows.len() as u64;
            ends.push(total);
            blocks.push(PackedBlock { block, shard, rows });
        }
        let order = Permutation::new(total, self.seed, Purpose::RowOrder, [epoch, window, 0]);
        Ok(ShuffleWindow { seed: self.seed, epoch, blocks, ends, order, _pins: pins })
    }

    /// An upper bound on what a window takes in the cache of a corpus in an object store.
    pub fn window_bytes(&self, lines: bool) -> u64 {
        let sizes = (0..self.corpus.num_shards()).map(|shard| {
            let blocks = u64::from(self.first[shard + 1] - self.first[shard]);
            let tokens = self.corpus.shard_size(shard).1.div_ceil(blocks);
            self.corpus.prefetch_bytes(shard, tokens, lines)
        });
        let largest = sizes.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))).unwrap_or((0, 0));
        let num_blocks = u64::from(self.len()).min(BLOCKS_PER_WINDOW);
        let tables = num_blocks.min(self.corpus.num_shards() as u64);
        largest.0.saturating_mul(num_blocks).saturating_add(largest.1.saturating_mul(tables))
    }
}

#[derive(Debug)]
struct PackedBlock {
    block: u32,
    shard: Arc<Shard>,
    rows: Rows,
}

/// The rows of one window, in order.
#[derive(Debug)]
pub(super) struct ShuffleWindow {
    seed: u64,
    epoch: u32,
    blocks: Vec<PackedBlock>,
    /// For each block, the number of rows in it and those before it.
    ends: Vec<u64>,
    order: Permutation,
    /// Keeps the blocks in the cache of a corpus in an object store.
    _pins: Option<Vec<Pins>>,
}

/// One row: where its tokens are, and the counter of its random numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    /// The shard that holds the tokens.
    pub shard: &'a Shard,
    /// The spans of the shard that it consists of, in order.
    pub spans: &'a [Span],
    /// The seed of its corpus.
    pub seed: u64,
    /// Epoch, block and row within the block.
    pub counter: [u32; 3],
}

impl Row<'_> {
    /// Prefetches the row's tokens, which will be copied soon.
    #[inline]
    pub fn prefetch(&self) {
        for span in self.spans {
            self.shard.prefetch_tokens(u64::from(span.start), span.len.into());
        }
    }
}

impl ShuffleWindow {
    /// Number of rows.
    pub fn len(&self) -> u64 {
        self.order.len()
    }

    /// The row at `index` in the window's order.
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
