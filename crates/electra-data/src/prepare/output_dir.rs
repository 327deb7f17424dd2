//! The output folder of an unfinished corpus: which run it belongs to, what is finished, and who is working in it.
//!
//! `parts/job.json` stores the fingerprint of inputs and options, `parts/input-group-N.json` records that input
//! group N is finished, `parts/input-group-N.counts` what was counted of its text. Where duplicates are left out,
//! `input-group-N.hashes` stores its hashes, with a record of its own, and `.drops` what they decide. `.lock-TAG` is the lease of a run. All are removed once the manifest exists.
//!
//! Several processes may build the same input group at once: they write the same bytes under temporary names
//! of their own, and each renames its complete file to the same final name.

use std::collections::HashSet;
use std::io::ErrorKind::NotFound;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::lease::{Lease, refuse_held};
use super::pass::Pass;
use super::process::Process;
use crate::error::{Error, Result};
use crate::format::{
    FileEntry, MANIFEST, Manifest, PARTS, ShardEntry, VALIDATION, create_folder, hash_hex, is_temp,
    saturating_sum, temp_path, write_atomically,
};
use crate::input::{InputIdentity, SkippedRecord};
use crate::store::{check_url, url_of};

/// The tag of a run that does all input groups.
pub(super) const ALL: &str = "all";

const FINGERPRINT: &str = "job.json";
const LEASE: &str = ".lock-";
/// The beginning of the names of records.
const RECORD: &str = "input-group-";

/// The files and counts of a finished input group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InputGroupRecord {
    #[serde(rename = "job")]
    pub fingerprint: String,
    pub input_group: usize,
    pub documents: u64,
    pub empty_documents: u64,
    pub shards: Vec<ShardEntry>,
    #[serde(rename = "holdout")]
    pub validation: Vec<ShardEntry>,
    /// Records that were skipped because they could not be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedRecord>,
    /// Its inputs; empty for documents, pipes, and in records of older releases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<InputIdentity>,
    /// The file beside this one with its counts, or its hashes; `None` in records of older releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watched: Option<FileEntry>,
    /// The hash of the hashes by which duplicates were found; `None` if none were left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drops: Option<String>,
    /// xxh3-128 of this file with the empty string here, hexadecimal; [`InputGroupRecord::sealed`] sets it.
    pub checksum: String,
}

impl InputGroupRecord {
    /// Tokens of all shards, the validation split included.
    pub fn num_tokens(&self) -> u64 {
        saturating_sum(self.shards.iter().chain(&self.validation).map(|shard| shard.num_tokens))
    }

    /// The bytes of the record, with its checksum.
    pub fn sealed(&self) -> serde_json::Result<Vec<u8>> {
        let unsealed = Self { checksum: String::new(), ..self.clone() };
        let checksum = hash_hex(&serde_json::to_vec_pretty(&unsealed)?);
        serde_json::to_vec_pretty(&Self { checksum, ..unsealed })
    }

    /// Parses a record; `None` if it is not exactly what `sealed` wrote.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let record: Self = serde_json::from_slice(bytes).ok()?;
        let shards = || record.shards.iter().chain(&record.validation);
        let consistent = shards().all(|shard| shard.is_consistent(2) || shard.is_consistent(4))
            && saturating_sum(shards().map(|shard| shard.num_documents)) == record.documents;
        (consistent && record.sealed().ok()? == bytes).then_some(record)
    }
}

#[derive(Serialize, Deserialize)]
struct FingerprintRecord {
    #[serde(rename = "job")]
    fingerprint: String,
}

/// An output folder in use by a run.
#[derive(Debug)]
pub(super) struct OutputDir {
    pub dir: PathBuf,
    /// Hash of everything that the resulting bytes depend on.
    pub fingerprint: String,
    /// In the names of temporary files, so that no two runs write the same one.
    pub attempt: String,
    /// `None` in a process that works for another run.
    _lease: Option<Lease>,
}

/// The outcome of claiming the output folder.
pub(super) enum Claim {
    /// It holds a finished corpus, possibly of other inputs or options.
    Finished(Box<Manifest>),
    /// This run may use it.
    Ours(OutputDir),
}

