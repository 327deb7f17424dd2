//! The output folder of an unfinished corpus: which run it belongs to, what is finished, and who is working in it.
//!
//! `parts/job.json` stores the fingerprint of inputs and options, `parts/input-group-N.json` records that input
//! group N is finished, `parts/input-group-N.counts` what was counted of its text. Where duplicates are left out,
//! `input-group-N.buckets` stores its hashes, with a record of its own, and `.drops` what they decide. `.lock-TAG` is
//! the lease of a run. All are removed once the manifest exists.
//!
//! Several processes may build the same input group at once: they write the same bytes under temporary names
//! of their own, and each renames its complete file to the same final name.
//!
//! A corpus may also lie in an object store. Then shards are written to a temporary folder and uploaded, and after them
//! the record. An object appears complete or not at all, so it needs no temporary name. There are no leases: none could
//! be taken from a process that is dead but unknown here, and none is needed, because runs of the same fingerprint write
//! the same bytes, and `parts/job.json` and the manifest are created only if they are absent, which keeps others out.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::clean_up::{name_of, names_in, remove_temps, temporary_folder, warn_of};
use super::lease::{Lease, refuse_held};
use super::pass::Pass;
use super::place::{FINGERPRINT, LEASE, Place, Sizes, remove_if_exists};
use super::process::Process;
use crate::error::{Error, Result};
use crate::format::{
    FileEntry, MANIFEST, Manifest, PARTS, ShardEntry, VALIDATION, create_folder, hash_hex, is_temp,
    saturating_sum, write_atomically,
};
use crate::input::{InputIdentity, SkippedRecord};
use crate::store::{Request, Store, url_of};

/// The tag of a run that does all input groups.
pub(super) const ALL: &str = "all";

/// Finished input groups that are uploaded at once. Their shards are on disk meanwhile.
const CONCURRENT_UPLOADS: usize = 4;
/// The beginning of the names of records.
const RECORD: &str = "input-group-";
/// The endings of the files of an input group's hashes, of those of older releases, and of what is left out of it.
pub(super) const BUCKETED: &str = "buckets";
pub(super) const HASHES: &str = ".hashes";
pub(super) const DROPS: &str = "drops";

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

    /// (name, bytes) of the files of all shards.
    fn shard_files(&self) -> impl Iterator<Item = (String, u64)> {
        let validation = self.validation.iter().map(|shard| (format!("{VALIDATION}/"), shard));
        self.shards.iter().map(|shard| (String::new(), shard)).chain(validation).flat_map(
            |(folder, shard)| {
                [&shard.tokens, &shard.lines].map(|entry| (format!("{folder}{}", entry.file), entry.bytes))
            },
        )
    }

    /// (name, bytes) of these files and of what was counted or hashed.
    fn files(&self) -> impl Iterator<Item = (String, u64)> {
        let watched = self.watched.iter().map(|entry| (format!("{PARTS}/{}", entry.file), entry.bytes));
        self.shard_files().chain(watched)
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
    /// Where shards are written: the output folder, or a temporary one from which they are uploaded.
    pub dir: PathBuf,
    pub place: Place,
    /// The output folder or URL.
    out: PathBuf,
    /// Hash of everything that the resulting bytes depend on.
    pub fingerprint: String,
    /// In the names of temporary files, so that no two runs write the same one.
    pub attempt: String,
    /// `None` in a process that works for another run.
    _lease: Option<Lease>,
    /// Removes the temporary folder.
    _temp: Option<tempfile::TempDir>,
}

/// The outcome of claiming the output folder.
pub(super) enum Claim {
    /// It holds a finished corpus, possibly of other inputs or options.
    Finished(Box<Manifest>),
    /// This run may use it.
    Ours(Box<OutputDir>),
}

