//! The runs of a corpus file that this process has mapped.
//!
//! A file is divided into runs of eight blocks; the last run is its tail, the document and checksum tables. The
//! tail stays mapped as long as the file is in use. Any other run is mapped while it is pinned, and has a bit for each
//! block that has been verified.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use memmap2::Mmap;

use crate::format::header::{BLOCK_BYTES, Layout, block_hash, hash_hex, read_u64};

/// Bytes of a run: a multiple of every page size.
pub(super) const RUN_BYTES: usize = 8 * BLOCK_BYTES;

#[derive(Debug)]
pub(in crate::format) struct CachedFile {
    pub number: usize,
    pub url: PathBuf,
    pub layout: Layout,
    hash: String,
    tail: OnceLock<Mmap>,
    runs: Box<[RwLock<Slot>]>,
}

#[derive(Debug, Default)]
struct Slot {
    map: Option<Mmap>,
    sound: u8,
    pins: usize,
}

/// Keeps a run mapped. The map also protects its bytes: the system keeps the bytes of a removed file.
#[derive(Debug)]
pub(super) struct Pin {
    pub file: Arc<CachedFile>,
    pub run: usize,
}

impl CachedFile {
    pub fn new(number: usize, url: PathBuf, layout: Layout, hash: String) -> Self {
        let num_runs = tail_start(&layout).div_ceil(RUN_BYTES);
        let runs = (0..num_runs).map(|_| RwLock::default()).collect();
        Self { number, url, layout, hash, tail: OnceLock::new(), runs }
    }

    #[cfg(test)]
    pub fn mapped_bytes(&self) -> usize {
        let slots = self.runs.iter().filter_map(|slot| slot.read().ok()?.map.as_ref().map(|map| map.len()));
        slots.sum::<usize>() + self.tail.get().map_or(0, |map| map.len())
    }

    pub fn tail_run(&self) -> usize {
        self.runs.len()
    }

    pub fn tail_range(&self) -> Range<usize> {
        tail_start(&self.layout)..self.layout.file_length
    }

    /// The mapped bytes of a range of the tail, which must have been fetched.
    pub fn tail(&self, range: Range<usize>) -> &[u8] {
        let start = self.tail_range().start;
        self.tail.get().map_or(&[], |map| &map[range.start - start..range.end - start])
    }

    pub fn run_range(&self, run: usize) -> Range<usize> {
        let start = run * RUN_BYTES;
        if run == self.tail_run() {
            self.tail_range()
        } else {
            start..self.tail_range().start.min(start + RUN_BYTES)
        }
    }

    pub fn block_range(&self, run: usize, blocks: Range<u32>) -> Range<usize> {
        let range = self.run_range(run);
        if run == self.tail_run() {
            return range;
        }
        let at = |block: u32| range.end.min(range.start + block as usize * BLOCK_BYTES);
        at(blocks.start)..at(blocks.end)
    }

    /// Divides a range of bytes into runs, without the tail: pairs of a run and the part of the range in it.
    pub fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let end = range.end.min(self.tail_range().start);
        let start = range.start.min(end);
        let runs = if start < end { start / RUN_BYTES..end.div_ceil(RUN_BYTES) } else { 0..0 };
        runs.map(move |run| {
            let whole = run * RUN_BYTES..(run + 1) * RUN_BYTES;
            (run, start.max(whole.start)..end.min(whole.end))
        })
    }

    /// Calls `read` with these bytes of a run if they are mapped and verified; `None` if not.
    #[inline]
    pub fn read<T>(&self, run: usize, range: &Range<usize>, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let slot = self.runs[run].read().unwrap_or_else(PoisonError::into_inner);
        let (wanted, start) = (blocks_of(range), run * RUN_BYTES);
        let map = slot.map.as_ref().filter(|_| slot.sound & wanted == wanted)?;
        Some(read(&map[range.start - start..range.end - start]))
    }

    fn damage(&self, run: usize, block: u32, bytes: &[u8]) -> Option<String> {
        let Layout { table, num_blocks, file_length, .. } = self.layout;
        let is_tail = run == self.tail_run();
        let start = self.run_range(run).start;
        let table = if is_tail { &bytes[table - start..] } else { self.tail(table..file_length) };
        let (table, hash) = table.split_at(table.len() - 8);
        if is_tail && (hash_hex(table) != self.hash || block_hash(table) != read_u64(hash)) {
            return Some("the checksum table does not match the manifest".into());
        }
        let first = start / BLOCK_BYTES + block as usize;
        let (past, end) =
            if is_tail { (num_blocks, self.layout.table) } else { (first + 1, self.tail_range().start) };
        let is_damaged = |&number: &usize| {
            let range = number * BLOCK_BYTES - start..end.min((number + 1) * BLOCK_BYTES) - start;
            block_hash(&bytes[range]) != read_u64(&table[8 * number..])
        };
        let damaged = (first..past).find(is_damaged)?;
        Some(format!("block {damaged} of {num_blocks} is damaged in the store"))
    }
}

