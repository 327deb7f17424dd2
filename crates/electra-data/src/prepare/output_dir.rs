//! The output folder of an unfinished corpus: its run, its finished work, and the processes that work in it.
//!
//! `parts/job.json` stores the fingerprint of inputs and options, `parts/input-group-N.json` records that input
//! group N is finished, `.counts` stores the counts of its text. With dropped duplicates, `.buckets` stores its
//! hashes, with a separate record, and `.drops` its duplicates. `.lock-TAG.NONCE` identifies the process of a run. All
//! are removed once the manifest exists, `job.json` last.
//!
//! Several processes may build the same input group at once: they write the same bytes under different temporary
//! names, and rename complete files to the same final name. In an object store, shards are written to a temporary folder
//! and uploaded, followed by the record: an object appears complete or not at all. Processes are not recorded there:
//! `parts/job.json` and the manifest are created only if they are absent, which keeps other runs out.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::clean_up::{attempt_of, clean_up, remove_of_dead, temporary_folder, warn_of};
use super::options::{Pass, TEXT_VERSION};
use super::place::{FINGERPRINT, Place, RECORD, Sizes, names_in, remove_if_exists};
use super::process::{Process, ProcessFile, is_process_file};
use crate::error::{Error, Result};
use crate::format::{
    FileEntry, MANIFEST, Manifest, PARTS, ShardEntry, VALIDATION, create_folder, hash_hex, saturating_sum,
    write_atomically,
};
use crate::input::{InputIdentity, SkippedRecord};
use crate::store::{Request, Store, url_of};

pub(super) const ALL: &str = "all";

/// Finished input groups that are uploaded at once. Their shards are on disk meanwhile.
const CONCURRENT_UPLOADS: usize = 4;
/// The extensions of the files with an input group's hashes and with its duplicates.
pub(super) const BUCKETED: &str = "buckets";
pub(super) const DROPS: &str = "drops";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InputGroupRecord {
    #[serde(rename = "job")]
    pub fingerprint: String,
    pub input_group: usize,
    pub documents: u64,
    pub empty_documents: u64,
    pub shards: Vec<ShardEntry>,
    #[serde(rename = "holdout")]
    pub validation: Vec<ShardEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<SkippedRecord>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<InputIdentity>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watched: Option<FileEntry>,
    /// The digest of the hashes that identified duplicates; `None` if duplicates were not dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drops: Option<String>,
    /// xxh3-128 of this file with the empty string here, hexadecimal; [`InputGroupRecord::sealed`] sets it.
    pub checksum: String,
}

pub(super) type Records = Vec<Option<InputGroupRecord>>;

impl InputGroupRecord {
    pub fn num_tokens(&self) -> u64 {
        saturating_sum(self.shards.iter().chain(&self.validation).map(|shard| shard.num_tokens))
    }

    /// Its files as (name, bytes): shards, counts and hashes.
    fn files(&self) -> impl Iterator<Item = (String, u64)> {
        let of_shard = |shard: &ShardEntry| [shard.tokens.clone(), shard.lines.clone()];
        let in_folder = |folder: &str, entry: FileEntry| (format!("{folder}{}", entry.file), entry.bytes);
        let train = self.shards.iter().flat_map(of_shard).map(move |entry| in_folder("", entry));
        let validation = self.validation.iter().flat_map(of_shard);
        let validation = validation.map(move |entry| in_folder(&format!("{VALIDATION}/"), entry));
        let watched = self.watched.iter().map(|entry| (part_path(&entry.file), entry.bytes));
        train.chain(validation).chain(watched)
    }

    pub fn sealed(&self) -> serde_json::Result<Vec<u8>> {
        let unsealed = Self { checksum: String::new(), ..self.clone() };
        let checksum = hash_hex(&serde_json::to_vec_pretty(&unsealed)?);
        serde_json::to_vec_pretty(&Self { checksum, ..unsealed })
    }

    /// Parses a record; `None` if it differs from the output of `sealed`.
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
    /// The text version of the program; `None` is version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text_version: Option<usize>,
}

