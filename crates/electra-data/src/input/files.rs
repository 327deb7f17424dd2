//! Finding the files that the user names (files, folders, globs), in a fixed order, and opening them.
//!
//! `division` forms input groups from these files.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::input_file::{Compression, InputFile};
use super::json_objects::layout;
use super::read_options::{InputFormat, ReadOptions};
use super::saved_dataset::{INFO, STATE, SavedDataset, is_hidden};
use super::stored;
use crate::error::{Error, Result};
use crate::regular_file::special_kind;
use crate::store::{Cancel, url_of};
use crate::threads::on_all_cores;

const KNOWN: &str =
    ".txt, .jsonl, .ndjson, .json, .parquet, .arrow and .feather, each also with .gz, .zst or .xz";
const REMEDY: &str = "--format txt reads any file as text (others: jsonl, json, parquet, arrow)";

#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub files: Vec<InputFile>,
    pub passed_over: PassedOver,
    pub skipped_splits: Vec<String>,
    pub cancel: Cancel,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassedOver {
    pub files: usize,
    /// Bytes in them …
    pub bytes: u64,
    /// … and in the files that are read.
    pub bytes_read: u64,
    pub kinds: Vec<String>,
}

impl PassedOver {
    fn of(files: &HashMap<PathBuf, u64>, bytes_read: u64) -> Self {
        let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
        for (path, bytes) in files {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
            let (stem, _) = without_compression(&name);
            let ending = stem.rfind('.').map_or("without an extension", |dot| &name[dot..]);
            *kinds.entry(ending.to_owned()).or_default() += bytes;
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|(_, bytes)| Reverse(*bytes));
        let kinds = kinds.into_iter().take(3).map(|(kind, _)| kind).collect();
        Self { files: files.len(), bytes: files.values().sum(), bytes_read, kinds }
    }
}

impl Inputs {
    /// Finds all files of `inputs`, except files in the output folder `except`.
    ///
    /// With a format, takes every file that is not hidden; otherwise, files with a known extension.
    /// Fails if there are none.
    ///
    /// Without a format, opens files that end in `.json`: their first objects show whether they hold records.
    pub fn expand(inputs: &[PathBuf], except: Option<&Path>, reading: &ReadOptions) -> Result<Self> {
        let except = except.and_then(|path| match url_of(path) {
            Some(url) => Some(url.into()),
            None => path.canonicalize().ok(),
        });
        let mut search = Search { except, format: reading.format, ..Search::default() };
        for input in inputs {
            match url_of(input) {
                Some(url) => search.add_objects(&url)?,
                None => search.add(input)?,
            }
        }
        if reading.format.is_none() {
            search.look_into_json(reading)?;
        }
        if search.files.is_empty() {
            let asked: Vec<_> = inputs.iter().map(|path| path.display().to_string()).collect();
            let is_json = |path: &PathBuf| matches!(kind_of(path, None), Some((InputFormat::Json, _)));
            let (asked, fields) = (asked.join(", "), reading.text_fields.join(", "));
            let reason = match search.skipped.len() {
                0 => String::new(),
                n if search.skipped.keys().any(is_json) => {
                    let json =
                        format!(".json without the text field {fields}; choose another field with --text");
                    format!(" (found {n} of other kinds or {json})")
                }
                n => format!(" (found {n} of other kinds; supported: {KNOWN}; {REMEDY})"),
            };
            let remedy = "check the path or the glob";
            return Err(Error::Input(format!("No files matched {asked}{reason}; {remedy}")));
        }
        let mut files: Vec<InputFile> = search.files.into_values().collect();
        let passed_over = PassedOver::of(&search.skipped, files.iter().map(|file| file.size).sum());
        strip_common_folder(&mut files);
        let skipped_splits = search.skipped_splits.into_iter().collect();
        let cancel = Cancel::default();
        files.iter_mut().for_each(|file| file.cancel_with(&cancel));
        Ok(Self { files, passed_over, skipped_splits, cancel })
    }