impl OutputDir {
    /// Claims the folder for a run, or explains why it cannot. Never touches the files of others.
    pub fn claim(dir: &Path, fingerprint: &str, tag: &str) -> Result<Claim> {
        if let Some(dir) = url_of(dir) {
            check_url(&dir)?;
            return Err(Error::Input(format!(
                "{dir}: a corpus is written to a folder; choose a local --out and copy it to the store when it is complete"
            )));
        }
        if dir.exists() && !dir.is_dir() {
            let dir = dir.display();
            return Err(Error::Input(format!("{dir}: not a folder; choose another --out")));
        }
        if dir.join(MANIFEST).exists() {
            return Ok(Claim::Finished(Box::new(Manifest::read(dir)?)));
        }
        refuse_foreign(dir)?;
        create_folder(dir)?;
        let lease = take_lease(dir, tag)?;
        if dir.join(MANIFEST).exists() {
            return Ok(Claim::Finished(Box::new(Manifest::read(dir)?)));
        }
        let out = Self::new(dir, fingerprint, Some(lease));
        out.store_fingerprint(tag)?;
        for folder in [out.dir.clone(), out.parts(), out.validation()] {
            remove_temps(&folder, |process| process.is_some_and(|p| p.is_certainly_dead()));
        }
        Ok(Claim::Ours(out))
    }

    /// Uses the folder for the run that has claimed it.
    pub fn join(dir: &Path, fingerprint: &str) -> Result<Self> {
        let out = Self::new(dir, fingerprint, None);
        out.check_fingerprint()?;
        Ok(out)
    }

    fn new(dir: &Path, fingerprint: &str, lease: Option<Lease>) -> Self {
        let (dir, attempt) = (dir.to_owned(), Process::current().attempt());
        Self { dir, fingerprint: fingerprint.to_owned(), attempt, _lease: lease }
    }

    /// Fails if the folder is no longer used for these inputs and options: the run that this process works for
    /// has ended, and another one has begun.
    pub fn check_fingerprint(&self) -> Result<()> {
        if self.stored_fingerprint().as_ref() == Some(&self.fingerprint) {
            return Ok(());
        }
        let dir = self.dir.display();
        Err(Error::Input(format!("{dir}: the run that this work belongs to has ended; start it again")))
    }

    /// The folder of records.
    pub fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// The folder of the validation split.
    pub fn validation(&self) -> PathBuf {
        self.dir.join(VALIDATION)
    }

    /// The record of an input group, if a pass has finished it and all its files exist.
    pub fn record(&self, pass: &Pass, input_group: usize) -> Option<InputGroupRecord> {
        let bytes = std::fs::read(self.parts().join(record_name(pass, input_group))).ok()?;
        let record = InputGroupRecord::parse(&bytes)?;
        let is_whole = |dir: &Path, entry: &FileEntry| {
            dir.join(&entry.file).metadata().is_ok_and(|found| found.len() == entry.bytes)
        };
        let whole = |dir: &Path, shards: &[ShardEntry]| {
            shards.iter().flat_map(|shard| [&shard.tokens, &shard.lines]).all(|entry| is_whole(dir, entry))
        };
        let matches = record.fingerprint == self.fingerprint
            && record.input_group == input_group
            && record.drops.as_deref() == pass.digest()
            && record.watched.iter().all(|entry| is_whole(&self.parts(), entry));
        (matches && whole(&self.dir, &record.shards) && whole(&self.validation(), &record.validation))
            .then_some(record)
    }

    /// Records that a pass has finished an input group; its files are durable already.
    pub fn save_record(&self, pass: &Pass, record: &InputGroupRecord) -> Result<()> {
        let bytes = record.sealed().map_err(|e| Error::io(self.parts(), e.into()))?;
        write_atomically(&self.parts(), &record_name(pass, record.input_group), &self.attempt, &bytes)
    }

