//! Detects inputs that have changed since they were processed, and writes `inputs.json`, the list of a corpus's inputs.
//! The list is not part of the manifest: there can be a million files, modification times differ between machines that
//! prepare the same corpus, and no reader of the corpus needs it.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::options::Plan;
use super::output_dir::{InputGroupRecord, OutputDir};
use super::place::{Place, manifest_of};
use super::progress::{Progress, Report};
use crate::error::{Error, Result};
use crate::format::{self, Verified, hash_hex};
use crate::input::{Comparison, InputFile, InputFormat, InputIdentity, SKIPPED};
use crate::store::attended;
use crate::threads::on_all_cores;

const INPUTS: &str = "inputs.json";

pub(super) struct Comparer<'a> {
    pub plan: &'a Plan,
    pub verify: bool,
}

type Compared<'a> = Vec<(Comparison, &'a InputFile)>;

#[derive(Serialize, Deserialize)]
struct InputList {
    /// xxh3-128 of the list as compact JSON, hexadecimal.
    checksum: String,
    inputs: Vec<InputIdentity>,
}

impl Comparer<'_> {
    /// The input groups whose records may not match the current inputs, each with a file that differs. Records
    /// of older releases list no inputs; they are accepted unless all content must be compared.
    pub fn stale(
        &self,
        records: &[Option<InputGroupRecord>],
        progress: &mut Report,
    ) -> Result<Vec<(usize, PathBuf)>> {
        let identities = records.iter().flatten();
        let identities: Vec<_> = identities
            .flat_map(|record| record.inputs.iter().map(|identity| (record.input_group, identity)))
            .collect();
        let compared = self.compare(identities.iter().map(|&(_, identity)| identity).collect(), progress)?;
        let mut by_group: HashMap<usize, Vec<(Comparison, &InputFile)>> = HashMap::new();
        for ((group, _), result) in identities.iter().zip(compared) {
            by_group.entry(*group).or_default().push(result);
        }
        let is_known = |result: &(Comparison, _)| matches!(result.0, Comparison::Same | Comparison::SamePart);
        let is_same = |group: &usize| by_group.get(group).is_some_and(|results| results.iter().all(is_known));
        let mut stale = Vec::new();
        for record in records.iter().flatten() {
            let group = record.input_group;
            let results = by_group.get(&group).map_or(&[][..], |results| &results[..]);
            let differs = results.iter().find(|(result, _)| match result {
                Comparison::Same => false,
                Comparison::SamePart => !self.decisive_parts(group).iter().all(is_same),
                Comparison::Changed | Comparison::Unknown => true,
            });
            let is_unrecorded = |file: &&InputFile| file.regular && self.verify && results.is_empty();
            let unrecorded = || self.files_of(group).iter().find(is_unrecorded);
            if let Some(file) = differs.map(|(_, file)| *file).or_else(unrecorded) {
                stale.push((group, file.path.clone()));
            }
        }
        Ok(stale)
    }

    pub fn check_finished(&self, dir: &Path, progress: &mut Report) -> Result<()> {
        // Older releases wrote no list: then only names and sizes are compared, by the fingerprint.
        let list = read(dir)?.unwrap_or_default();
        let mut unrecorded = self.files();
        let recorded: HashSet<&str> = list.iter().map(|identity| &*identity.file).collect();
        unrecorded.retain(|name, file| self.verify && file.regular && !recorded.contains(name));
        for (result, file) in self.compare(list.iter().collect(), progress)? {
            match result {
                Comparison::Same | Comparison::SamePart => {}
                Comparison::Changed => return Err(changed(file, dir)),
                Comparison::Unknown => {
                    unrecorded.insert(&file.name, file);
                }
            }
        }
        let Some(file) = unrecorded.values().next() else { return Ok(()) };
        let remedy = "so --verify-inputs cannot compare it; to be sure, prepare it again in another --out";
        Err(Error::at(&file.path, format_args!("{} has no hash of it, {remedy}", dir.display())))
    }

    pub fn check_sizes(&self, dir: &Path) -> Result<()> {
        let (list, files) = (read(dir)?.unwrap_or_default(), self.files());
        let resized = |identity: &InputIdentity| {
            files.get(&*identity.file).filter(|file| file.size != identity.bytes).copied()
        };
        list.iter().find_map(resized).map_or(Ok(()), |file| Err(changed(file, dir)))
    }

    fn files(&self) -> HashMap<&str, &InputFile> {
        self.plan.inputs.files.iter().map(|file| (&*file.name, file)).collect()
    }

    fn files_of(&self, group: usize) -> &[InputFile] {
        self.plan.groups.get(group).map_or(&[], |group| &self.plan.inputs.files[group.files.clone()])
    }

    /// The other parts of a group's file that must be unchanged for its text to be unchanged: a part's text ends in
    /// the next part, and a table has a directory and may have dictionaries anywhere.
    fn decisive_parts(&self, group: usize) -> Vec<usize> {
        let groups = &self.plan.groups;
        let is_same_file = |&other: &usize| groups[other].files == groups[group].files;
        match self.files_of(group).first().map(|file| file.format) {
            Some(InputFormat::Text | InputFormat::JsonLines) => {
                (group + 1..groups.len().min(group + 2)).filter(is_same_file).collect()
            }
            // The parts of a file follow each other.
            _ => {
                let start = (0..group).rev().take_while(is_same_file).last().unwrap_or(group);
                (start..groups.len()).take_while(is_same_file).collect()
            }
        }
    }

    fn compare(&self, identities: Vec<&InputIdentity>, progress: &mut Report) -> Result<Compared<'_>> {
        let (files, cancel) = (self.files(), &self.plan.inputs.cancel);
        let compare = |identity: &&InputIdentity| match files.get(&*identity.file) {
            Some(file) => Ok((identity.compare(file, self.verify, cancel)?, *file)),
            None => Err(Error::Input(format!(
                "{}: recorded, but not an input; please report this",
                identity.file
            ))),
        };
        if identities.is_empty() {
            return Ok(Vec::new());
        }
        let compare_all = || identities.par_iter().map(compare).collect::<Result<Vec<_>>>();
        let attend = |_| match progress(Progress { step: "comparing the inputs", ..Progress::default() }) {
            true => Ok(()),
            false => Err(Error::Interrupted).inspect_err(|_| cancel.raise()),
        };
        attended(|_: Sender<()>| on_all_cores(compare_all)?, attend)?
    }
}

