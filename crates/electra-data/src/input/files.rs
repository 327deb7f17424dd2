//! Finding the files that the user names (files, folders, globs), in a fixed order, and opening them.
//!
//! `division` forms input groups of them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::ErrorKind::{NotFound, QuotaExceeded, StorageFull};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::read_options::InputFormat;
use super::saved_dataset::{INFO, STATE, SavedDataset};
use super::text::{FRAGMENT_BYTES, has_old_line_ends};
use crate::error::{Error, Result};
use crate::format::write_error;

/// Size of the chunks in which files are read.
const BUFFER_BYTES: usize = 1 << 18;

const KNOWN: &str = ".txt, .jsonl, .parquet and .arrow, each also with .gz, .zst or .xz";
const REMEDY: &str = "--format text reads any file as text (others: jsonl, parquet, arrow)";

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    Xz,
}

impl Compression {
    fn name(self) -> &'static str {
        match self {
            Self::None => "plain",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
        }
    }

    /// Whether compressed data can begin like this: `head` may be shorter than the magic bytes.
    fn may_begin_with(self, head: &[u8]) -> bool {
        let begins = |magic: &[u8]| head.iter().zip(magic).all(|(found, expected)| found == expected);
        match self {
            Self::None => true,
            Self::Gzip => begins(&[0x1f, 0x8b]),
            // A data frame, or a skippable frame, which parallel compressors write first.
            Self::Zstd => {
                begins(&[0x28, 0xb5, 0x2f, 0xfd])
                    || (0x50..=0x5f).any(|kind| begins(&[kind, 0x2a, 0x4d, 0x18]))
            }
            Self::Xz => begins(b"\xfd7zXZ\0"),
        }
    }
}

/// One file to read. Serialized, it tells a process on another machine what to read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct InputFile {
    pub path: PathBuf,
    /// The path relative to the common parent of all inputs: the same on every machine.
    pub name: String,
    pub size: u64,
    /// Whether it is a regular file, which can be read more than once, unlike a pipe.
    pub regular: bool,
    /// Modification time when the file was listed.
    modified: Option<SystemTime>,
    pub format: InputFormat,
    pub compression: Compression,
}

/// All files to read, sorted by path, without duplicates.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub files: Vec<InputFile>,
    /// Number of files in folders, or matched by globs, whose extension is unknown.
    pub skipped: usize,
    /// Splits of saved datasets that are not read because another one is.
    pub skipped_splits: Vec<String>,
}

impl Inputs {
    /// Finds all files that `inputs` name, except those in the output folder `except`.
    ///
    /// With a format, every file that is not hidden is taken; without one, those with a known extension.
    /// An error if there are none.
    pub fn expand(inputs: &[PathBuf], except: Option<&Path>, format: Option<InputFormat>) -> Result<Self> {
        let except = except.and_then(|path| path.canonicalize().ok());
        let mut search = Search { except, format, ..Search::default() };
        for input in inputs {
            search.add(input)?;
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
        Ok(Self { files, skipped: search.skipped.len(), skipped_splits })
    }

    /// Whether an existing file is among them, under any path.
    pub fn contains(&self, path: &Path) -> Result<bool> {
        let failed = |path: &Path, error| Error::io(path, error);
        let full = path.canonicalize().map_err(|e| failed(path, e))?;
        let size = full.metadata().map_err(|e| failed(path, e))?.len();
        // Only a file of the same size can be it: the real paths of the others need not be looked up.
        for file in self.files.iter().filter(|file| file.size == size) {
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

    /// Adds a file; `false` if its extension is unknown.
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
        let (size, modified, regular) = (found.len(), found.modified().ok(), found.is_file());
        let (name, path) = (full.to_string_lossy().into_owned(), path.to_owned());
        self.files.insert(full, InputFile { path, name, size, regular, modified, format, compression });
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

/// A file that counts the bytes read from it.
struct CountingReader<'a> {
    file: File,
    bytes: &'a AtomicU64,
}

impl Read for CountingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

impl InputFile {
    /// The decompressed contents; `bytes` counts the bytes read from disk.
    pub fn open<'a>(&self, bytes: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>> {
        let file = File::open(&self.path).map_err(|e| Error::io(&self.path, e))?;
        if self.size == 0 && self.compression != Compression::None {
            return Err(self.unreadable(&std::io::ErrorKind::UnexpectedEof.into()));
        }
        let mut raw = BufReader::with_capacity(BUFFER_BYTES, CountingReader { file, bytes });
        let head = raw.fill_buf().map_err(|e| Error::io(&self.path, e))?;
        if !self.compression.may_begin_with(head) {
            let (path, kind) = (self.path.display(), self.compression.name());
            return Err(Error::Input(format!(
                "{path}: is not {kind} data, despite its name; if it is plain text, rename it"
            )));
        }
        Ok(match self.compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => buffered(flate2::bufread::MultiGzDecoder::new(raw)),
            Compression::Zstd => {
                buffered(zstd::stream::read::Decoder::with_buffer(raw).map_err(|e| Error::io(&self.path, e))?)
            }
            Compression::Xz => buffered(liblzma::bufread::XzDecoder::new_multi_decoder(raw)),
        })
    }

    /// These bytes of an uncompressed file; `bytes` counts those read from disk.
    ///
    /// Chunks end at the same offsets as when the whole file is read, because very long lines are cut by what
    /// is in the buffer.
    pub fn open_range<'a>(&self, range: &Range<u64>, bytes: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>> {
        let failed = |e| Error::io(&self.path, e);
        let mut before = range.start % BUFFER_BYTES as u64;
        let mut file = File::open(&self.path).map_err(failed)?;
        file.seek(SeekFrom::Start(range.start - before)).map_err(failed)?;
        let mut raw = BufReader::with_capacity(BUFFER_BYTES, CountingReader { file, bytes });
        while before > 0 {
            let skipped = raw.fill_buf().map_err(failed)?.len().min(before as usize);
            if skipped == 0 {
                break; // the file has become shorter: `check_unchanged` reports it
            }
            raw.consume(skipped);
            before -= skipped as u64;
        }
        Ok(Box::new(raw.take(range.end - range.start)))
    }