    /// Makes an input group unfinished again.
    pub fn remove_record(&self, pass: &Pass, input_group: usize) -> Result<()> {
        remove_if_exists(&self.parts().join(record_name(pass, input_group)))
    }

    /// Stores what was counted of an input group.
    pub fn save_counts(&self, input_group: usize, counts: &[u8]) -> Result<FileEntry> {
        self.save_part(format!("{RECORD}{input_group:06}.counts"), counts)
    }

    /// Stores the hashes of an input group.
    pub fn save_hashes(&self, input_group: usize, hashes: &[u8]) -> Result<FileEntry> {
        self.save_part(format!("{RECORD}{input_group:06}.hashes"), hashes)
    }

    fn save_part(&self, file: String, bytes: &[u8]) -> Result<FileEntry> {
        write_atomically(&self.parts(), &file, &self.attempt, bytes)?;
        Ok(FileEntry { file, bytes: bytes.len() as u64, hash: hash_hex(bytes) })
    }

    /// The bytes of a file beside the records. If it is damaged, it is removed, so that the next run writes it again.
    pub fn read_part(&self, entry: &FileEntry) -> Result<Vec<u8>> {
        let path = self.parts().join(&entry.file);
        let bytes = std::fs::read(&path).map_err(|e| Error::io(&path, e))?;
        if hash_hex(&bytes) == entry.hash {
            return Ok(bytes);
        }
        remove_if_exists(&path)?;
        Err(Error::Damaged {
            path,
            reason: "its checksum does not hold; it was removed: run again".to_owned(),
        })
    }

    /// Stores what is left out of an input group.
    pub fn save_drops(&self, input_group: usize, bytes: &[u8]) -> Result<()> {
        write_atomically(&self.parts(), &drops_name(input_group), &self.attempt, bytes)
    }

    /// What was stored by `save_drops`; `None` if nothing was.
    pub fn drops(&self, input_group: usize) -> Option<Vec<u8>> {
        std::fs::read(self.parts().join(drops_name(input_group))).ok()
    }

    /// Takes a folder with another fingerprint, if nothing in it is finished and no other run is active.
    fn take_over(&self, tag: &str) -> Result<()> {
        if has_records(&self.parts())? {
            let dir = self.dir.display();
            return Err(Error::Input(format!(
                "{dir}: holds unfinished work of other inputs or options; finish that, remove the folder, \
                 or choose another --out"
            )));
        }
        refuse_other_leases(&self.dir, tag, |_| true)
    }

    fn stored_fingerprint(&self) -> Option<String> {
        let bytes = std::fs::read(self.parts().join(FINGERPRINT)).ok()?;
        serde_json::from_slice::<FingerprintRecord>(&bytes).ok().map(|record| record.fingerprint)
    }

    fn store_fingerprint(&self, tag: &str) -> Result<()> {
        if self.stored_fingerprint().as_ref() == Some(&self.fingerprint) {
            return Ok(());
        }
        let path = self.parts().join(FINGERPRINT);
        if path.exists() {
            self.take_over(tag)?;
        }
        create_folder(&self.parts())?;
        let record = FingerprintRecord { fingerprint: self.fingerprint.clone() };
        let bytes = serde_json::to_vec(&record).map_err(|e| Error::io(&path, e.into()))?;
        write_atomically(&self.parts(), FINGERPRINT, &self.attempt, &bytes)
    }
}

/// Whether there is a record of any input group.
fn has_records(parts: &Path) -> Result<bool> {
    Ok(names_in(parts)?.iter().any(|name| name.starts_with(RECORD) && name.ends_with(".json")))
}

/// The names of all entries of a folder.
fn names_in(dir: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(dir, e);
    std::fs::read_dir(dir).map_err(failed)?.map(|entry| entry.map(|e| name_of(&e)).map_err(failed)).collect()
}

