//! Finding the files that the user names (files, folders, globs), in a fixed order, and opening them.
//!
//! `division` forms input groups of them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use super::input_file::{Compression, InputFile};
use super::read_options::InputFormat;
use super::saved_dataset::{INFO, STATE, SavedDataset};
use super::stored;
use crate::error::{Error, Result};
use crate::regular_file::special_kind;
use crate::store::{Cancel, url_of};

const KNOWN: &str = ".txt, .jsonl, .parquet and .arrow, each also with .gz, .zst or .xz";
const REMEDY: &str = "--format text reads any file as text (others: jsonl, parquet, arrow)";

/// All files to read, sorted by path, without duplicates.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub files: Vec<InputFile>,
    /// Number of files in folders, or matched by globs, whose extension is unknown.
    pub skipped: usize,
    /// Splits of saved datasets that are not read because another one is.
    pub skipped_splits: Vec<String>,
    /// Cancels requests to the stores of these files.
    pub cancel: Cancel,
}

impl Inputs {
    /// Finds all files that `inputs` name, except those in the output folder `except`.
    ///
    /// With a format, every file that is not hidden is taken; without one, those with a known extension.
    /// An error if there are none.
    pub fn expand(inputs: &[PathBuf], except: Option<&Path>, format: Option<InputFormat>) -> Result<Self> {
        let except = except.and_then(|path| match url_of(path) {
            Some(url) => Some(url.into()),
            None => path.canonicalize().ok(),
        });
        let mut search = Search { except, format, ..Search::default() };
        for input in inputs {
            match url_of(input) {
                Some(url) => search.add_objects(&url)?,
                None => search.add(input)?,
            }
        }
        if search.files.is_empty() {
            let asked: Vec<_> = inputs.iter().map(|path| path.display().to_string()).collect();
            let (asked, skipped) = (asked.join(", "), search.skipped.len());
            let reason = match skipped {
                0 => String::new(),
                n => format!(" ({n} of other kinds were found; known are {KNOWN}; {REMEDY})"),
            };
            return Err(Error::Input(format!(
                "No files matched {asked}{reason}; check the path or the glob"
            )));
        }
        let mut files: Vec<InputFile> = search.files.into_values().collect();
        strip_common_folder(&mut files);
        let skipped_splits = search.skipped_splits.into_iter().collect();
        let cancel = Cancel::default();
        files.iter_mut().for_each(|file| file.cancel_with(&cancel));
        Ok(Self { files, skipped: search.skipped.len(), skipped_splits, cancel })
    }