fn changed(file: &InputFile, dir: &Path) -> Error {
    let remedy = "choose another --out, or remove that folder to prepare it again";
    Error::at(&file.path, format_args!("has changed since {} was prepared from it; {remedy}", dir.display()))
}

pub(super) fn write(out: &OutputDir, inputs: Vec<InputIdentity>) -> Result<()> {
    if inputs.is_empty() {
        return out.place.remove(INPUTS);
    }
    let failed = |error: serde_json::Error| Error::io(INPUTS, error.into());
    let list = InputList { checksum: checksum(&inputs).map_err(failed)?, inputs };
    let bytes = serde_json::to_vec_pretty(&list).map_err(failed)?;
    out.write(INPUTS, &bytes)
}

pub(super) fn read(dir: &Path) -> Result<Option<Vec<InputIdentity>>> {
    let path = dir.join(INPUTS);
    let Some(bytes) = Place::open(dir)?.read(INPUTS)? else { return Ok(None) };
    let list: Option<InputList> = serde_json::from_slice(&bytes).ok();
    let list = list.filter(|list| checksum(&list.inputs).is_ok_and(|hash| hash == list.checksum));
    let reason =
        "damaged; remove it: the corpus does not need it, and its inputs are then compared by name and size";
    list.map(|list| Some(list.inputs)).ok_or_else(|| Error::Damaged { path, reason: reason.to_owned() })
}

fn checksum(inputs: &[InputIdentity]) -> serde_json::Result<String> {
    Ok(hash_hex(&serde_json::to_vec(inputs)?))
}

/// Verifies every checksum, length and table of a corpus and of its validation set.
///
/// Damage to files is collected; a missing or damaged manifest is an error.
pub fn verify(dir: &Path) -> Result<Verified> {
    let mut verified = format::verify(dir)?;
    let (place, manifest) = (Place::open(dir)?, manifest_of(dir)?);
    let mut note = |result: Result<bool>| {
        verified.num_files += u64::from(!matches!(result, Ok(false)));
        verified.damaged.extend(result.err().map(|error| error.to_string()));
    };
    note(read(dir).map(|list| list.is_some()));
    note(place.read(SKIPPED).and_then(|list| match (list, &manifest.skipped_hash) {
        (Some(list), Some(hash)) if hash_hex(&list) != *hash => {
            Err(Error::Damaged { path: dir.join(SKIPPED), reason: "wrong checksum; remove it".to_owned() })
        }
        (list, _) => Ok(list.is_some()),
    }));
    Ok(verified)
}
