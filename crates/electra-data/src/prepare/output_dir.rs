//! The output folder while a corpus is being made: whose it is, what is finished, who is at work.
//!
//! `parts/job.json` says which job the folder belongs to, `parts/unit-N.json` that unit N is done.
//! Both go when the manifest is there.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use xxhash_rust::xxh3::xxh3_128;

use crate::error::{Error, Result};
use crate::format::{
    HOLDOUT, MANIFEST, Manifest, PARTS, ShardEntry, create_folder, hex128, is_temp, remove_temps, sum,
    write_error, write_whole,
};
use crate::input::SkippedRecord;

/// The tag of a run that does every unit.
pub(super) const ALL: &str = "all";

const JOB: &str = "job.json";
const LOCK: &str = ".lock-";

/// What is on disk of a finished unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UnitRecord {
    pub job: String,
    pub unit: usize,
    pub documents: u64,
    pub empty_documents: u64,
    pub shards: Vec<ShardEntry>,
    pub holdout: Vec<ShardEntry>,
    /// Records of its files that could not be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedRecord>,
    /// xxh3-128 of this file with the empty string here, hexadecimal; [`UnitRecord::sealed`] sets it.
    pub checksum: String,
}

impl UnitRecord {
    /// The record's one spelling, its checksum included.
    pub fn sealed(&self) -> serde_json::Result<Vec<u8>> {
        let unsealed = Self { checksum: String::new(), ..self.clone() };
        let checksum = hex128(xxh3_128(&serde_json::to_vec_pretty(&unsealed)?));
        serde_json::to_vec_pretty(&Self { checksum, ..unsealed })
    }

    /// A record as it was written, to the byte; of any other, nothing.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(bytes).ok()?;
        let shards = || record.shards.iter().chain(&record.holdout);
        let possible = shards().all(|shard| shard.is_possible(2) || shard.is_possible(4))
            && sum(shards().map(|shard| shard.num_documents)) == record.documents;
        (possible && record.sealed().ok()? == bytes).then_some(record)
    }
}

#[derive(Serialize, Deserialize)]
struct JobRecord {
    job: String,
}

/// Exclusive use of an output folder by one run.
#[derive(Debug)]
pub(super) struct Folder {
    pub dir: PathBuf,
    pub job: String,
    pub tag: String,
    _lock: File,
}

/// What the output folder turned out to be.
pub(super) enum Claim {
    /// It holds a finished corpus (of whichever job).
    Finished(Box<Manifest>),
    /// It is this run's to fill.
    Ours(Folder),
}

impl Folder {
    /// Looks at the folder and takes it, or says why not. Nothing foreign is ever touched.
    pub fn claim(dir: &Path, job: &str, tag: &str) -> Result<Claim> {
        if dir.exists() && !dir.is_dir() {
            let dir = dir.display();
            return Err(Error::Input(format!("{dir}: not a folder; choose another --out")));
        }
        if dir.join(MANIFEST).exists() {
            return Ok(Claim::Finished(Box::new(Manifest::read(dir)?)));
        }
        refuse_foreign(dir)?;
        create_folder(dir)?;
        let lock = lock(dir, tag)?;
        if dir.join(MANIFEST).exists() {
            return Ok(Claim::Finished(Box::new(Manifest::read(dir)?)));
        }
        let folder = Self { dir: dir.to_owned(), job: job.to_owned(), tag: tag.to_owned(), _lock: lock };
        folder.mark_as_ours()?;
        let tag = (tag != ALL).then_some(tag);
        for place in [dir.to_owned(), folder.parts(), folder.holdout()] {
            remove_temps(&place, tag)?;
        }
        Ok(Claim::Ours(folder))
    }

    /// The folder of records.
    pub fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// The folder of held-out shards.
    pub fn holdout(&self) -> PathBuf {
        self.dir.join(HOLDOUT)
    }

    /// The record of a unit whose shards are all there, if it is finished.
    pub fn record(&self, unit: usize) -> Option<UnitRecord> {
        let bytes = std::fs::read(self.parts().join(record_name(unit))).ok()?;
        let record = UnitRecord::parse(&bytes)?;
        let whole = |dir: &Path, shards: &[ShardEntry]| {
            shards
                .iter()
                .flat_map(|shard| [&shard.tokens, &shard.lines])
                .all(|entry| dir.join(&entry.file).metadata().is_ok_and(|found| found.len() == entry.bytes))
        };
        let matches = record.job == self.job && record.unit == unit;
        (matches && whole(&self.dir, &record.shards) && whole(&self.holdout(), &record.holdout))
            .then_some(record)
    }

    /// Declares a unit finished; its shards are durable already.
    pub fn save_record(&self, record: &UnitRecord) -> Result<()> {
        let bytes = record.sealed().map_err(|e| Error::io(self.parts(), e.into()))?;
        write_whole(&self.parts(), &record_name(record.unit), &self.tag, &bytes)
    }

    /// Declares a unit unfinished.
    pub fn remove_record(&self, unit: usize) -> Result<()> {
        remove_if_there(&self.parts().join(record_name(unit)))
    }

    /// Waits until no other run is finishing this corpus.
    pub fn finishing_lock(&self) -> Result<File> {
        let path = self.dir.join(format!("{LOCK}finish"));
        let file = File::create(&path).map_err(|e| write_error(&path, e))?;
        file.lock().map_err(|e| Error::io(&path, e))?;
        Ok(file)
    }