#[derive(Debug)]
pub(super) struct OutputDir {
    /// The folder of new shards: the output folder, or a temporary folder from which they are uploaded.
    pub dir: PathBuf,
    pub place: Place,
    pub out: PathBuf,
    /// Hash of everything that determines the resulting bytes.
    pub fingerprint: String,
    /// Part of the names of temporary files, so that no two runs write the same file.
    pub attempt: String,
    /// `None` in a process that works for another process's run.
    _process_file: Option<ProcessFile>,
    _temp: Option<tempfile::TempDir>,
}

pub(super) enum Claim {
    Finished(Box<Manifest>),
    Ours(Box<OutputDir>),
}

impl OutputDir {
    /// Claims the folder for a run, or returns an error with the reason. Never touches other runs' files. Runs of the same
    /// fingerprint write the same corpus and may share the folder, unless they read a stream of documents.
    pub fn claim(dir: &Path, fingerprint: &str, tag: &str, is_of_documents: bool) -> Result<Claim> {
        if let Some(url) = url_of(dir) {
            return Self::claim_store(dir, Store::open_to_write(&url)?, fingerprint);
        }
        if dir.exists() && !dir.is_dir() {
            return Err(Error::at(dir, "not a folder; choose another --out"));
        }
        let mut out = Self::new(dir, fingerprint)?;
        if let Some(manifest) = out.place.manifest()? {
            return Ok(Claim::Finished(Box::new(manifest)));
        }
        refuse_foreign(dir)?;
        create_folder(dir)?;
        let stored = out.stored_fingerprint()?;
        let may_share = !is_of_documents && stored.is_none_or(|stored| stored == fingerprint);
        out._process_file = Some(ProcessFile::create(dir, tag, may_share)?);
        if let Some(manifest) = out.place.manifest()? {
            return Ok(Claim::Finished(Box::new(manifest)));
        }
        out.store_fingerprint()?;
        remove_of_dead(&out.dir);
        remove_of_dead(&out.parts());
        Ok(Claim::Ours(Box::new(out)))
    }

    fn claim_store(out: &Path, store: Store, fingerprint: &str) -> Result<Claim> {
        if let Some(manifest) = Place::open(out)?.manifest()? {
            return Ok(Claim::Finished(Box::new(manifest)));
        }
        let mut claimed = Self::new(out, fingerprint)?;
        let fingerprint_name = format!("{PARTS}/{FINGERPRINT}");
        if claimed.stored_fingerprint()?.is_none() {
            let is_foreign = |name: &String| !name.starts_with(&format!("{PARTS}/"));
            if let Some(name) = store.list("")?.into_iter().map(|object| object.name).find(is_foreign) {
                return Err(holds_something_else(out, &name));
            }
            store.create(&fingerprint_name, claimed.fingerprint_record()?)?; // or another run has created it: compared below
        }
        let stored = stored_record(&claimed.place)?;
        if stored.as_ref().is_none_or(|stored| stored.fingerprint != fingerprint) {
            let whose = whose(stored.as_ref());
            let remedy =
                format!("finish that run, remove {}/{PARTS}, or choose another --out", out.display());
            let text = format!("another prepare of {whose} is running here or was interrupted; {remedy}");
            return Err(Error::at(out, text));
        }
        // The manifest needs conditional requests, too, and a fingerprint may already exist.
        store.check_conditions(&fingerprint_name)?;
        claimed.place = Place::Store(store);
        // Another run may have finished the corpus before the fingerprint was stored.
        Ok(match claimed.place.manifest()? {
            Some(manifest) => Claim::Finished(Box::new(manifest)),
            None => Claim::Ours(Box::new(claimed)),
        })
    }

    #[cfg(test)]
    pub fn unclaimed(dir: &Path, place: Place) -> Self {
        Self { place, ..Self::new(dir, "").unwrap() }
    }

    pub fn join(dir: &Path, fingerprint: &str) -> Result<Self> {
        let out = Self::new(dir, fingerprint)?;
        out.check_fingerprint()?;
        Ok(out)
    }