impl OutputDir {
    /// Claims the folder for a run, or explains why it cannot. Never touches the files of others.
    pub fn claim(dir: &Path, fingerprint: &str, tag: &str) -> Result<Claim> {
        if let Some(url) = url_of(dir) {
            return Self::claim_store(dir, Store::open_to_write(&url)?, fingerprint);
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
        let out = Self::new(dir, fingerprint, Some(lease))?;
        out.store_fingerprint(tag)?;
        for folder in [out.dir.clone(), out.parts(), out.validation()] {
            remove_temps(&folder, |process| process.is_some_and(|p| p.is_certainly_dead()));
        }
        Ok(Claim::Ours(Box::new(out)))
    }

    /// Claims a folder in a store.
    fn claim_store(out: &Path, store: Store, fingerprint: &str) -> Result<Claim> {
        if let Some(manifest) = Place::open(out)?.manifest()? {
            return Ok(Claim::Finished(Box::new(manifest)));
        }
        let claimed = Self::new(out, fingerprint, None)?;
        let url = out.display();
        if claimed.stored_fingerprint()?.is_none() {
            let is_foreign = |name: &String| !name.starts_with(&format!("{PARTS}/"));
            if let Some(name) = store.list("")?.into_iter().map(|object| object.name).find(is_foreign) {
                return Err(Error::Input(format!(
                    "{url}: already holds something else ({name}); choose an empty or new folder for --out"
                )));
            }
            let record = FingerprintRecord { fingerprint: fingerprint.to_owned() };
            let bytes = serde_json::to_vec(&record).map_err(|e| Error::io(out, e.into()))?;
            store.create(&format!("{PARTS}/{FINGERPRINT}"), bytes)?; // or another run has: compared below
        }
        if claimed.stored_fingerprint()?.as_deref() != Some(fingerprint) {
            return Err(Error::Input(format!(
                "{url}: another prepare, of other inputs or options, is running here or was interrupted; finish that, \
                 remove {url}/{PARTS}, or choose another --out"
            )));
        }
        // A run that has finished it meanwhile may have done so before the fingerprint was stored.
        Ok(match claimed.place.manifest()? {
            Some(manifest) => Claim::Finished(Box::new(manifest)),
            None => Claim::Ours(Box::new(claimed)),
        })
    }

    /// A folder of files that is used without a claim.
    #[cfg(test)]
    pub fn unclaimed(dir: &Path, place: Place) -> Self {
        Self { place, ..Self::new(dir, "", None).unwrap() }
    }

    /// Uses the folder for the run that has claimed it.
    pub fn join(dir: &Path, fingerprint: &str) -> Result<Self> {
        let out = Self::new(dir, fingerprint, None)?;
        out.check_fingerprint()?;
        Ok(out)
    }

    fn new(out: &Path, fingerprint: &str, lease: Option<Lease>) -> Result<Self> {
        let attempt = Process::current().attempt();
        let (place, temp) = match url_of(out) {
            None => (Place::Folder(out.to_owned()), None),
            Some(url) => (Place::Store(Store::open_to_write(&url)?), Some(temporary_folder(&attempt)?)),
        };
        let dir = temp.as_ref().map_or(out, |temp| temp.path()).to_owned();
        let (out, fingerprint) = (out.to_owned(), fingerprint.to_owned());
        Ok(Self { dir, place, out, fingerprint, attempt, _lease: lease, _temp: temp })
    }

    /// Fails if the folder is no longer used for these inputs and options: the run that this process works for
    /// has ended, and another one has begun.
    pub fn check_fingerprint(&self) -> Result<()> {
        if self.stored_fingerprint()?.as_ref() == Some(&self.fingerprint) {
            return Ok(());
        }
        let dir = self.out.display();
        Err(Error::Input(format!("{dir}: the run that this work belongs to has ended; start it again")))
    }

    /// Gives up a place in a store to which nobody could return, as a run over documents cannot.
    pub fn abandon(&self) {
        if let Place::Store(_) = self.place {
            warn_of(self.place.remove(&format!("{PARTS}/{FINGERPRINT}")));
        }
    }

    /// The output folder or URL.
    pub fn out(&self) -> &Path {
        &self.out
    }

    /// The folder of records.
    pub fn parts(&self) -> PathBuf {
        self.dir.join(PARTS)
    }

    /// The folder of the validation split.
    pub fn validation(&self) -> PathBuf {
        self.dir.join(VALIDATION)
    }

    /// Writes a small file of the corpus.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.place.write(name, &self.attempt, bytes)
    }

