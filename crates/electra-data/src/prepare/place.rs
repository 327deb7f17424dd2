//! The place of a corpus: a folder, or a folder in an object store. Names are relative to it: `parts/job.json`.

use std::collections::HashMap;
use std::io::ErrorKind::NotFound;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::progress::Step;
use crate::error::{Error, Result};
use crate::format::{MANIFEST, Manifest, PARTS, VALIDATION, write_atomically};
use crate::regular_file;
use crate::store::{Cancel, Request, Store, url_of};

pub(super) const FINGERPRINT: &str = "job.json";
pub(super) const RECORD: &str = "input-group-";
const MAX_BYTES: u64 = 1 << 30;
/// Maximum bytes, and ranges, that are read at once.
const BATCH_BYTES: u64 = 32 << 20;
const BATCH_RANGES: usize = 1 << 10;
const PARALLEL: usize = 16;

#[derive(Debug)]
pub(super) enum Place {
    Folder(PathBuf),
    Store(Store),
}

pub(super) type Sizes = HashMap<String, u64>;

impl Place {
    pub fn open(out: &Path) -> Result<Self> {
        url_of(out).map_or(Ok(Self::Folder(out.to_owned())), |url| Store::open(&url).map(Self::Store))
    }

    pub fn sizes(&self) -> Result<Sizes> {
        match self {
            Self::Folder(_) => self.sizes_of(&self.names()?),
            Self::Store(store) => {
                Ok(store.list("")?.into_iter().map(|object| (object.name, object.size)).collect())
            }
        }
    }

