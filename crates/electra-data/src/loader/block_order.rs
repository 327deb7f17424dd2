//! The blocks of a lane and their order.
//!
//! The rows of a batch are divided into lanes. Each lane has separate windows, so ranks with different lanes
//! fetch different blocks. With one lane, an epoch visits all blocks of the corpus in a pseudorandom order. With
//! several lanes, the shards of an epoch have a pseudorandom order, their blocks form a ring, and each lane gets an
//! equal arc of it, beginning at a pseudorandom block. A lane reads its arc stretch by stretch and the blocks of a
//! stretch in a pseudorandom order. So a lane needs the tables of only a few shards at a time, and shares few of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::permutation::Permutation;
use crate::philox::{Purpose, Stream};
use crate::threads::lock;

const BLOCKS_PER_WINDOW: u32 = 64;
const STRETCH_BLOCKS: u64 = 2_048;
/// Number of rings in memory: lanes may be in different epochs.
const MAX_RINGS: usize = 3;

#[derive(Debug)]
pub(super) struct BlockOrder {
    /// The first block of each shard, and the total at the end.
    first: Vec<u32>,
    seed: u64,
    pub num_lanes: u32,
    rings: Mutex<VecDeque<Arc<Ring>>>,
}

#[derive(Debug)]
struct Ring {
    epoch: u32,
    shards: Vec<u32>,
    /// Cumulative numbers of blocks of `shards`.
    ends: Vec<u32>,
    start: u32,
}

impl BlockOrder {
    pub fn new(first: Vec<u32>, seed: u64, num_lanes: u32) -> Self {
        Self { first, seed, num_lanes, rings: Mutex::default() }
    }

    pub fn num_blocks(&self) -> u32 {
        self.first[self.first.len() - 1]
    }

    pub fn shard_of(&self, block: u32) -> (usize, Range<u32>) {
        let shard = self.first.partition_point(|&first| first <= block) - 1;
        (shard, self.first[shard]..self.first[shard + 1])
    }

    pub fn window_blocks(&self) -> u64 {
        BLOCKS_PER_WINDOW.div_ceil(self.num_lanes).into()
    }

    /// The number of blocks that a lane reads per epoch: the same for all lanes, or one less.
    pub fn lane_blocks(&self, lane: u32) -> u64 {
        let arc = self.arc(lane);
        arc.end - arc.start
    }

    pub fn num_windows(&self, lane: u32) -> u32 {
        self.lane_blocks(lane).div_ceil(self.window_blocks()) as u32
    }

    pub fn window(&self, epoch: u32, lane: u32, window: u32) -> Vec<u32> {
        let total = self.lane_blocks(lane);
        let start = u64::from(window) * self.window_blocks();
        let indices = start..total.min(start + self.window_blocks());
        if self.num_lanes == 1 {
            let order = self.permutation(total, Purpose::BlockOrder, [epoch, 0, 0]);
            return indices.map(|index| order.at(index) as u32).collect();
        }
        let (ring, arc) = (self.ring(epoch), self.arc(lane));
        let length = total.div_ceil(total.div_ceil(STRETCH_BLOCKS));
        let block = |index: u64| {
            let stretch = index / length;
            let begin = stretch * length;
            let counter = [epoch, lane, stretch as u32];
            let order = self.permutation(length.min(total - begin), Purpose::BlockOrder, counter);
            self.on_ring(&ring, arc.start + begin + order.at(index - begin))
        };
        indices.map(block).collect()
    }

    fn arc(&self, lane: u32) -> Range<u64> {
        let edge = |lane: u32| u64::from(self.num_blocks()) * u64::from(lane) / u64::from(self.num_lanes);
        edge(lane)..edge(lane + 1)
    }

    fn on_ring(&self, ring: &Ring, place: u64) -> u32 {
        let place = ((u64::from(ring.start) + place) % u64::from(self.num_blocks())) as u32;
        let number = ring.ends.partition_point(|&end| end <= place);
        let before = if number == 0 { 0 } else { ring.ends[number - 1] };
        self.first[ring.shards[number] as usize] + place - before
    }