    /// The record of an input group.
    #[cfg(test)]
    pub fn record(&self, pass: &Pass, input_group: usize) -> Option<InputGroupRecord> {
        self.few_records(pass, &[input_group]).unwrap().remove(0)
    }

    /// The records of input groups; `None` for those that a pass has not finished, or that lack a file.
    pub fn records(
        &self,
        pass: &Pass,
        input_groups: impl IntoIterator<Item = usize>,
        sizes: &Sizes,
    ) -> Result<Vec<Option<InputGroupRecord>>> {
        let input_groups: Vec<usize> = input_groups.into_iter().collect();
        let names: Vec<_> = input_groups.iter().map(|&group| record_name(pass, group)).collect();
        let found = self.place.read_all(&names, sizes)?;
        let record = |(group, bytes): (usize, Vec<u8>)| {
            let record = InputGroupRecord::parse(&bytes)?;
            let matches = record.fingerprint == self.fingerprint
                && record.input_group == group
                && record.drops.as_deref() == pass.digest();
            (matches && record.files().all(|(name, bytes)| sizes.of(&name) == Some(bytes))).then_some(record)
        };
        Ok(input_groups.into_iter().zip(found).map(record).collect())
    }

    /// The same for a few input groups, without listing the files of all others.
    pub fn few_records(&self, pass: &Pass, input_groups: &[usize]) -> Result<Vec<Option<InputGroupRecord>>> {
        let mut names: Vec<_> = input_groups.iter().map(|&group| record_name(pass, group)).collect();
        let records = self.place.read_all(&names, &self.place.sizes_of(&names)?)?;
        for record in records.iter().filter_map(|bytes| InputGroupRecord::parse(bytes)) {
            names.extend(record.files().map(|(name, _)| name));
        }
        self.records(pass, input_groups.iter().copied(), &self.place.sizes_of(&names)?)
    }

    /// Records that a pass has finished an input group. Its shards are durable already, or else are uploaded first.
    pub fn save_record(&self, pass: &Pass, record: &InputGroupRecord) -> Result<()> {
        self.upload(record)?;
        let bytes = record.sealed().map_err(|e| Error::io(&self.out, e.into()))?;
        self.write(&record_name(pass, record.input_group), &bytes)?;
        if let Place::Store(_) = self.place
            && let Err(error) = self.check_fingerprint()
        {
            // The corpus was finished before this record was written, which must not stay behind.
            self.remove_record(pass, record.input_group)?;
            return Err(error);
        }
        Ok(())
    }

    /// Uploads the shards of a record that lie in the temporary folder, if there is one, and removes them there.
    pub fn upload(&self, record: &InputGroupRecord) -> Result<()> {
        let Place::Store(store) = &self.place else { return Ok(()) };
        for (name, _) in record.shard_files() {
            let path = self.dir.join(&name);
            if path.exists() {
                store.put_file(&name, &path)?;
                remove_if_exists(&path)?;
            }
        }
        Ok(())
    }

    /// Makes the files of a shard local.
    pub fn download(&self, shard: &ShardEntry) -> Result<()> {
        let Place::Store(store) = &self.place else { return Ok(()) };
        let files = [&shard.tokens.file, &shard.lines.file];
        files.into_iter().try_for_each(|name| store.download(name, &self.dir.join(name)))
    }