    /// The lengths of a few files, without listing the folder.
    pub fn sizes_of(&self, names: &[String]) -> Result<Sizes> {
        let size = |name: &String| match self {
            Self::Folder(dir) => {
                Ok(dir.join(name).metadata().ok().map(|metadata| (name.clone(), metadata.len())))
            }
            Self::Store(store) => match store.head(name) {
                Err(Error::NotFound { .. }) => Ok(None),
                object => object.map(|object| Some((name.clone(), object.size))),
            },
        };
        Ok(in_parallel(names, size)?.into_iter().flatten().collect())
    }

    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let bytes = match self {
            Self::Folder(dir) => {
                regular_file::read(&dir.join(name)).map_err(|e| Error::io(dir.join(name), e))
            }
            Self::Store(store) => store.read(name, MAX_BYTES),
        };
        match bytes {
            Err(Error::NotFound { .. }) => Ok(None),
            Err(Error::Io { source, .. }) if source.kind() == NotFound => Ok(None),
            bytes => bytes.map(Some),
        }
    }

    pub fn read_all(&self, names: &[String], sizes: &Sizes) -> Result<Vec<Vec<u8>>> {
        if let Self::Folder(_) = self {
            return Ok(names.iter().map(|name| self.read(name).ok().flatten().unwrap_or_default()).collect());
        }
        let whole = |name: &String| {
            let range = 0..sizes.get(name).copied().unwrap_or(0);
            Request { name: name.clone(), range, version: None }
        };
        self.read_ranges(&names.iter().map(whole).collect::<Vec<_>>())
    }

    /// The bytes of ranges of many files, in order; in a store they are read in parallel.
    fn read_ranges(&self, ranges: &[Request]) -> Result<Vec<Vec<u8>>> {
        let mut contents = vec![Vec::new(); ranges.len()];
        match self {
            Self::Folder(dir) => {
                for (Request { name, range, .. }, bytes) in ranges.iter().zip(&mut contents) {
                    let (path, length) = (dir.join(name), range.end - range.start);
                    bytes.resize(length as usize, 0);
                    let read = regular_file::open(&path).and_then(|f| f.read_exact_at(bytes, range.start));
                    read.map_err(|error| Error::io(path, error))?;
                }
            }
            Self::Store(store) => {
                // A store has no empty ranges.
                let filled = ranges.iter().enumerate().filter(|(_, request)| !request.range.is_empty());
                let (numbers, requests): (Vec<_>, Vec<_>) = filled.map(|(n, one)| (n, one.clone())).unzip();
                store.read_ranges(&requests, &Cancel::default(), |request, bytes| {
                    contents[numbers[request]] = bytes.to_vec();
                    Ok(())
                })?;
            }
        }
        Ok(contents)
    }

    /// Calls `receive` with the number of a batch's first range and the bytes, in order. Holds about 32 MB.
    pub fn read_batches(
        &self,
        step: &Step,
        ranges: &[Request],
        mut receive: impl FnMut(usize, Vec<Vec<u8>>) -> Result<()>,
    ) -> Result<()> {
        for batch in batches(ranges) {
            let bytes = self.read_ranges(&ranges[batch.clone()])?;
            let read = bytes.iter().map(|bytes| bytes.len() as u64).sum();
            receive(batch.start, bytes)?;
            step.advance(read)?;
        }
        Ok(())
    }

    pub fn write_all(&self, tag: &str, files: &[(String, Vec<u8>)]) -> Result<()> {
        in_parallel(files, |(name, bytes)| self.write(name, tag, bytes)).map(drop)
    }

    pub fn names(&self) -> Result<Vec<String>> {
        match self {
            Self::Folder(dir) => {
                let mut all = Vec::new();
                for folder in [String::new(), format!("{PARTS}/"), format!("{VALIDATION}/")] {
                    let names =
                        names_in(&dir.join(&folder))?.into_iter().map(|file| format!("{folder}{file}"));
                    all.extend(names.filter(|name| !dir.join(name).is_dir()));
                }
                Ok(all)
            }
            Self::Store(store) => Ok(store.list("")?.into_iter().map(|object| object.name).collect()),
        }
    }

    pub fn below(&self, folder: &str) -> Result<Self> {
        match self {
            Self::Folder(dir) => Ok(Self::Folder(dir.join(folder))),
            Self::Store(store) => store.at(&format!("{}/{folder}", store.url())).map(Self::Store),
        }
    }

    /// Writes a small file; `tag` identifies the run.
    pub fn write(&self, name: &str, tag: &str, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Folder(dir) => {
                let (folder, name) = name.rsplit_once('/').unwrap_or(("", name));
                write_atomically(&dir.join(folder), name, tag, bytes)
            }
            Self::Store(store) => store.put(name, bytes.to_vec()),
        }
    }

    pub fn remove(&self, name: &str) -> Result<()> {
        self.remove_all(&[name.to_owned()])
    }

    /// Removes the files that exist. Tries all of them, even after a failure.
    pub fn remove_all(&self, names: &[String]) -> Result<()> {
        match self {
            Self::Folder(dir) => {
                let removed: Vec<_> = names.iter().map(|name| remove_if_exists(&dir.join(name))).collect();
                removed.into_iter().collect()
            }
            Self::Store(_) if names.is_empty() => Ok(()),
            Self::Store(store) => store.delete(names),
        }
    }

    pub fn manifest(&self) -> Result<Option<Manifest>> {
        match self {
            Self::Folder(dir) if !dir.join(MANIFEST).exists() => Ok(None),
            Self::Folder(dir) => Manifest::read(dir).map(Some),
            Self::Store(store) => match Manifest::fetch(store) {
                Err(Error::NotFound { .. }) => Ok(None),
                manifest => manifest.map(Some),
            },
        }
    }
}

/// Applies `work` to all items, on several threads because it waits for a disk or store.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let cancel = Cancel::default();
    let work_on = |share: &[T]| cancel.carry(|| share.iter().map(&work).collect::<Result<Vec<R>>>());
    std::thread::scope(|scope| {
        let shares = items.chunks(items.len().div_ceil(PARALLEL).max(1));
        let threads: Vec<_> = shares.map(|share| scope.spawn(|| work_on(share))).collect();
        let outcomes = threads.into_iter().map(|thread| thread.join());
        let done = outcomes.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        Ok(done.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    })
}

fn batches(ranges: &[Request]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    std::iter::from_fn(move || {
        let (start, mut bytes) = (end, 0);
        while end < ranges.len() && end < start + BATCH_RANGES && (end == start || bytes < BATCH_BYTES) {
            bytes += ranges[end].range.end - ranges[end].range.start;
            end += 1;
        }
        (start < end).then_some(start..end)
    })
}

pub(super) fn manifest_of(out: &Path) -> Result<Manifest> {
    url_of(out).map_or_else(|| Manifest::read(out), |url| Manifest::fetch(&Store::open(&url)?))
}

pub(super) fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(dir, e);
    let entries = match std::fs::read_dir(dir) {
        Err(error) if error.kind() == NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())).collect()
}

pub(super) fn remove_if_exists(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}
