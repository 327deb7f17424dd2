//! Detects inputs that have changed since they were processed, and writes `inputs.json`, the list of a corpus's inputs.
//! It is not part of the manifest: there can be a million files, modification times differ between machines that make
//! the same corpus, and no reader of the corpus needs it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::output_dir::{InputGroupRecord, OutputDir};
use super::place::Place;
use super::plan::Plan;
use super::progress::{Progress, Report};
use crate::error::{Error, Result};
use crate::format::hash_hex;
use crate::input::{Comparison, InputFile, InputFormat, InputIdentity};
use crate::store::attended;
use crate::threads::on_all_cores;

const INPUTS: &str = "inputs.json";

/// Compares inputs with their recorded identities.
pub(super) struct Comparer<'a> {
    pub plan: &'a Plan,
    /// Compare all content, even where size, time and samples are the same.
    pub verify: bool,
}

#[derive(Serialize, Deserialize)]
struct InputList {
    /// xxh3-128 of the list as compact JSON, hexadecimal.
    checksum: String,
    inputs: Vec<InputIdentity>,
}

impl Comparer<'_> {
    /// The input groups whose records may not match the inputs as they are now, each with a file that differs. Records
    /// of older releases, which name no inputs, are accepted unless all content is to be compared.
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
        let mut found: HashMap<usize, Vec<(Comparison, &InputFile)>> = HashMap::new();
        for ((group, _), result) in identities.iter().zip(compared) {
            found.entry(*group).or_default().push(result);
        }
        let is_same = |group: &usize| {
            found.get(group).is_some_and(|results| results.iter().all(|(result, _)| is_known(*result)))
        };
        let mut stale = Vec::new();
        for record in records.iter().flatten() {
            let (group, files) = (record.input_group, self.files_of(record.input_group));
            let results = found.get(&group).map_or(&[][..], |results| &results[..]);
            let differs = results.iter().find(|(result, _)| match result {
                Comparison::Same => false,
                Comparison::SamePart => !self.decisive_parts(group).iter().all(is_same),
                Comparison::Changed | Comparison::Unknown => true,
            });
            let unrecorded = || files.iter().find(|file| file.regular && self.verify && results.is_empty());
            if let Some(file) = differs.map(|(_, file)| *file).or_else(unrecorded) {
                stale.push((group, file.path.clone()));
            }
        }
        Ok(stale)
    }

    /// Fails if an input of the finished corpus in `dir` has changed.
    pub fn check_finished(&self, dir: &Path, progress: &mut Report) -> Result<()> {
        // Older releases wrote no list: then names and sizes count, which are in the fingerprint.
        let list = read(dir)?.unwrap_or_default();
        let mut unrecorded: HashMap<&str, &InputFile> = HashMap::new();
        if self.verify {
            let files = self.plan.inputs.files.iter().filter(|file| file.regular);
            unrecorded.extend(files.map(|file| (&*file.name, file)));
            for identity in &list {
                unrecorded.remove(&*identity.file);
            }
        }
        for (result, file) in self.compare(list.iter().collect(), progress)? {
            match result {
                Comparison::Same | Comparison::SamePart => {}
                Comparison::Changed => return Err(changed(file, dir)),
                Comparison::Unknown => {
                    unrecorded.insert(&file.name, file);
                }
            }
        }
        match unrecorded.values().next() {
            Some(file) => Err(Error::Input(format!(
                "{}: {} holds no hash of it, so --verify-inputs cannot compare it; to be sure, prepare it again in \
                 another --out",
                file.path.display(),
                dir.display()
            ))),
            None => Ok(()),
        }
    }

    /// Fails if the finished corpus in `dir`, which has another fingerprint, was made of an input of another size.
    pub fn check_sizes(&self, dir: &Path) -> Result<()> {
        let (list, files) = (read(dir)?.unwrap_or_default(), self.files());
        let resized = |identity: &&InputIdentity| {
            files.get(&*identity.file).is_some_and(|file| file.size != identity.bytes)
        };
        let file = list.iter().find(resized).and_then(|identity| files.get(&*identity.file));
        file.map_or(Ok(()), |file| Err(changed(file, dir)))
    }

    fn files(&self) -> HashMap<&str, &InputFile> {
        self.plan.inputs.files.iter().map(|file| (&*file.name, file)).collect()
    }

    fn files_of(&self, group: usize) -> &[InputFile] {
        self.plan.groups.get(group).map_or(&[], |group| &self.plan.inputs.files[group.files.clone()])
    }

    /// The other parts of a group's file that must be unchanged for its text to be unchanged: a part's text ends within
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

    /// The results for these identities, with their files.
    fn compare(
        &self,
        identities: Vec<&InputIdentity>,
        progress: &mut Report,
    ) -> Result<Vec<(Comparison, &InputFile)>> {
        let (files, cancel) = (self.files(), &self.plan.inputs.cancel);
        let compare = |identity: &&InputIdentity| match files.get(&*identity.file) {
            Some(file) => Ok((identity.compare(file, self.verify, cancel)?, *file)),
            None => Err(Error::Input(format!("{}: recorded, but not an input; report this", identity.file))),
        };
        if identities.is_empty() {
            return Ok(Vec::new());
        }
        let compare_all = || identities.par_iter().map(compare).collect::<Result<Vec<_>>>();
        let attend = |_| {
            if progress(Progress { step: "comparing the inputs", ..Progress::default() }) {
                return Ok(());
            }
            cancel.raise();
            Err(Error::Interrupted)
        };
        attended(|_: Sender<()>| on_all_cores(compare_all)?, attend)?
    }
}

fn is_known(result: Comparison) -> bool {
    matches!(result, Comparison::Same | Comparison::SamePart)
}

fn changed(file: &InputFile, dir: &Path) -> Error {
    let (file, dir) = (file.path.display(), dir.display());
    Error::Input(format!(
        "{file}: has changed since {dir} was prepared from it; choose another --out, or remove that folder to prepare \
         it again"
    ))
}

/// Writes the list of the corpus's inputs; no file if it is empty.
pub(super) fn write(out: &OutputDir, inputs: Vec<InputIdentity>) -> Result<()> {
    if inputs.is_empty() {
        return out.place.remove(INPUTS);
    }
    let failed = |error: serde_json::Error| Error::io(INPUTS, error.into());
    let list = InputList { checksum: checksum(&inputs).map_err(failed)?, inputs };
    let bytes = serde_json::to_vec_pretty(&list).map_err(failed)?;
    out.write(INPUTS, &bytes)
}

/// The list of the inputs of the corpus in `dir`; `None` if it has none.
pub(super) fn read(dir: &Path) -> Result<Option<Vec<InputIdentity>>> {
    let path = dir.join(INPUTS);
    let Some(bytes) = Place::open(dir)?.read(INPUTS)? else { return Ok(None) };
    let list: Option<InputList> = serde_json::from_slice(&bytes).ok();
    match list.filter(|list| checksum(&list.inputs).is_ok_and(|found| found == list.checksum)) {
        Some(list) => Ok(Some(list.inputs)),
        None => {
            let reason = "damaged; the corpus does not need it: remove it, and its inputs are known by name and size only";
            Err(Error::Damaged { path, reason: reason.to_owned() })
        }
    }
}

fn checksum(inputs: &[InputIdentity]) -> serde_json::Result<String> {
    Ok(hash_hex(&serde_json::to_vec(inputs)?))
}