    /// Writes the manifest. In a store, none is overwritten: that of another run that has finished the same corpus is
    /// returned instead.
    pub fn write_manifest(&self, manifest: Manifest) -> Result<Manifest> {
        let Place::Store(store) = &self.place else {
            self.write(MANIFEST, manifest.canonical().as_bytes())?;
            return Ok(manifest);
        };
        if store.create(MANIFEST, manifest.canonical())? {
            return Ok(manifest);
        }
        self.place.manifest()?.filter(|found| found.fingerprint == manifest.fingerprint).ok_or_else(|| {
            let url = self.out.display();
            Error::Input(format!(
                "{url}: another program has written {MANIFEST} meanwhile, which was not overwritten; choose another --out"
            ))
        })
    }

    /// How many finished input groups are uploaded at once; 0 if they need not be.
    pub fn num_uploads(&self) -> usize {
        if let Place::Store(_) = self.place { CONCURRENT_UPLOADS } else { 0 }
    }

    /// Makes an input group unfinished again.
    pub fn remove_record(&self, pass: &Pass, input_group: usize) -> Result<()> {
        self.place.remove(&record_name(pass, input_group))
    }

    /// Makes input groups unfinished again.
    pub fn remove_records(
        &self,
        pass: &Pass,
        input_groups: impl IntoIterator<Item = usize>,
        sizes: &Sizes,
    ) -> Result<()> {
        let names = input_groups.into_iter().map(|group| record_name(pass, group));
        self.place.remove_all(&names.filter(|name| sizes.of(name).is_some()).collect::<Vec<_>>())
    }

    /// Stores what was counted of an input group.
    pub fn save_counts(&self, input_group: usize, counts: &[u8]) -> Result<FileEntry> {
        let file = part_file(input_group, "counts");
        self.write(&part_path(&file), counts)?;
        Ok(FileEntry { file, bytes: counts.len() as u64, hash: hash_hex(counts) })
    }

    /// Removes a damaged file beside the records, so that the next run writes it again, and returns the error.
    pub fn damaged(&self, file: &str) -> Error {
        let path = self.out.join(part_path(file));
        let reason = "its checksum does not hold; it was removed: run again".to_owned();
        self.place.remove(&part_path(file)).err().unwrap_or(Error::Damaged { path, reason })
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

    fn stored_fingerprint(&self) -> Result<Option<String>> {
        let bytes = match self.place.read(&format!("{PARTS}/{FINGERPRINT}")) {
            Err(error) if matches!(self.place, Place::Store(_)) => return Err(error),
            read => read.unwrap_or(None).unwrap_or_default(),
        };
        Ok(serde_json::from_slice::<FingerprintRecord>(&bytes).ok().map(|record| record.fingerprint))
    }

    fn store_fingerprint(&self, tag: &str) -> Result<()> {
        if self.stored_fingerprint()?.as_ref() == Some(&self.fingerprint) {
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

fn record_name(pass: &Pass, input_group: usize) -> String {
    match pass {
        Pass::Build(_) => part_path(&part_file(input_group, "json")),
        Pass::Hash(_) => part_path(&part_file(input_group, "hashes.json")),
    }
}

/// The name of a file of an input group.
pub(super) fn part_file(input_group: usize, ending: &str) -> String {
    format!("{RECORD}{input_group:06}.{ending}")
}

/// Its name in the output folder.
pub(super) fn part_path(file: &str) -> String {
    format!("{PARTS}/{file}")
}

/// A range of it.
pub(super) fn part_request(file: &str, range: Range<u64>) -> Request {
    Request { name: part_path(file), range, version: None }
}

/// All of it.
pub(super) fn whole_part(file: &FileEntry) -> Request {
    part_request(&file.file, 0..file.bytes)
}

/// The bytes of some ranges.
pub(super) fn total(ranges: &[Request]) -> u64 {
    ranges.iter().map(|request| request.range.end - request.range.start).sum()
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
    use crate::format::temp_path;
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

    proptest! {
        #[test]
        fn random_bytes_are_no_record(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(InputGroupRecord::parse(&bytes).is_none());
        }
    }
}