    /// Removes what only unfinished work needs; the manifest is there.
    pub fn clear_up(&self) -> Result<()> {
        clear_up(&self.dir)
    }

    /// Another job's folder may be had only if nothing in it is finished and nobody is at work.
    fn take_over(&self) -> Result<()> {
        if has_records(&self.parts())? {
            let dir = self.dir.display();
            return Err(Error::Input(format!(
                "{dir}: holds unfinished work of other inputs or options; finish that, remove the folder, \
                 or choose another --out"
            )));
        }
        try_other_locks(&self.dir, &self.tag, |_| true)
    }

    fn mark_as_ours(&self) -> Result<()> {
        let path = self.parts().join(JOB);
        if let Ok(bytes) = std::fs::read(&path) {
            let job = serde_json::from_slice::<JobRecord>(&bytes).map(|record| record.job);
            if job.is_ok_and(|job| job == self.job) {
                return Ok(());
            }
            self.take_over()?;
        }
        create_folder(&self.parts())?;
        let record = JobRecord { job: self.job.clone() };
        let bytes = serde_json::to_vec(&record).map_err(|e| Error::io(&path, e.into()))?;
        write_whole(&self.parts(), JOB, &self.tag, &bytes)
    }
}

/// Whether any unit's record is there.
fn has_records(parts: &Path) -> Result<bool> {
    Ok(names_in(parts)?.iter().any(|name| name.starts_with("unit-")))
}

/// The names of everything in a folder.
fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(dir, e);
    std::fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(|e| name_of(&e)).map_err(failed)).collect()
}

/// Removes records and locks of a finished corpus; harmless if there are none.
pub(super) fn clear_up(dir: &Path) -> Result<()> {
    let parts = dir.join(PARTS);
    if parts.exists() {
        std::fs::remove_dir_all(&parts).map_err(|e| Error::io(&parts, e))?;
    }
    for name in names_in(dir)?.iter().filter(|name| name.starts_with(LOCK)) {
        remove_if_there(&dir.join(name))?;
    }
    Ok(())
}

/// Removes a file that may be gone already.
pub(super) fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

fn record_name(unit: usize) -> String {
    format!("unit-{unit:06}.json")
}

/// Without our mark, a folder may only hold what a run leaves before it has set the mark.
fn refuse_foreign(dir: &Path) -> Result<()> {
    if dir.join(PARTS).join(JOB).exists() || !dir.exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let unmarked_parts = || {
            name == PARTS
                && std::fs::read_dir(entry.path())
                    .is_ok_and(|mut files| files.all(|file| file.is_ok_and(|f| is_temp(&name_of(&f)))))
        };
        if !is_temp(&name) && !name.starts_with(LOCK) && !unmarked_parts() {
            let dir = dir.display();
            return Err(Error::Input(format!(
                "{dir}: already holds something else ({name}); choose an empty or new folder for --out"
            )));
        }
    }
    Ok(())
}

fn name_of(entry: &std::fs::DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}

/// Takes the lock of this run and makes sure that no run that overlaps with it is at work.
fn lock(dir: &Path, tag: &str) -> Result<File> {
    let own = try_lock(&dir.join(format!("{LOCK}{tag}")))?;
    try_other_locks(dir, tag, |other| tag == ALL || other == ALL)?;
    Ok(own)
}

/// Fails if another run, of those that matter, holds its lock.
fn try_other_locks(dir: &Path, tag: &str, matters: impl Fn(&str) -> bool) -> Result<()> {
    for name in names_in(dir)? {
        let Some(other) = name.strip_prefix(LOCK) else { continue };
        if other != tag && other != "finish" && matters(other) {
            try_lock(&dir.join(&name))?;
        }
    }
    Ok(())
}

fn try_lock(path: &Path) -> Result<File> {
    let file = File::options().create(true).append(true).open(path).map_err(|e| write_error(path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let dir = path.parent().unwrap_or(path).display();
            Err(Error::Input(format!(
                "{dir}: another prepare is at work in this folder; wait for it or choose another --out"
            )))
        }
        Err(TryLockError::Error(error)) => Err(Error::io(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::testing::write_corpus;

    #[test]
    fn a_record_is_taken_to_the_byte_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]], vec![vec![7], vec![8, 9, 10]]], 2);
        let manifest = Manifest::read(dir.path()).unwrap();
        let record = |documents| UnitRecord {
            job: "j".into(),
            unit: 3,
            documents,
            empty_documents: u64::MAX,
            skipped: Vec::new(),
            shards: manifest.shards.clone(),
            holdout: Vec::new(),
            checksum: String::new(),
        };
        let sound = record(2).sealed().unwrap();
        assert_eq!(UnitRecord::parse(&sound).unwrap().shards, manifest.shards);
        assert!(UnitRecord::parse(&record(3).sealed().unwrap()).is_none());
        assert!((0..sound.len()).all(|length| UnitRecord::parse(&sound[..length]).is_none()));
        for bit in 0..sound.len() * 8 {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(UnitRecord::parse(&flipped).is_none(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_record(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(UnitRecord::parse(&bytes).is_none());
        }
    }
}