    /// Whether an existing file is among them, under any path.
    pub fn contains(&self, path: &Path) -> Result<bool> {
        let failed = |path: &Path, error| Error::io(path, error);
        let full = path.canonicalize().map_err(|e| failed(path, e))?;
        let size = full.metadata().map_err(|e| failed(path, e))?.len();
        // Only a file of the same size can be it: the real paths of the others need not be looked up.
        for file in self.files.iter().filter(|file| file.size == size && file.object.is_none()) {
            if file.path.canonicalize().map_err(|e| failed(&file.path, e))? == full {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[derive(Default)]
struct Search {
    files: BTreeMap<PathBuf, InputFile>,
    skipped: HashSet<PathBuf>,
    skipped_splits: BTreeSet<String>,
    folders: HashSet<PathBuf>,
    except: Option<PathBuf>,
    format: Option<InputFormat>,
}

impl Search {
    /// Adds the objects in a store that a URL names.
    fn add_objects(&mut self, url: &str) -> Result<()> {
        for object in stored::find(url, self.format.is_some())? {
            let path = object.path();
            if self.except.as_ref().is_some_and(|except| path.starts_with(except)) {
                continue;
            }
            match kind_of(&path, self.format) {
                None => drop(self.skipped.insert(path)),
                Some((format, compression)) => {
                    let (name, size) = (path.to_string_lossy().into_owned(), object.size());
                    let object = Some(object);
                    let (regular, modified) = (true, None);
                    let file = InputFile {
                        path: path.clone(),
                        name,
                        size,
                        regular,
                        modified,
                        format,
                        compression,
                        object,
                    };
                    self.files.insert(path, file);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, input: &Path) -> Result<()> {
        if input.is_dir() {
            return self.add_folder(input);
        }
        if input.exists() {
            let known = self.add_file(input)?;
            let name = input.display();
            return if known {
                Ok(())
            } else {
                Err(Error::Input(format!("{name}: unknown kind of file; known are {KNOWN}; {REMEDY}")))
            };
        }
        let pattern = input.to_string_lossy();
        if !pattern.contains(['*', '?', '[']) {
            let hint = "; No files matched: check the path or the glob".to_owned();
            return Err(Error::NotFound { path: input.to_owned(), hint });
        }
        let bad = |error: &dyn std::fmt::Display| Error::Input(format!("{pattern}: {error}"));
        // With a format, `*` must not match hidden files such as a repository's .git.
        let require_literal_leading_dot = self.format.is_some();
        let options = glob::MatchOptions { require_literal_leading_dot, ..glob::MatchOptions::new() };
        for path in glob::glob_with(&pattern, options).map_err(|e| bad(&e))? {
            let path = path.map_err(|e| bad(&e))?;
            if path.is_dir() {
                self.add_folder(&path)?;
            } else {
                self.add_file(&path)?;
            }
        }
        Ok(())
    }

    /// Adds everything below a folder except hidden files. Visits each folder once, so that links cannot
    /// loop.
    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let failed = |e| Error::io(folder, e);
        if !self.folders.insert(folder.canonicalize().map_err(failed)?) {
            return Ok(());
        }
        // A saved dataset read in another format is an ordinary folder.
        let is_table = matches!(self.format, None | Some(InputFormat::Arrow));
        let rows = match if is_table { SavedDataset::find(folder)? } else { None } {
            Some(SavedDataset::Splits { folder, others }) => {
                self.skipped_splits.extend(others);
                return self.add_folder(&folder);
            }
            Some(SavedDataset::Rows(files)) => {
                files.iter().try_for_each(|file| self.add_file(file).map(drop))?;
                true
            }
            None => false,
        };
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') || (rows && (name == STATE || name == INFO)) {
                continue;
            }
            if rows {
                self.count_skipped(&entry.path())?;
            } else if entry.path().is_dir() {
                self.add_folder(&entry.path())?;
            } else {
                self.add_file(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Counts a file as skipped, unless it is read under another path.
    fn count_skipped(&mut self, path: &Path) -> Result<()> {
        let full = path.canonicalize().map_err(|e| Error::io(path, e))?;
        if !self.files.contains_key(&full) {
            self.skipped.insert(full);
        }
        Ok(())
    }

    /// Adds a file; `false` if its extension is unknown. A device may never end, and a Parquet file is read from its end.
    fn add_file(&mut self, path: &Path) -> Result<bool> {
        let full = path.canonicalize().map_err(|e| Error::io(path, e))?;
        if self.except.as_ref().is_some_and(|folder| full.starts_with(folder)) {
            return Ok(true);
        }
        let Some((format, compression)) = kind_of(path, self.format) else {
            self.skipped.insert(full);
            return Ok(false);
        };
        let found = full.metadata().map_err(|e| Error::io(path, e))?;
        if let Some(kind) = special_kind(&found)
            && (kind != "a pipe" || format == InputFormat::Parquet)
        {
            let path = path.display();
            return Err(Error::Input(format!(
                "{path}: {kind}, where a regular file is needed; copy what it holds to a file"
            )));
        }
        let (size, modified, regular) = (found.len(), found.modified().ok(), found.is_file());
        let (name, path) = (full.to_string_lossy().into_owned(), path.to_owned());
        let file = InputFile { path, name, size, regular, modified, format, compression, object: None };
        self.files.insert(full, file);
        Ok(true)
    }
}

/// Format and compression by the file's extension; `format` overrides the former.
fn kind_of(path: &Path, format: Option<InputFormat>) -> Option<(InputFormat, Compression)> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let (stem, compression) =
        [(".gz", Compression::Gzip), (".zst", Compression::Zstd), (".xz", Compression::Xz)]
            .into_iter()
            .find_map(|(ending, kind)| Some((name.strip_suffix(ending)?, kind)))
            .unwrap_or((&name, Compression::None));
    let formats = [
        (".txt", InputFormat::Text),
        (".jsonl", InputFormat::JsonLines),
        (".parquet", InputFormat::Parquet),
        (".arrow", InputFormat::Arrow),
    ];
    let by_name = || formats.into_iter().find(|(ending, _)| stem.ends_with(ending)).map(|(_, known)| known);
    Some((format.or_else(by_name)?, compression))
}

fn strip_common_folder(files: &mut [InputFile]) {
    let Some(mut common) = files.first().and_then(|f| Path::new(&f.name).parent()).map(Path::to_owned) else {
        return;
    };
    while !files.iter().all(|file| Path::new(&file.name).starts_with(&common)) {
        if !common.pop() {
            return;
        }
    }
    for file in files {
        if let Ok(rest) = Path::new(&file.name).strip_prefix(&common) {
            file.name = rest.to_string_lossy().into_owned();
        }
    }
}