    /// Whether the file's beginning shows line ends of old Macs.
    pub fn has_old_line_ends(&self) -> Result<bool> {
        let mut head = Vec::new();
        let file = File::open(&self.path).map_err(|e| Error::io(&self.path, e))?;
        file.take(FRAGMENT_BYTES as u64).read_to_end(&mut head).map_err(|e| Error::io(&self.path, e))?;
        Ok(has_old_line_ends(&head))
    }

    /// The file itself, or an unpacked temporary copy of a compressed one, because seeking is needed.
    pub fn open_seekable(&self) -> Result<File> {
        if self.compression == Compression::None {
            return File::open(&self.path).map_err(|e| Error::io(&self.path, e));
        }
        let mut unpacked = tempfile::tempfile().map_err(|e| Error::io(std::env::temp_dir(), e))?;
        let uncounted = AtomicU64::new(0);
        let mut stream = self.open(&uncounted)?;
        std::io::copy(&mut stream, &mut unpacked).map_err(|error| match error.kind() {
            StorageFull | QuotaExceeded => write_error(&std::env::temp_dir(), error),
            _ => self.unreadable(&error),
        })?;
        Ok(unpacked)
    }

    /// An error if the file changed since it was listed: what was read may be a mix of old and new.
    pub fn check_unchanged(&self) -> Result<()> {
        let what = match std::fs::metadata(&self.path) {
            Ok(now) if now.len() == self.size && now.modified().ok() == self.modified => return Ok(()),
            Ok(now) if now.len() == self.size => "was written to".to_owned(),
            Ok(now) => format!("went from {} to {} bytes", self.size, now.len()),
            Err(error) if error.kind() == NotFound => "disappeared".to_owned(),
            Err(error) => return Err(Error::io(&self.path, error)),
        };
        let path = self.path.display();
        Err(Error::Input(format!("{path}: {what} while it was in use; run again when nothing changes it")))
    }

    /// The error for a failed read: the system's, or damaged compressed data.
    pub fn unreadable(&self, error: &std::io::Error) -> Error {
        if error.raw_os_error().is_some() || self.compression == Compression::None {
            return Error::io(&self.path, std::io::Error::new(error.kind(), error.to_string()));
        }
        let (path, kind) = (self.path.display(), self.compression.name());
        let what = match error.kind() {
            std::io::ErrorKind::UnexpectedEof => "is cut off".to_owned(),
            _ => format!("cannot be unpacked ({error})"),
        };
        Error::Input(format!("{path}: the {kind} data {what}; get the file again"))
    }
}

fn buffered<'a>(reader: impl Read + 'a) -> Box<dyn BufRead + 'a> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, reader))
}
