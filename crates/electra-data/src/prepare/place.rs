//! Where a corpus is written: a folder, or a folder in an object store. Names are relative to it: `parts/job.json`.

use std::collections::HashMap;
use std::io::ErrorKind::NotFound;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::format::{MANIFEST, Manifest, write_atomically};
use crate::regular_file;
use crate::store::{Cancel, Request, Store, url_of};

/// The name of the fingerprint among the records.
pub(super) const FINGERPRINT: &str = "job.json";
/// The beginning of the names of leases.
pub(super) const LEASE: &str = ".lock-";
/// The largest file of a corpus, besides its shards, that is read.
const MAX_BYTES: u64 = 1 << 30;

/// A folder, or a folder in an object store.
#[derive(Debug)]
pub(super) enum Place {
    Folder(PathBuf),
    Store(Store),
}

/// The lengths of files: looked up in a folder, listed before in a store.
pub(super) enum Sizes<'a> {
    Folder(&'a Path),
    Store(HashMap<String, u64>),
}

impl Sizes<'_> {
    /// The length of a file; `None` if it does not exist.
    pub fn of(&self, name: &str) -> Option<u64> {
        match self {
            Self::Folder(dir) => dir.join(name).metadata().ok().map(|found| found.len()),
            Self::Store(sizes) => sizes.get(name).copied(),
        }
    }
}

impl Place {
    /// The place of a path or URL, to read from.
    pub fn open(out: &Path) -> Result<Self> {
        url_of(out).map_or(Ok(Self::Folder(out.to_owned())), |url| Store::open(&url).map(Self::Store))
    }

    /// The lengths of all its files.
    pub fn sizes(&self) -> Result<Sizes<'_>> {
        Ok(match self {
            Self::Folder(dir) => Sizes::Folder(dir),
            Self::Store(store) => {
                let objects = store.list("")?.into_iter();
                Sizes::Store(objects.map(|object| (object.name, object.size)).collect())
            }
        })
    }

    /// The bytes of a file; `None` if it does not exist.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let found = match self {
            Self::Folder(dir) => {
                regular_file::read(&dir.join(name)).map_err(|e| Error::io(dir.join(name), e))
            }
            Self::Store(store) => store.read(name, MAX_BYTES),
        };
        match found {
            Err(Error::NotFound { .. }) => Ok(None),
            Err(Error::Io { source, .. }) if source.kind() == NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    /// The bytes of many small files; `None` for those that do not exist or cannot be read.
    pub fn read_all(&self, names: &[String], sizes: &Sizes) -> Result<Vec<Option<Vec<u8>>>> {
        let Self::Store(store) = self else {
            return Ok(names.iter().map(|name| self.read(name).unwrap_or(None)).collect());
        };
        let mut found: Vec<_> = names.iter().map(|_| None).collect();
        let (numbers, requests): (Vec<_>, Vec<_>) = names
            .iter()
            .enumerate()
            .filter_map(|(number, name)| {
                let range = 0..sizes.of(name).filter(|&size| size > 0)?;
                Some((number, Request { name: name.clone(), range, version: None }))
            })
            .unzip();
        store.read_ranges(&requests, &Cancel::default(), |request, bytes| {
            found[numbers[request]] = Some(bytes.to_vec());
            Ok(())
        })?;
        Ok(found)
    }

    /// Writes a small file; `tag` identifies the run.
    pub fn write(&self, name: &str, tag: &str, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Folder(dir) => {
                let (folder, name) = name.rsplit_once('/').unwrap_or((".", name));
                let dir = if folder == "." { dir.clone() } else { dir.join(folder) };
                write_atomically(&dir, name, tag, bytes)
            }
            Self::Store(store) => store.put(name, bytes.to_vec()),
        }
    }

    /// Removes a file if it exists.
    pub fn remove(&self, name: &str) -> Result<()> {
        match self {
            Self::Folder(dir) => remove_if_exists(&dir.join(name)),
            Self::Store(store) => store.delete(&[name.to_owned()]),
        }
    }

    /// The manifest of the corpus, if it is finished.
    pub fn manifest(&self) -> Result<Option<Manifest>> {
        match self {
            Self::Folder(dir) if !dir.join(MANIFEST).exists() => Ok(None),
            Self::Folder(dir) => Manifest::read(dir).map(Some),
            Self::Store(store) => match Manifest::fetch(store) {
                Err(Error::NotFound { .. }) => Ok(None),
                found => found.map(Some),
            },
        }
    }
}

/// Reads the manifest of a finished corpus.
pub(super) fn manifest_of(out: &Path) -> Result<Manifest> {
    match url_of(out) {
        Some(url) => Manifest::fetch(&Store::open(&url)?),
        None => Manifest::read(out),
    }
}

/// Removes a file if it exists.
pub(super) fn remove_if_exists(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}
