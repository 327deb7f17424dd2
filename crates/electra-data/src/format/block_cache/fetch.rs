//! Fetching absent blocks of a cache from the store, shared with the other readers of the node.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::BlockCache;
use super::locks::PATIENCE;
use crate::error::{Error, Result};
use crate::format::checksum::{block_hash, hash_hex};
use crate::format::header::{BLOCK_BYTES, read_u64};
use crate::store::{Cancel, Request};

/// The most that one request asks for.
const REQUEST_BLOCKS: u64 = 128;
/// How often a damaged block is fetched before it becomes an error.
const ATTEMPTS: usize = 3;
/// How often a reader checks whether another one has fetched a block.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

impl BlockCache {
    /// Makes all blocks of these ranges present. Readers of the same node that need the same blocks share the work.
    pub fn fetch(&self, ranges: &[Range<u64>], cancel: &Cancel) -> Result<()> {
        let ranges = self.with_tables(ranges);
        let (mut num_absent, mut since) = (u64::MAX, Instant::now());
        loop {
            let mut absent = self.absent_runs(&ranges);
            if absent.is_empty() {
                return Ok(());
            }
            let now_absent = absent.iter().map(|run| run.end - run.start).sum();
            if now_absent != num_absent {
                (num_absent, since) = (now_absent, Instant::now());
            }
            // A suspended process makes no progress: after a while another one takes its turn.
            let turn = since.elapsed().as_secs() / PATIENCE.as_secs();
            absent.retain(|run| self.can_be_verified(run));
            let (mut ours, mut bytes) = (Vec::new(), 0);
            for run in absent {
                if self.state.try_lock_fetch(&run, turn)? {
                    bytes += (run.end - run.start) * BLOCK_BYTES as u64;
                    ours.push(run);
                }
            }
            // Another reader may have fetched some before they were locked.
            let todo = self.absent_runs(&ours);
            let outcome = self.make_room(bytes).and_then(|()| self.fetch_runs(&todo, cancel));
            ours.iter().try_for_each(|run| self.state.unlock_fetch(run, turn))?;
            outcome?;
            if cancel.is_raised() {
                return Err(Error::Interrupted);
            }
            if ours.is_empty() {
                cancel.wait(POLL_INTERVAL);
            }
        }
    }

    /// These ranges and the tables of their files, without which nothing can be verified.
    fn with_tables(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let table = |range: &Range<u64>| {
            let table = self.geometry_at(range.start).table_block();
            table..table + 1
        };
        let ranges = ranges.iter().filter(|range| !range.is_empty());
        ranges.flat_map(|range| [range.clone(), table(range)]).collect()
    }

    /// Whether the table of checksums for these blocks is present or among them.
    fn can_be_verified(&self, run: &Range<u64>) -> bool {
        let table = self.geometry_at(run.start).table_block();
        run.contains(&table) || self.state.is_present(table)
    }

    /// The parts of the ranges that are absent: runs of consecutive blocks of one file, at most 8 MiB each.
    fn absent_runs(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut sorted = ranges.to_vec();
        sorted.sort_by_key(|range| range.start);
        let mut next = 0;
        for range in sorted {
            for block in range.start.max(next)..range.end {
                if self.state.is_present(block) {
                    continue;
                }
                match runs.last_mut() {
                    Some(run)
                        if run.end == block
                            && block - run.start < REQUEST_BLOCKS
                            && self.file_of(run.start) == self.file_of(block) =>
                    {
                        run.end += 1;
                    }
                    _ => runs.push(block..block + 1),
                }
            }
            next = next.max(range.end);
        }
        runs
    }

    fn fetch_runs(&self, runs: &[Range<u64>], cancel: &Cancel) -> Result<()> {
        let mut left = runs.to_vec();
        for attempt in 1..=ATTEMPTS {
            let request = |run: &Range<u64>| {
                let file = self.file_of(run.start);
                let (name, range) = (self.files.entry(file).file.clone(), self.geometry(file).bytes_of(run));
                Request { name, range, version: None }
            };
            let requests: Vec<Request> = left.iter().map(request).collect();
            let mut bad = Vec::new();
            self.store.read_ranges(&requests, cancel, |number, bytes| {
                let run = &left[number];
                match self.accept(run, bytes) {
                    Err(Error::Damaged { .. }) if attempt < ATTEMPTS => bad.push(run.clone()),
                    outcome => outcome?,
                }
                Ok(())
            })?;
            left = bad;
        }
        Ok(())
    }

    /// Verifies a run of blocks, writes them and marks them as present. If the table that verifies them has been lost,
    /// they stay absent, and the table is fetched first.
    pub(super) fn accept(&self, run: &Range<u64>, bytes: &[u8]) -> Result<()> {
        let number = self.file_of(run.start);
        let (geometry, hash) = (self.geometry(number), self.hash(number));
        let (file, begin) = self.local_file(number)?;
        let path = self.path(number);
        let start = geometry.bytes_of(run).start;
        let mut table = vec![0; 8 * geometry.num_blocks as usize + 8];
        if run.contains(&geometry.table_block()) {
            table.copy_from_slice(&bytes[(geometry.table - start) as usize..]);
            if hash_hex(&table[..table.len() - 8]) != hash {
                return Err(self.damaged(number, "the table of checksums is not that of the manifest".into()));
            }
        } else {
            if !self.can_be_verified(run) {
                return Ok(()); // another run of this reader fetches it
            }
            file.read_exact_at(&mut table, begin + geometry.table)
                .map_err(|error| Error::io(&path, error))?;
            if hash_hex(&table[..table.len() - 8]) != hash {
                self.clear(&self.state.hold()?, geometry.table_block()); // a machine crash lost it
                return Ok(());
            }
        }
        for block in run.clone().filter(|&block| block != geometry.table_block()) {
            let local = (block - geometry.first) as usize;
            let range = geometry.bytes_of(&(block..block + 1));
            if block_hash(&bytes[(range.start - start) as usize..(range.end - start) as usize])
                != read_u64(&table[8 * local..])
            {
                let count = geometry.num_blocks;
                return Err(
                    self.damaged(number, format!("block {local} of {count} is damaged in the store too"))
                );
            }
        }
        file.write_all_at(bytes, begin + start).map_err(|error| self.cannot_write(&path, error))?;
        for block in run.clone() {
            let range = geometry.bytes_of(&(block..block + 1));
            self.state.set_present(block, range.end - range.start);
        }
        Ok(())
    }
}
