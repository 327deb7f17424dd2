//! The stream of rows: epochs of groups of blocks, each group's rows shuffled as a whole.
//!
//! A shard is divided into blocks of about 262,144 tokens. An epoch goes through all blocks in a
//! keyed order, 64 of them at a time: those are a group, and the rows of a group come in a keyed
//! order of their own. So rows are shuffled over sixteen million tokens, groups over the corpus,
//! and a position in the stream is three integers.

use std::ops::Range;
use std::sync::Arc;

use super::pack::{Packer, Piece, Place, Rows};
use super::permutation::Permutation;
use crate::error::{Error, Result};
use crate::format::{Corpus, Shard};
use crate::philox::Purpose;

const BLOCK_TOKENS: u64 = 262_144;
const BLOCKS_PER_GROUP: u64 = 64;

/// A corpus seen as a list of blocks.
#[derive(Debug)]
pub(super) struct Blocks {
    corpus: Arc<Corpus>,
    /// Per shard: the first of its blocks; at the end the number of all.
    first: Vec<u32>,
}

impl Blocks {
    /// The blocks of a corpus, which reads nothing of its tokens.
    pub fn new(corpus: Arc<Corpus>) -> Result<Self> {
        let mut first = vec![0_u32];
        for shard in corpus.shards() {
            let blocks = ((shard.num_tokens() + BLOCK_TOKENS / 2) / BLOCK_TOKENS).max(1);
            let total = u64::from(first[first.len() - 1]) + blocks;
            let total = u32::try_from(total).map_err(|_| {
                Error::Input(format!("the corpus has more than {} blocks; divide it", u32::MAX))
            })?;
            first.push(total);
        }
        Ok(Self { corpus, first })
    }

    /// The corpus that is divided.
    pub fn corpus(&self) -> &Arc<Corpus> {
        &self.corpus
    }

    /// Number of blocks.
    pub fn len(&self) -> u32 {
        self.first[self.first.len() - 1]
    }

    /// Number of groups in an epoch.
    pub fn num_groups(&self) -> u32 {
        u64::from(self.len()).div_ceil(BLOCKS_PER_GROUP) as u32
    }

    /// The shard of a block and its range of that shard's tokens.
    fn locate(&self, block: u32) -> (usize, Range<u32>) {
        let shard = self.first.partition_point(|&first| first <= block) - 1;
        let tokens = self.corpus.shards()[shard].num_tokens();
        let blocks = u64::from(self.first[shard + 1] - self.first[shard]);
        let index = u64::from(block - self.first[shard]);
        let edge = |index: u64| (tokens * index / blocks) as u32;
        (shard, edge(index)..edge(index + 1))
    }

    /// The blocks of a group in the order of its epoch.
    fn of_group(&self, seed: u64, epoch: u32, group: u32) -> impl Iterator<Item = u32> {
        let total = u64::from(self.len());
        let order = Permutation::new(total, seed, Purpose::BlockOrder, [epoch, 0, 0]);
        let start = u64::from(group) * BLOCKS_PER_GROUP;
        (start..total.min(start + BLOCKS_PER_GROUP)).map(move |place| order.at(place) as u32)
    }

    /// Rows of one block.
    pub fn count_rows(&self, packer: &mut Packer, place: Place) -> Result<u64> {
        let (shard, range) = self.locate(place.block);
        Ok(packer.count(&self.corpus.shards()[shard], range, place)? as u64)
    }

    /// The rows of one block.
    pub fn rows(&self, packer: &mut Packer, place: Place) -> Result<Rows> {
        let (shard, range) = self.locate(place.block);
        packer.pack(&self.corpus.shards()[shard], range, place)
    }

    /// Rows of one group.
    pub fn count_group(&self, packer: &mut Packer, seed: u64, epoch: u32, group: u32) -> Result<u64> {
        let places = self.of_group(seed, epoch, group).map(|block| Place { seed, epoch, block });
        places.map(|place| self.count_rows(packer, place)).sum()
    }

    /// Packs and orders the rows of one group.
    pub fn plan(&self, packer: &mut Packer, seed: u64, epoch: u32, group: u32) -> Result<Group> {
        let mut blocks = Vec::new();
        let mut ends = Vec::new();
        let mut total = 0;
        for block in self.of_group(seed, epoch, group) {
            let rows = self.rows(packer, Place { seed, epoch, block })?;
            total += rows.len() as u64;
            ends.push(total);
            blocks.push(PackedBlock { block, shard: self.locate(block).0, rows });
        }
        let order = Permutation::new(total, seed, Purpose::RowOrder, [epoch, group, 0]);
        Ok(Group { corpus: self.corpus.clone(), epoch, blocks, ends, order })
    }
}

#[derive(Debug)]
struct PackedBlock {
    block: u32,
    shard: usize,
    rows: Rows,
}

/// The rows of one group in their order.
#[derive(Debug)]
pub(super) struct Group {
    corpus: Arc<Corpus>,
    epoch: u32,
    blocks: Vec<PackedBlock>,
    /// Per block: rows up to and with it.
    ends: Vec<u64>,
    order: Permutation,
}

/// One row: where its tokens are and what its randomness hangs on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    /// The shard that holds the tokens.
    pub shard: &'a Shard,
    /// What it is put together from, in order.
    pub pieces: &'a [Piece],
    /// Epoch, block and row within the block: the place of its mask.
    pub place: [u32; 3],
}

impl Row<'_> {
    /// Begins to fetch the row's tokens, which will be copied soon.
    #[inline]
    pub fn prefetch(&self) {
        for piece in self.pieces {
            self.shard.prefetch_tokens(u64::from(piece.start), piece.len.into());
        }
    }
}

impl Group {
    /// Number of rows.
    pub fn len(&self) -> u64 {
        self.order.len()
    }

    /// The `index`-th row of the group's order.
    #[inline]
    pub fn row(&self, index: u64) -> Row<'_> {
        let at = self.order.at(index);
        let number = self.ends.partition_point(|&end| end <= at);
        let first = if number == 0 { 0 } else { self.ends[number - 1] };
        let row = (at - first) as usize;
        let block = &self.blocks[number];
        Row {
            shard: &self.corpus.shards()[block.shard],
            pieces: block.rows.row(row),
            place: [self.epoch, block.block, row as u32],
        }
    }
}