    fn new(out: &Path, fingerprint: &str) -> Result<Self> {
        let attempt = Process::current().attempt();
        let (place, temp) = match url_of(out) {
            None => (Place::Folder(out.to_owned()), None),
            Some(url) => (Place::Store(Store::open_to_write(&url)?), Some(temporary_folder(&attempt)?)),
        };
        let dir = temp.as_ref().map_or(out, |temp| temp.path()).to_owned();
        let (out, fingerprint) = (out.to_owned(), fingerprint.to_owned());
        Ok(Self { dir, place, out, fingerprint, attempt, _process_file: None, _temp: temp })
    }

    /// Fails if the run of this process has ended and the folder belongs to another run.
    pub fn check_fingerprint(&self) -> Result<()> {
        if self.stored_fingerprint()?.as_ref() == Some(&self.fingerprint) {
            return Ok(());
        }
        Err(Error::at(&self.out, "the run that this task belongs to has ended; start it again"))
    }

    /// Gives up a folder in a store, for a run over documents, which cannot be resumed.
    pub fn abandon(&self) {
        if let Place::Store(_) = self.place {
            warn_of(self.place.remove(&format!("{PARTS}/{FINGERPRINT}")));
        }
    }

    pub fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    pub fn validation(&self) -> PathBuf {
        self.dir.join(VALIDATION)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.place.write(name, &self.attempt, bytes)
    }

    /// The records of input groups; `None` for unfinished groups, and for hashes in an older release's order.
    pub fn records(&self, pass: &Pass, input_groups: &[usize], sizes: &Sizes) -> Result<Records> {
        let names: Vec<_> = input_groups.iter().map(|&group| record_name(pass, group)).collect();
        let contents = self.place.read_all(&names, sizes)?;
        let record = |(group, bytes): (usize, Vec<u8>)| {
            let record = InputGroupRecord::parse(&bytes)?;
            let matches = record.fingerprint == self.fingerprint
                && record.input_group == group
                && record.drops.as_deref() == pass.digest()
                && record.watched.as_ref().is_none_or(|entry| !entry.file.ends_with(".hashes"));
            (matches && record.files().all(|(name, bytes)| sizes.get(&name) == Some(&bytes)))
                .then_some(record)
        };
        Ok(input_groups.iter().copied().zip(contents).map(record).collect())
    }

    /// The same for a few input groups, without listing the files of all others.
    pub fn few_records(&self, pass: &Pass, input_groups: &[usize]) -> Result<Records> {
        let mut names: Vec<_> = input_groups.iter().map(|&group| record_name(pass, group)).collect();
        let records = self.place.read_all(&names, &self.place.sizes_of(&names)?)?;
        for record in records.iter().filter_map(|bytes| InputGroupRecord::parse(bytes)) {
            names.extend(record.files().map(|(name, _)| name));
        }
        self.records(pass, input_groups, &self.place.sizes_of(&names)?)
    }

    /// Records that a pass has finished an input group. Its shards are already durable, or are uploaded first.
    pub fn save_record(&self, pass: &Pass, record: &InputGroupRecord) -> Result<()> {
        self.upload(record)?;
        let bytes = record.sealed().map_err(|e| Error::io(&self.out, e.into()))?;
        self.write(&record_name(pass, record.input_group), &bytes)?;
        let checked = self.check_fingerprint();
        if checked.is_err() {
            // The corpus was finished before this record was written, so the record must be removed.
            let watched = record.watched.iter().map(|entry| part_path(&entry.file));
            let names: Vec<_> = watched.chain([record_name(pass, record.input_group)]).collect();
            self.place.remove_all(&names)?;
            let _ = std::fs::remove_dir(self.parts());
        }
        checked
    }

    /// Uploads the shards of a record from the temporary folder, if there is one, and removes them from it.
    pub fn upload(&self, record: &InputGroupRecord) -> Result<()> {
        let Place::Store(store) = &self.place else { return Ok(()) };
        for (name, _) in record.files() {
            let path = self.dir.join(&name);
            if path.exists() {
                store.put_file(&name, &path)?;
                remove_if_exists(&path)?;
            }
        }
        Ok(())
    }