    fn permutation(&self, len: u64, purpose: Purpose, counter: [u32; 3]) -> Permutation {
        Permutation::new(len, self.seed, purpose, counter)
    }

    fn ring(&self, epoch: u32) -> Arc<Ring> {
        let mut rings = lock(&self.rings);
        if let Some(known) = rings.iter().find(|ring| ring.epoch == epoch) {
            return known.clone();
        }
        let ring = Arc::new(self.new_ring(epoch));
        rings.push_back(ring.clone());
        if rings.len() > MAX_RINGS {
            rings.pop_front();
        }
        ring
    }

    fn new_ring(&self, epoch: u32) -> Ring {
        let num_shards = self.first.len() - 1;
        let order = self.permutation(num_shards as u64, Purpose::ShardOrder, [epoch, 0, 0]);
        let shards: Vec<u32> = (0..num_shards as u64).map(|index| order.at(index) as u32).collect();
        let mut end = 0;
        let ends = shards.iter().map(|&shard| {
            end += self.first[shard as usize + 1] - self.first[shard as usize];
            end
        });
        let ends = ends.collect();
        let start = Stream::new(self.seed, Purpose::ShardOrder, [epoch, 1, 0]).below(self.num_blocks());
        Ring { epoch, shards, ends, start }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(blocks: &[u32], seed: u64, num_lanes: u32) -> BlockOrder {
        let mut first = vec![0];
        blocks.iter().for_each(|count| first.push(first[first.len() - 1] + count));
        BlockOrder::new(first, seed, num_lanes)
    }

    fn lane(order: &BlockOrder, epoch: u32, lane: u32) -> Vec<u32> {
        (0..order.num_windows(lane)).flat_map(|window| order.window(epoch, lane, window)).collect()
    }

    proptest! {
        #[test]
        fn each_block_is_in_one_lane_per_epoch(
            blocks in prop::collection::vec(1_u32..700, 1..20), seed: u64, epoch: u32, num_lanes in 1_u32..100,
        ) {
            let order = order(&blocks, seed, num_lanes.min(blocks.iter().sum()));
            let lanes: Vec<_> = (0..order.num_lanes).map(|number| lane(&order, epoch, number)).collect();
            let (shortest, longest) = (lanes.iter().map(Vec::len).min(), lanes.iter().map(Vec::len).max());
            prop_assert!(longest.unwrap() - shortest.unwrap() <= 1);
            let mut all = lanes.concat();
            all.sort_unstable();
            prop_assert!(all.into_iter().eq(0..order.num_blocks()));
        }
    }

    #[test]
    fn lanes_get_different_blocks_in_each_epoch() {
        for blocks in [&[512][..], &[8; 64]] {
            let order = order(blocks, 3, 8);
            let mut times = vec![0; 512];
            for epoch in 0..400 {
                lane(&order, epoch, 5).into_iter().for_each(|block| times[block as usize] += 1);
            }
            // 50 expected, with a standard deviation of 6.6.
            assert!(times.iter().all(|&times| (20..80).contains(&times)), "{times:?}");
        }
    }

    #[test]
    fn lane_needs_tables_of_few_shards_at_a_time() {
        let order = order(&[512; 400], 3, 10);
        for number in 0..10 {
            let shards = |blocks: &[u32]| {
                let mut shards: Vec<_> = blocks.iter().map(|&block| order.shard_of(block).0).collect();
                shards.sort_unstable();
                shards.dedup();
                shards.len()
            };
            let blocks = lane(&order, 1, number);
            assert!(shards(&blocks) <= 42, "40 shards, and parts of two others");
            let stretches: Vec<_> = blocks.chunks(2_048).map(shards).collect();
            assert_eq!(stretches.len(), 10);
            assert!(stretches.iter().all(|&count| count <= 5), "{stretches:?}");
        }
    }
}
