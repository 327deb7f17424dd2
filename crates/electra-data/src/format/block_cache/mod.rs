//! A local cache of a corpus in an object store: one file per run of eight blocks, filled block by block.
//!
//! A block is the unit of a checksum (64 KiB). A reader pins the blocks that it is about to use (`BlockCache::pin`):
//! it maps their runs, verifies them and fetches absent blocks. The system protects mapped bytes:
//! it keeps the bytes of a removed or replaced file. So a full cache simply removes the least recently used files
//! (`folder`). Nothing on disk is trusted: a lost or damaged block counts as absent.

mod file;
mod folder;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use memmap2::{Mmap, MmapOptions};

pub(super) use self::file::CachedFile;
use self::file::{Pin, RUN_BYTES, blocks_of};
use self::folder::{Claim, Folder};
use super::damage::damaged;
use super::header::Layout;
use super::manifest::{FileEntry, Manifest};
use crate::error::{Error, Result};
use crate::store::{Cancel, Request, Store};
use crate::threads::lock;

/// Bytes read without a pin that stay mapped; a private cache keeps nothing else.
const KEPT_BYTES: usize = if cfg!(test) { 4 << 20 } else { 1 << 30 };
/// Largest request, except for a tail.
const REQUEST_BYTES: usize = 8 << 20;
/// Runs claimed at the same time; each has an open file.
const MAX_CLAIMS: usize = 64;
/// Attempts to fetch a damaged block before it becomes an error.
const ATTEMPTS: usize = 3;
/// Interval at which a reader checks whether another reader has fetched a block.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Interval at which a fetching reader shows that it is active.
const TOUCH_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// The folder of all caches, on a local disk; each corpus has a folder in it.
    pub dir: PathBuf,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct BlockCache {
    store: Store,
    manifest: Arc<Manifest>,
    /// Shared by the readers of this node. A private cache has unnamed files instead, which last while they are mapped.
    folder: Option<Folder>,
    files: Mutex<HashMap<usize, Weak<CachedFile>>>,
    recent: Mutex<VecDeque<Pin>>,
}

#[derive(Debug, Default)]
pub(crate) struct Pins(Vec<Pin>);

struct Want {
    pin: Pin,
    blocks: u8,
}

/// Consecutive blocks of a run to fetch.
struct Part<'a> {
    want: &'a Want,
    blocks: u8,
    range: Range<usize>,
    claim: Rc<Claim>,
}

impl BlockCache {
    pub fn open(store: Store, manifest: &Arc<Manifest>, options: Option<&CacheOptions>) -> Result<Self> {
        let folder = options.map(|options| Folder::open(options, &manifest.checksum)).transpose()?;
        let (files, recent) = (Mutex::default(), Mutex::default());
        Ok(Self { store, manifest: manifest.clone(), folder, files, recent })
    }

    pub fn dir(&self) -> Option<&Path> {
        self.folder.as_ref().map(|folder| &*folder.dir)
    }

    pub fn limit(&self) -> Option<u64> {
        self.folder.as_ref().map(|folder| folder.limit)
    }

    #[cfg(test)]
    pub fn mapped_bytes(&self) -> usize {
        lock(&self.files).values().filter_map(Weak::upgrade).map(|file| file.mapped_bytes()).sum()
    }

    /// A file of the corpus: number 2 s is the `.tokens` of shard s, 2 s + 1 its `.lines`.
    pub fn file(&self, number: usize) -> Arc<CachedFile> {
        let mut files = lock(&self.files);
        files.get(&number).and_then(Weak::upgrade).unwrap_or_else(|| {
            let hash = self.entry(number).hash.clone();
            let file = Arc::new(CachedFile::new(number, self.url(number), self.layout(number), hash));
            files.insert(number, Arc::downgrade(&file));
            file
        })
    }

    pub fn folder_url(&self) -> &str {
        self.store.url()
    }

    pub fn url(&self, number: usize) -> PathBuf {
        Path::new(self.folder_url()).join(&self.entry(number).file)
    }

    fn entry(&self, number: usize) -> &FileEntry {
        let shard = &self.manifest.shards[number / 2];
        if number.is_multiple_of(2) { &shard.tokens } else { &shard.lines }
    }

    pub fn layout(&self, number: usize) -> Layout {
        let documents = self.manifest.shards[number / 2].num_documents;
        let index_width = if number.is_multiple_of(2) { 4 } else { 8 };
        let layout = Layout::from_length(self.entry(number).bytes, index_width * documents);
        layout.expect("checked when the manifest was read")
    }