    pub fn download(&self, shard: &ShardEntry) -> Result<()> {
        let Place::Store(store) = &self.place else { return Ok(()) };
        let files = [&shard.tokens.file, &shard.lines.file];
        files.into_iter().try_for_each(|name| store.download(name, &self.dir.join(name)))
    }

    /// Writes the manifest. In a store, returns the manifest of another run of the same corpus instead of overwriting it.
    pub fn write_manifest(&self, manifest: Manifest) -> Result<Manifest> {
        let Place::Store(store) = &self.place else {
            self.write(MANIFEST, manifest.canonical().as_bytes())?;
            return Ok(manifest);
        };
        if store.create(MANIFEST, manifest.canonical())? {
            return Ok(manifest);
        }
        self.place.manifest()?.filter(|other| other.fingerprint == manifest.fingerprint).ok_or_else(|| {
            let remedy = "which was not overwritten; choose another --out";
            Error::at(
                &self.out,
                format_args!("another program has written {MANIFEST} in the meantime, {remedy}"),
            )
        })
    }

    /// Number of parallel uploads of finished input groups; 0 if no upload is needed.
    pub fn num_uploads(&self) -> usize {
        if let Place::Store(_) = self.place { CONCURRENT_UPLOADS } else { 0 }
    }

    pub fn forget(&self, pass: &Pass, groups: impl Iterator<Item = usize>, sizes: &Sizes) -> Result<()> {
        let names = groups.map(|group| record_name(pass, group));
        self.place.remove_all(&names.filter(|name| sizes.contains_key(name)).collect::<Vec<_>>())
    }

    pub fn save_counts(&self, input_group: usize, counts: &[u8]) -> Result<FileEntry> {
        let file = part_file(input_group, "counts");
        self.write(&part_path(&file), counts)?;
        Ok(FileEntry { file, bytes: counts.len() as u64, hash: hash_hex(counts) })
    }

    /// Removes a damaged file of the folder of records, so that the next run writes it again, and returns the error.
    pub fn damaged(&self, file: &str) -> Error {
        let path = self.out.join(part_path(file));
        let reason = "wrong checksum; the file was removed: run again".to_owned();
        self.place.remove(&part_path(file)).err().unwrap_or(Error::Damaged { path, reason })
    }

    fn stored_fingerprint(&self) -> Result<Option<String>> {
        Ok(stored_record(&self.place)?.map(|record| record.fingerprint))
    }

    /// Stores the fingerprint, unless the folder has finished or running work of another one.
    fn store_fingerprint(&self) -> Result<()> {
        let stored = stored_record(&self.place)?;
        if stored.as_ref().is_some_and(|stored| stored.fingerprint == self.fingerprint) {
            return Ok(());
        }
        let is_record = |name: &String| name.starts_with(RECORD) && name.ends_with(".json");
        if names_in(&self.parts())?.iter().any(is_record) {
            let remedy = "finish that run, remove the folder, or choose another --out";
            let message = format!("holds unfinished work of {}; {remedy}", whose(stored.as_ref()));
            return Err(Error::at(&self.dir, message));
        }
        create_folder(&self.parts())?;
        write_atomically(&self.parts(), FINGERPRINT, &self.attempt, &self.fingerprint_record()?)
    }

    fn fingerprint_record(&self) -> Result<Vec<u8>> {
        let text_version = (TEXT_VERSION > 1).then_some(TEXT_VERSION);
        let record = FingerprintRecord { fingerprint: self.fingerprint.clone(), text_version };
        serde_json::to_vec(&record).map_err(|e| Error::io(&self.out, e.into()))
    }
}

/// Finishes the cleanup of a run that was interrupted after it had written the manifest.
pub(super) fn resume_clean_up(out: &Path, manifest: &Manifest) -> Result<()> {
    let place = Place::open(out)?;
    match stored_record(&place)? {
        Some(stored) if stored.fingerprint == manifest.fingerprint => clean_up(&place, manifest),
        _ => Ok(()),
    }
}

fn stored_record(place: &Place) -> Result<Option<FingerprintRecord>> {
    let bytes = match place.read(&format!("{PARTS}/{FINGERPRINT}")) {
        Err(error) if matches!(place, Place::Store(_)) => return Err(error),
        read => read.unwrap_or(None).unwrap_or_default(),
    };
    Ok(serde_json::from_slice(&bytes).ok())
}

