//! Folders written by other tools: distinguishes data files, and finds the rows of a dataset saved with
//! `save_to_disk` of Hugging Face's `datasets`.
//!
//! A saved dataset has a `state.json` that lists its `data-*.arrow`; other Arrow files in the folder
//! are caches. A saved `DatasetDict` has a `dataset_dict.json` and a saved dataset for each split.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{Error, Result};

/// Metadata files of a saved dataset, which `files` must not count as skipped.
pub(super) const STATE: &str = "state.json";
pub(super) const INFO: &str = "dataset_info.json";
const SPLITS: &str = "dataset_dict.json";
const TRAIN: &str = "train";

/// Files and folders that Spark and table formats write next to their data.
const BOOKKEEPING: [&str; 8] = [
    "_SUCCESS",
    "_committed_",
    "_started_",
    "_metadata",
    "_common_metadata",
    "_temporary",
    "_delta_log",
    "_spark_metadata",
];

#[derive(Debug, PartialEq, Eq)]
pub(super) enum SavedDataset {
    Rows(Vec<PathBuf>),
    /// A dataset per split: the split to read and the names of the others.
    Splits {
        folder: PathBuf,
        others: Vec<String>,
    },
}

#[derive(Deserialize)]
struct SavedState {
    #[serde(rename = "_data_files")]
    data_files: Vec<DataFile>,
    /// Older releases could save a selection of rows by index.
    #[serde(rename = "_indices_data_files", default)]
    indices: Option<Vec<DataFile>>,
}

#[derive(Deserialize)]
struct DataFile {
    filename: String,
}

#[derive(Deserialize)]
struct Splits {
    splits: Vec<String>,
}

impl SavedDataset {
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        if folder.join(SPLITS).is_file() {
            return splits(folder).map(Some);
        }
        // Other programs write a state.json too.
        if folder.join(STATE).is_file() && folder.join(INFO).is_file() {
            return rows(folder).map(Some);
        }
        Ok(None)
    }
}

fn rows(folder: &Path) -> Result<SavedDataset> {
    let path = folder.join(STATE);
    let state: SavedState = read(&path)?;
    if state.indices.is_some_and(|files| !files.is_empty()) {
        let reason = "the dataset selects rows by an index; call `flatten_indices()` and save it again";
        return Err(Error::at(path, reason));
    }
    let files: Vec<PathBuf> = state.data_files.iter().map(|file| folder.join(&file.filename)).collect();
    if let Some(missing) = files.iter().find(|file| !file.is_file()) {
        let missing = missing.display();
        return Err(Error::at(
            path,
            format!("lists {missing}, which is missing; download the whole folder again"),
        ));
    }
    Ok(SavedDataset::Rows(files))
}

fn splits(folder: &Path) -> Result<SavedDataset> {
    let path = folder.join(SPLITS);
    let Splits { splits } = read(&path)?;
    let chosen = match &splits[..] {
        [only] => only,
        several => several.iter().find(|name| *name == TRAIN).ok_or_else(|| {
            let (names, folder) = (several.join(", "), folder.display());
            Error::at(&path, format!("no split {TRAIN}; pass one of {names} as {folder}/NAME"))
        })?,
    };
    let others = splits.iter().filter(|name| *name != chosen).cloned().collect();
    Ok(SavedDataset::Splits { folder: folder.join(chosen), others })
}

fn read<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
    let reason = |e| format!("not written by `save_to_disk` ({e}); download the whole folder again");
    serde_json::from_slice(&bytes).map_err(|e| Error::at(path, reason(e)))
}

/// Whether a file or folder is not data: it is hidden, or metadata of the program that wrote the folder.
pub(super) fn is_hidden(name: &str) -> bool {
    name.starts_with('.') || (!name.contains('.') && BOOKKEEPING.iter().any(|begin| name.starts_with(begin)))
}