    /// Maps ranges of bytes, and the tails of their files, until the result is dropped. Fetches absent blocks.
    pub fn pin(&self, ranges: &[(Arc<CachedFile>, Range<usize>)], cancel: &Cancel) -> Result<Pins> {
        let (mut tails, mut runs) = (BTreeMap::new(), BTreeMap::new());
        for (file, range) in ranges {
            let want = |run| move || Want { pin: Pin::new(file, run), blocks: 0 };
            tails.entry(file.number).or_insert_with(want(file.tail_run())).blocks = 1;
            for (run, part) in file.parts(range.clone()) {
                runs.entry((file.number, run)).or_insert_with(want(run)).blocks |= blocks_of(&part);
            }
        }
        let (tails, runs) = (tails.into_values().collect::<Vec<_>>(), runs.into_values().collect::<Vec<_>>());
        self.fetch(&tails, cancel)?; // nothing can be verified without them
        self.fetch(&runs, cancel)?;
        Ok(Pins(tails.into_iter().chain(runs).map(|want| want.pin).collect()))
    }

    /// Calls `read` with the bytes of a range, in pieces. Bytes that are not mapped are fetched and stay mapped for a while.
    #[inline]
    pub fn read(
        &self,
        file: &Arc<CachedFile>,
        range: Range<usize>,
        mut read: impl FnMut(&[u8]),
    ) -> Result<()> {
        let mut pins = None;
        for (run, part) in file.parts(range.clone()) {
            while file.read(run, &part, &mut read).is_none() {
                pins = Some(self.pin(&[(file.clone(), part.start..range.end)], &Cancel::default())?);
            }
        }
        pins.into_iter().for_each(|pins| self.keep(pins));
        let tail = file.tail_range().start;
        if range.end > tail {
            read(file.tail(range.start.max(tail)..range.end));
        }
        Ok(())
    }

    fn keep(&self, pins: Pins) {
        let mut recent = lock(&self.recent);
        recent.extend(pins.0);
        let size = |pin: &Pin| RUN_BYTES + pin.file.tail_range().len();
        let mut total: usize = recent.iter().map(size).sum();
        while total > KEPT_BYTES
            && let Some(pin) = recent.pop_front()
        {
            total -= size(&pin);
        }
    }

    /// Maps all wanted blocks. Readers of the same node that want the same blocks share the work.
    fn fetch(&self, wants: &[Want], cancel: &Cancel) -> Result<()> {
        let start = Instant::now();
        let mut absent: Vec<&Want> = wants.iter().collect();
        loop {
            absent.retain(|want| self.absent(want) != 0);
            if absent.is_empty() {
                return Ok(());
            }
            if cancel.is_raised() {
                return Err(Error::Interrupted);
            }
            let claims =
                absent.iter().filter_map(|want| Some((*want, self.claim(&want.pin, start.elapsed())?)));
            // Another reader may have fetched some blocks before the claim.
            let parts = claims.take(MAX_CLAIMS).flat_map(|(want, claim)| self.parts(want, &Rc::new(claim)));
            let parts: Vec<_> = parts.collect();
            if parts.is_empty() {
                std::thread::sleep(POLL_INTERVAL);
            }
            self.fetch_parts(parts, cancel)?;
        }
    }

    fn claim(&self, pin: &Pin, waited: Duration) -> Option<Claim> {
        self.folder.as_ref().map_or(Some(Claim::private()), |folder| folder.claim(&name_of(pin), waited))
    }

    fn absent(&self, want: &Want) -> u8 {
        let absent = want.pin.absent(want.blocks);
        if absent != 0
            && let Some(file) = self.folder.as_ref().and_then(|folder| folder.find(&name_of(&want.pin)))
            && let Ok(map) = map(&want.pin, &file)
        {
            want.pin.adopt(map, want.blocks);
            return want.pin.absent(want.blocks);
        }
        absent
    }