/// Removes what a finished corpus no longer needs: records, leases, unfinished files, and shards of interrupted
/// runs that its manifest does not name. Others may be doing the same. What cannot be removed is a warning.
pub(super) fn clean_up(dir: &Path, manifest: &Manifest) -> Result<()> {
    warn_of(remove_folder(dir, PARTS));
    remove_strays(dir, manifest)?;
    if manifest.has_validation {
        remove_strays(&dir.join(VALIDATION), &Manifest::read(&dir.join(VALIDATION))?)?;
    }
    for name in names_in(dir)?.iter().filter(|name| name.starts_with(LEASE)) {
        warn_of(remove_if_exists(&dir.join(name)));
    }
    Ok(())
}

/// Warns on standard error about what could not be removed: a failed cleanup is not an error.
pub(super) fn warn_of(removed: Result<()>) {
    if let Err(error) = removed {
        // Not `eprintln`, which panics where standard error is closed.
        let _ = writeln!(std::io::stderr(), "warning: {error}; it is no longer needed and was not removed");
    }
}

fn remove_strays(dir: &Path, manifest: &Manifest) -> Result<()> {
    let files = manifest.shards.iter().flat_map(|shard| [&shard.tokens.file, &shard.lines.file]);
    let named: HashSet<&String> = files.collect();
    for name in names_in(dir)?.iter().filter(|name| name.starts_with("shard-") && !named.contains(name)) {
        warn_of(remove_if_exists(&dir.join(name)));
    }
    remove_temps(dir, |_| true);
    Ok(())
}

/// Removes unfinished files if `of` is true of the processes that were writing them. `None` stands for an unknown
/// process.
fn remove_temps(dir: &Path, of: impl Fn(Option<Process>) -> bool) {
    for name in names_in(dir).unwrap_or_default().iter().filter(|name| is_temp(name)) {
        if of(name.strip_prefix(".tmp-").and_then(Process::of_attempt)) {
            let path = dir.join(name);
            warn_of(if path.is_dir() { remove_tree(&path) } else { remove_if_exists(&path) });
        }
    }
}

/// Removes the folder `dir/name` if it exists. It gets a temporary name first: a late process finds no folder to write
/// to, and leaves nothing behind.
pub(super) fn remove_folder(dir: &Path, name: &str) -> Result<()> {
    let (path, temp) = (dir.join(name), temp_path(dir, name, &Process::current().attempt()));
    match std::fs::rename(&path, &temp) {
        Err(error) if error.kind() == NotFound => Ok(()),
        Err(error) => Err(Error::io(&path, error)),
        Ok(()) => remove_tree(&temp),
    }
}