/// Describes the difference to the work of another fingerprint.
fn whose(stored: Option<&FingerprintRecord>) -> String {
    match stored.map_or(TEXT_VERSION, |stored| stored.text_version.unwrap_or(1)) {
        TEXT_VERSION => "other inputs or options".to_owned(),
        version => {
            let age = if version < TEXT_VERSION { "an older" } else { "a newer" };
            format!(
                "{age} version of electra-fast, whose token ids of a text can differ (text version {version}, here {TEXT_VERSION})"
            )
        }
    }
}

fn record_name(pass: &Pass, input_group: usize) -> String {
    match pass {
        Pass::Build(_) => part_path(&part_file(input_group, "json")),
        Pass::Hash(_) => part_path(&part_file(input_group, "hashes.json")),
    }
}

pub(super) fn part_file(input_group: usize, ending: &str) -> String {
    format!("{RECORD}{input_group:06}.{ending}")
}

pub(super) fn part_path(file: &str) -> String {
    format!("{PARTS}/{file}")
}

pub(super) fn part_request(file: &str, range: Range<u64>) -> Request {
    Request { name: part_path(file), range, version: None }
}

pub(super) fn total(ranges: &[Request]) -> u64 {
    ranges.iter().map(|request| request.range.end - request.range.start).sum()
}

/// Refuses a folder without a fingerprint, unless it has only files that a run writes before its fingerprint.
fn refuse_foreign(dir: &Path) -> Result<()> {
    let parts = names_in(&dir.join(PARTS)).unwrap_or_else(|_| vec![String::new()]);
    let is_early = |name: &String| {
        let is_parts = || name == PARTS && parts.iter().all(|name| attempt_of(name).is_some());
        attempt_of(name).is_some() || is_process_file(name) || is_parts()
    };
    match names_in(dir)?.into_iter().find(|name| !is_early(name)) {
        Some(name) if !parts.iter().any(|name| name == FINGERPRINT) => Err(holds_something_else(dir, &name)),
        _ => Ok(()),
    }
}

fn holds_something_else(out: &Path, name: &str) -> Error {
    let remedy = "choose an empty or new folder for --out";
    Error::at(out, format_args!("contains other files ({name}); {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::testing::write_corpus;

    #[test]
    fn record_with_a_changed_byte_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]], vec![vec![7], vec![8, 9, 10]]], 2);
        let manifest = Manifest::read(dir.path()).unwrap();
        let shards = manifest.shards.clone();
        let record = |documents| InputGroupRecord { documents, shards: shards.clone(), ..Default::default() };
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
    fn unfinished_work_of_another_text_version_is_refused() {
        let differing = "version of electra-fast, whose token ids of a text can differ";
        for (version, message) in [
            ("", "holds unfinished work of other inputs or options;"),
            (",\"text_version\":900", &*format!("a newer {differing}")),
            (",\"text_version\":0", &*format!("an older {differing}")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let path = |name: &str| dir.path().join(PARTS).join(name);
            let claim = || OutputDir::claim(dir.path(), "job", ALL, false);
            let write = |name: &str, bytes: &str| std::fs::write(path(name), bytes).unwrap();
            std::fs::create_dir(path("")).unwrap();
            write("job.json", &format!("{{\"job\":\"other\"{version}}}"));
            write("input-group-000000.json", "{}");
            let error = claim().err().unwrap().to_string();
            assert!(
                error.contains(message) && error.contains("finish that run, remove the folder"),
                "{error}"
            );
            write("job.json", r#"{"job":"job"}"#); // as the first version and this version write it
            drop(claim().unwrap());
            std::fs::remove_file(path("input-group-000000.json")).unwrap();
            write("job.json", &format!("{{\"job\":\"other\"{version}}}"));
            drop(claim().unwrap()); // nothing was finished
            assert_eq!(std::fs::read(path("job.json")).unwrap(), br#"{"job":"job"}"#);
        }
    }
}