    fn parts<'a>(&self, want: &'a Want, claim: &Rc<Claim>) -> Vec<Part<'a>> {
        let absent = self.absent(want);
        let is_absent = |block: u32| absent >> block & 1 == 1;
        let starts = (0..8).filter(|&block| is_absent(block) && (block == 0 || !is_absent(block - 1)));
        let part = |start: u32| {
            let end = (start..8).find(|&block| !is_absent(block)).unwrap_or(8);
            let blocks = (1_u16 << end) - (1 << start);
            let range = want.pin.file.block_range(want.pin.run, start..end);
            Part { want, blocks: blocks as u8, range, claim: claim.clone() }
        };
        starts.map(part).collect()
    }

    fn fetch_parts(&self, mut parts: Vec<Part<'_>>, cancel: &Cancel) -> Result<()> {
        if let Some(folder) = &self.folder {
            folder.make_room(parts.iter().map(|part| part.range.len() as u64).sum());
        }
        let mut touched = Instant::now();
        for attempt in 1..=ATTEMPTS {
            let mut groups: Vec<_> = merged(parts).into_iter().map(Some).collect();
            let requests: Vec<Request> = groups.iter().flatten().map(|group| self.request(group)).collect();
            let mut bad = Vec::new();
            self.store.read_ranges(&requests, cancel, |number, bytes| {
                let mut left = bytes;
                for part in groups[number].take().into_iter().flatten() {
                    let bytes = left.split_off(..part.range.len()).unwrap_or_default();
                    match self.accept(&part, bytes) {
                        Err(Error::Damaged { .. }) if attempt < ATTEMPTS => bad.push(part),
                        outcome => outcome?,
                    }
                }
                if touched.elapsed() > TOUCH_INTERVAL {
                    groups.iter().flatten().flatten().for_each(|part| part.claim.touch());
                    touched = Instant::now();
                }
                Ok(())
            })?;
            parts = bad;
        }
        Ok(())
    }

    fn request(&self, parts: &[Part<'_>]) -> Request {
        let (first, last) = (&parts[0], &parts[parts.len() - 1]);
        let name = self.entry(first.want.pin.file.number).file.clone();
        Request { name, range: first.range.start as u64..last.range.end as u64, version: None }
    }

    /// Writes a run with the fetched blocks, verifies and maps it, and shares it.
    fn accept(&self, part: &Part<'_>, bytes: &[u8]) -> Result<()> {
        let failed = |error| self.cannot_write(error);
        let Some(folder) = &self.folder else {
            return self.fill(part, bytes, &tempfile::tempfile().map_err(failed)?);
        };
        let file = folder.temporary().map_err(failed)?;
        self.fill(part, bytes, file.as_file())?;
        folder.publish(file, &name_of(&part.want.pin)).map_err(failed)
    }

    fn fill(&self, part: &Part<'_>, bytes: &[u8], file: &File) -> Result<()> {
        let pin = &part.want.pin;
        let run = pin.file.run_range(pin.run);
        let write = |at: usize, bytes: &[u8]| file.write_all_at(bytes, at as u64);
        let written = file
            .set_len(run.len() as u64)
            .and_then(|()| pin.for_each_block(write))
            .and_then(|()| write(part.range.start - run.start, bytes))
            .and_then(|()| map(pin, file));
        match pin.adopt(written.map_err(|error| self.cannot_write(error))?, part.blocks) {
            None => Ok(()),
            Some(reason) => Err(damaged(&pin.file.url, reason)),
        }
    }

    fn cannot_write(&self, error: std::io::Error) -> Error {
        match &self.folder {
            Some(folder) => folder.cannot_write(error),
            None => {
                let advice = format!("{error}: set TMPDIR to a writable folder with more free space");
                Error::io(std::env::temp_dir(), std::io::Error::new(error.kind(), advice))
            }
        }
    }
}

fn name_of(pin: &Pin) -> String {
    format!("{}.{}", pin.file.number, pin.run)
}

/// Maps the file of a run; an error if it is too short, for example after a crash of the machine.
fn map(pin: &Pin, file: &File) -> std::io::Result<Mmap> {
    let length = pin.file.run_range(pin.run).len();
    if file.metadata()?.len() != length as u64 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    // SAFETY: this program never changes a run's file after writing it, and reads only blocks that it has
    // verified. Other programs could change it, as with any map.
    unsafe { MmapOptions::new().len(length).map(file) }
}

/// Groups adjacent parts of a file, one group per request.
fn merged(parts: Vec<Part<'_>>) -> Vec<Vec<Part<'_>>> {
    let mut groups: Vec<Vec<Part<'_>>> = Vec::new();
    for part in parts {
        let number = part.want.pin.file.number;
        match groups.last_mut() {
            Some(group)
                if group.last().is_some_and(|last| last.range.end == part.range.start)
                    && group[0].want.pin.file.number == number
                    && part.range.end - group[0].range.start <= REQUEST_BYTES =>
            {
                group.push(part);
            }
            _ => groups.push(vec![part]),
        }
    }
    groups
}

#[cfg(test)]
mod tests;