/// Removes a folder with its contents if it exists; another process may be removing it too.
fn remove_tree(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

/// Removes a file if it exists.
pub(super) fn remove_if_exists(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

fn record_name(pass: &Pass, input_group: usize) -> String {
    match pass {
        Pass::Build(_) => format!("{RECORD}{input_group:06}.json"),
        Pass::Hash(_) => format!("{RECORD}{input_group:06}.hashes.json"),
    }
}

fn drops_name(input_group: usize) -> String {
    format!("{RECORD}{input_group:06}.drops")
}

/// Refuses a folder without a fingerprint, unless it holds only what a run leaves before it stores one.
fn refuse_foreign(dir: &Path) -> Result<()> {
    if dir.join(PARTS).join(FINGERPRINT).exists() || !dir.exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(|e| Error::io(dir, e))? {
        let entry = entry.map_err(|e| Error::io(dir, e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let parts_without_fingerprint = || {
            name == PARTS
                && std::fs::read_dir(entry.path())
                    .is_ok_and(|mut files| files.all(|file| file.is_ok_and(|f| is_temp(&name_of(&f)))))
        };
        if !is_temp(&name) && !name.starts_with(LEASE) && !parts_without_fingerprint() {
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

/// Takes the lease of this run and fails if an overlapping run is active.
fn take_lease(dir: &Path, tag: &str) -> Result<Lease> {
    let own = Lease::take(&dir.join(format!("{LEASE}{tag}")))?;
    refuse_other_leases(dir, tag, |other| tag == ALL || other == ALL)?;
    Ok(own)
}

/// Fails if another run holds its lease and `conflicts` is true of its tag.
fn refuse_other_leases(dir: &Path, tag: &str, conflicts: impl Fn(&str) -> bool) -> Result<()> {
    for name in names_in(dir)? {
        let Some(other) = name.strip_prefix(LEASE) else { continue };
        if other != tag && conflicts(other) {
            refuse_held(&dir.join(&name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::testing::write_corpus;

    #[test]
    fn a_record_with_any_changed_byte_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]], vec![vec![7], vec![8, 9, 10]]], 2);
        let manifest = Manifest::read(dir.path()).unwrap();
        let record = |documents| InputGroupRecord {
            fingerprint: "j".into(),
            input_group: 3,
            documents,
            empty_documents: u64::MAX,
            skipped: Vec::new(),
            inputs: Vec::new(),
            watched: None,
            drops: None,
            shards: manifest.shards.clone(),
            validation: Vec::new(),
            checksum: String::new(),
        };
        let sound = record(2).sealed().unwrap();
        assert_eq!(InputGroupRecord::parse(&sound).unwrap().shards, manifest.shards);
        assert!(InputGroupRecord::parse(&record(3).sealed().unwrap()).is_none());
        assert!((0..sound.len()).all(|length| InputGroupRecord::parse(&sound[..length]).is_none()));
        for bit in 0..sound.len() * 8 {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(InputGroupRecord::parse(&flipped).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn partitions_share_a_folder_with_each_other_alone() {
        for (first, second, is_refused) in
            [(ALL, "1-of-2", true), ("1-of-2", ALL, true), ("1-of-2", "2-of-2", false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let _first = OutputDir::claim(dir.path(), "job", first).unwrap();
            let unfinished = temp_path(dir.path(), "shard", &Process::current().attempt());
            std::fs::write(&unfinished, "").unwrap();
            let refusal = OutputDir::claim(dir.path(), "job", second).err().map(|error| error.to_string());
            assert!(refusal.is_some() == is_refused && unfinished.exists(), "{first}, {second}");
            assert!(
                refusal.is_none_or(|reason| reason.contains("another prepare is running in this folder"))
            );
        }
    }

    #[test]
    fn a_late_writer_leaves_nothing_in_a_removed_folder() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..50 {
            let parts = dir.path().join(PARTS);
            create_folder(&parts).unwrap();
            let (begun, wait) = std::sync::mpsc::channel();
            let late = std::thread::spawn(move || {
                (0..10_000).find_map(|group| {
                    let written =
                        write_atomically(&parts, &record_name(&Pass::Build(None), group), "late", b"{}");
                    let _ = begun.send(());
                    written.err()
                })
            });
            wait.recv().unwrap();
            remove_folder(dir.path(), PARTS).unwrap();
            assert!(late.join().unwrap().is_some());
            assert!(names_in(dir.path()).unwrap().is_empty(), "{round}");
        }
    }

    #[test]
    fn an_interrupted_removal_is_finished() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 2);
        let removed = temp_path(dir.path(), PARTS, &Process::current().attempt());
        create_folder(&removed).unwrap();
        std::fs::write(removed.join(record_name(&Pass::Build(None), 0)), "{}").unwrap();
        clean_up(dir.path(), &Manifest::read(dir.path()).unwrap()).unwrap();
        assert!(!removed.exists() && dir.path().join(MANIFEST).exists());
    }

    #[test]
    fn what_cannot_be_removed_is_no_failure() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 2);
        let names = ["shard-9.tokens", ".tmp-x", ".lock-all", "shard-8.tokens"];
        let [folder, link, lease, file] = names.map(|name| dir.path().join(name));
        create_folder(&folder).unwrap(); // stands in for a file that cannot be removed
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        for path in [&lease, &file] {
            std::fs::write(path, "old").unwrap();
        }
        clean_up(dir.path(), &Manifest::read(dir.path()).unwrap()).unwrap();
        assert!(folder.exists() && dir.path().join(MANIFEST).exists());
        assert!([&link, &lease, &file].iter().all(|path| path.symlink_metadata().is_err()));
    }

    proptest! {
        #[test]
        fn random_bytes_are_no_record(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(InputGroupRecord::parse(&bytes).is_none());
        }
    }
}