    pub fn contains(&self, path: &Path) -> Result<bool> {
        let failed = |path: &Path, error| Error::io(path, error);
        let full = path.canonicalize().map_err(|e| failed(path, e))?;
        let size = full.metadata().map_err(|e| failed(path, e))?.len();
        // Only a file of the same size can be identical: the real paths of the others need not be resolved.
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
    skipped: HashMap<PathBuf, u64>,
    named: HashSet<PathBuf>,
    skipped_splits: BTreeSet<String>,
    folders: HashSet<PathBuf>,
    except: Option<PathBuf>,
    format: Option<InputFormat>,
}

impl Search {
    fn add_objects(&mut self, url: &str) -> Result<()> {
        for object in stored::find(url, self.format.is_some())? {
            let path = PathBuf::from(&object.url);
            if self.except.as_ref().is_some_and(|except| path.starts_with(except)) {
                continue;
            }
            if path == Path::new(url) {
                self.named.insert(path.clone());
            }
            match kind_of(&path, self.format) {
                None => drop(self.skipped.insert(path, object.listed.size)),
                Some(kind) => {
                    let file = InputFile::new(&path, &path, object.listed.size, kind);
                    self.files.insert(path, InputFile { object: Some(object), ..file });
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
            self.named.insert(input.canonicalize().map_err(|e| Error::io(input, e))?);
            let unknown = || Error::at(input, format!("unknown kind of file; supported: {KNOWN}; {REMEDY}"));
            return if known { Ok(()) } else { Err(unknown()) };
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

    /// Adds everything below a folder except hidden files. Visits each folder only once, since links can form loops.
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
            if is_hidden(&name) || (rows && (name == STATE || name == INFO)) {
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

    fn count_skipped(&mut self, path: &Path) -> Result<()> {
        let full = path.canonicalize().map_err(|e| Error::io(path, e))?;
        if !self.files.contains_key(&full) {
            self.skipped.insert(full, 0); // not counted in bytes: mostly a cache of the data that is read
        }
        Ok(())
    }

    /// Decides how files that end in `.json` are read. Skips files without records, unless they were named.
    fn look_into_json(&mut self, reading: &ReadOptions) -> Result<()> {
        let unclear: Vec<_> =
            self.files.iter().filter(|(_, file)| file.format == InputFormat::Json && file.regular).collect();
        let layout_of =
            |(key, file): (&PathBuf, &InputFile)| Ok((key.clone(), file.size, layout(file, reading)?));
        let layouts: Vec<_> =
            on_all_cores(|| unclear.into_par_iter().map(layout_of).collect::<Result<_>>())??;
        for (key, size, layout) in layouts {
            match layout {
                Some(format) => {
                    self.files.entry(key).and_modify(|file| file.format = format);
                }
                None if self.named.contains(&key) => {}
                None => {
                    self.files.remove(&key);
                    self.skipped.insert(key, size);
                }
            }
        }
        Ok(())
    }

    /// Adds a file; `false` if its extension is unknown. Rejects devices, which may never end, and Parquet from a pipe,
    /// because it is read from its end.
    fn add_file(&mut self, path: &Path) -> Result<bool> {
        let full = path.canonicalize().map_err(|e| Error::io(path, e))?;
        if self.except.as_ref().is_some_and(|folder| full.starts_with(folder)) {
            return Ok(true);
        }
        let metadata = full.metadata().map_err(|e| Error::io(path, e))?;
        let Some((format, compression)) = kind_of(path, self.format) else {
            self.skipped.insert(full, metadata.len());
            return Ok(false);
        };
        if let Some(kind) = special_kind(&metadata)
            && (kind != "a pipe" || format == InputFormat::Parquet)
        {
            let reason = "must be a regular file; copy its contents to one";
            return Err(Error::at(path, format!("{kind}: {reason}")));
        }
        let file = InputFile::new(path, &full, metadata.len(), (format, compression));
        let (regular, modified) = (metadata.is_file(), metadata.modified().ok());
        self.files.insert(full, InputFile { regular, modified, ..file });
        Ok(true)
    }
}

fn kind_of(path: &Path, format: Option<InputFormat>) -> Option<(InputFormat, Compression)> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let (stem, compression) = without_compression(&name);
    let formats = [
        (".txt", InputFormat::Text),
        (".jsonl", InputFormat::JsonLines),
        (".ndjson", InputFormat::JsonLines),
        (".json", InputFormat::Json),
        (".parquet", InputFormat::Parquet),
        (".arrow", InputFormat::Arrow),
        (".feather", InputFormat::Arrow),
    ];
    let by_name = || formats.into_iter().find(|(ending, _)| stem.ends_with(ending)).map(|(_, known)| known);
    Some((format.or_else(by_name)?, compression))
}

fn without_compression(name: &str) -> (&str, Compression) {
    [(".gz", Compression::Gzip), (".zst", Compression::Zstd), (".xz", Compression::Xz)]
        .into_iter()
        .find_map(|(ending, kind)| Some((name.strip_suffix(ending)?, kind)))
        .unwrap_or((name, Compression::None))
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