impl Pin {
    pub fn new(file: &Arc<CachedFile>, run: usize) -> Self {
        let pin = Self { file: file.clone(), run };
        if let Some(mut slot) = pin.slot() {
            slot.pins += 1;
        }
        pin
    }

    fn slot(&self) -> Option<RwLockWriteGuard<'_, Slot>> {
        self.file.runs.get(self.run).map(|slot| slot.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The blocks of `wanted` that are not mapped or fail verification.
    pub fn absent(&self, wanted: u8) -> u8 {
        let Some(mut slot) = self.slot() else { return u8::from(self.file.tail.get().is_none()) };
        let Slot { map: Some(map), sound, .. } = &mut *slot else { return wanted };
        *sound |= self.verified(map, wanted & !*sound).0;
        wanted & !*sound
    }

    /// Replaces the map if the new one has all blocks of the current one; also verifies the blocks of `wanted`. Returns
    /// the damage of one of the blocks that the new map lacks.
    pub fn adopt(&self, map: Mmap, wanted: u8) -> Option<String> {
        let Some(mut slot) = self.slot() else {
            let (_, damage) = self.verified(&map, 1);
            if damage.is_none() {
                let _ = self.file.tail.set(map); // another thread may have been faster
            }
            return damage;
        };
        let (sound, damage) = self.verified(&map, wanted | slot.sound);
        if sound & slot.sound == slot.sound {
            (slot.map, slot.sound) = (Some(map), sound);
        }
        damage
    }

    fn verified(&self, map: &Mmap, wanted: u8) -> (u8, Option<String>) {
        let (mut sound, mut damage) = (0, None);
        for block in (0..8).filter(|block| wanted >> block & 1 == 1) {
            match self.file.damage(self.run, block, map) {
                None => sound |= 1 << block,
                damaged => damage = damage.or(damaged),
            }
        }
        (sound, damage)
    }

    /// Calls `visit` with the offset in the file and the bytes of every verified block of the map.
    pub fn for_each_block<E>(&self, mut visit: impl FnMut(usize, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let Some(slot) = self.slot() else { return Ok(()) };
        let (Some(map), start) = (&slot.map, self.file.run_range(self.run).start) else { return Ok(()) };
        for block in (0..8).filter(|block| slot.sound >> block & 1 == 1) {
            let range = self.file.block_range(self.run, block..block + 1);
            visit(range.start - start, &map[range.start - start..range.end - start])?;
        }
        Ok(())
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot() else { return };
        slot.pins -= 1;
        if slot.pins == 0 {
            *slot = Slot::default();
        }
    }
}

fn tail_start(layout: &Layout) -> usize {
    layout.index / BLOCK_BYTES * BLOCK_BYTES
}

/// A bit for each block that a range of a run's bytes touches.
pub(super) fn blocks_of(range: &Range<usize>) -> u8 {
    let first = range.start % RUN_BYTES / BLOCK_BYTES;
    let count = range.end.div_ceil(BLOCK_BYTES) - range.start / BLOCK_BYTES;
    (((1_u16 << count) - 1) << first) as u8
}
