//! One input file: its metadata before it is read, and opening it, decompressed, as a whole or in part.

use std::fs::File;
use std::io::ErrorKind::{NotFound, QuotaExceeded, StorageFull};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::encoding::{Encoding, HEAD_BYTES, Utf16Reader};
use super::raw_file::RawFile;
use super::read_options::InputFormat;
use super::stored::StoredObject;
use super::zstd_window::{WindowedReader, remedy_of, window_of};
use crate::error::{Error, Result};
use crate::format::write_error;
use crate::store::Cancel;

const BUFFER_BYTES: usize = 1 << 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
    Xz,
}

impl Compression {
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Whether compressed data can begin with `head`, which may be shorter than the magic bytes.
    fn may_begin_with(self, head: &[u8]) -> bool {
        let begins = |magic: &[u8]| head.iter().zip(magic).all(|(byte, expected)| byte == expected);
        match self {
            Self::None => true,
            Self::Gzip => begins(&[0x1f, 0x8b]),
            // A data frame, or the skippable frame that parallel compressors write first.
            Self::Zstd => {
                begins(&[0x28, 0xb5, 0x2f, 0xfd])
                    || (0x50..=0x5f).any(|kind| begins(&[kind, 0x2a, 0x4d, 0x18]))
            }
            Self::Xz => begins(b"\xfd7zXZ\0"),
        }
    }
}

/// One file to read. It is serialized for processes on other machines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct InputFile {
    pub path: PathBuf,
    /// The path relative to the common parent of all inputs, which is the same on every machine.
    pub name: String,
    pub size: u64,
    /// Whether it is a regular file, which unlike a pipe can be read more than once.
    pub regular: bool,
    pub modified: Option<SystemTime>,
    pub format: InputFormat,
    pub compression: Compression,
    #[serde(default)]
    pub object: Option<StoredObject>,
}

struct CountingReader<'a> {
    file: RawFile,
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
    pub fn new(
        path: &Path,
        full: &Path,
        size: u64,
        (format, compression): (InputFormat, Compression),
    ) -> Self {
        let (path, name) = (path.to_owned(), full.to_string_lossy().into_owned());
        Self { path, name, size, regular: true, modified: None, format, compression, object: None }
    }

    pub fn cancel_with(&mut self, cancel: &Cancel) {
        if let Some(object) = &mut self.object {
            object.cancel = cancel.clone();
        }
    }

    pub(super) fn raw(&self) -> Result<RawFile> {
        match &self.object {
            None => File::open(&self.path).map(RawFile::Local).map_err(|e| Error::io(&self.path, e)),
            Some(object) => Ok(RawFile::Stored(Box::new(object.open()?))),
        }
    }

    pub fn open<'a>(&self, bytes: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>> {
        let file = self.raw()?;
        if self.size == 0 && self.compression != Compression::None {
            return Err(self.unreadable(&std::io::ErrorKind::UnexpectedEof.into()));
        }
        let mut raw = BufReader::with_capacity(BUFFER_BYTES, CountingReader { file, bytes });
        let head = raw.fill_buf().map_err(|e| self.unreadable(&e))?;
        if !self.compression.may_begin_with(head) {
            let kind = self.compression.name();
            let reason = format!("is not {kind} data, despite its name; if it is plain text, rename it");
            return Err(Error::at(&self.path, reason));
        }
        Ok(match self.compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => buffered(flate2::bufread::MultiGzDecoder::new(raw)),
            Compression::Zstd => {
                let window = window_of(head).unwrap_or(0);
                buffered(WindowedReader::new(raw, window).map_err(|e| self.unreadable(&e))?)
            }
            Compression::Xz => buffered(liblzma::bufread::XzDecoder::new_multi_decoder(raw)),
        })
    }

    /// The decompressed text as UTF-8; `bytes` counts the bytes read from disk. Invalid text stays invalid.
    pub fn open_text<'a>(&self, bytes: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>> {
        let mut input = self.open(bytes)?;
        let mut head = input.fill_buf().map_err(|e| self.unreadable(&e))?.to_vec();
        // Chunks end at the usual offsets, except for a pipe whose first read is shorter than a byte order mark.
        if head.len() < 4 {
            input.consume(head.len());
            let rest = &mut input.by_ref().take(HEAD_BYTES as u64);
            rest.read_to_end(&mut head).map_err(|e| self.unreadable(&e))?;
            input = Box::new(std::io::Cursor::new(head.clone()).chain(input));
        }
        match Encoding::of(&head, &self.path)? {
            Encoding::Utf8 => Ok(input),
            Encoding::Utf16 { big_endian } => Ok(buffered(Utf16Reader::new(input, big_endian))),
        }
    }

    /// A range of an uncompressed file; `bytes` counts the bytes read from disk.
    ///
    /// Chunks end at the same offsets as when the whole file is read, because very long lines are cut according to
    /// the content of the buffer.
    pub fn open_range<'a>(&self, range: &Range<u64>, bytes: &'a AtomicU64) -> Result<Box<dyn BufRead + 'a>> {
        let failed = |e| self.unreadable(&e);
        let mut before = range.start % BUFFER_BYTES as u64;
        let mut file = self.raw()?;
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

    pub(super) fn open_seekable(&self) -> Result<RawFile> {
        if self.compression == Compression::None {
            return self.raw();
        }
        let mut unpacked = tempfile::tempfile().map_err(|e| Error::io(std::env::temp_dir(), e))?;
        let uncounted = AtomicU64::new(0);
        let mut stream = self.open(&uncounted)?;
        std::io::copy(&mut stream, &mut unpacked).map_err(|error| match error.kind() {
            StorageFull | QuotaExceeded => write_error(&std::env::temp_dir(), error),
            _ => self.unreadable(&error),
        })?;
        Ok(RawFile::Local(unpacked))
    }

    /// Fails if the file changed since it was listed, because the bytes read may be a mix of old and new ones. For an object,
    /// fails with the store's error: a store refuses to send bytes of any version but the listed one.
    pub fn check_unchanged(&self) -> Result<()> {
        if let Some(object) = &self.object {
            return object.failure().map_or(Ok(()), Err);
        }
        let change = match std::fs::metadata(&self.path) {
            Ok(now) if now.len() == self.size && now.modified().ok() == self.modified => return Ok(()),
            Ok(now) if now.len() == self.size => "was modified".to_owned(),
            Ok(now) => format!("changed from {} to {} bytes", self.size, now.len()),
            Err(error) if error.kind() == NotFound => "disappeared".to_owned(),
            Err(error) => return Err(Error::io(&self.path, error)),
        };
        Err(Error::at(
            &self.path,
            format!("{change} while in use; run again once no other program is writing to it"),
        ))
    }

    pub fn unreadable(&self, error: &std::io::Error) -> Error {
        if let Some(failed) = self.object.as_ref().and_then(StoredObject::failure) {
            return failed;
        }
        if error.raw_os_error().is_some() || self.compression == Compression::None {
            return Error::io(&self.path, std::io::Error::new(error.kind(), error.to_string()));
        }
        let problem = match (error.kind(), remedy_of(error)) {
            (std::io::ErrorKind::UnexpectedEof, _) => "is truncated; download the file again".to_owned(),
            (_, Some(remedy)) if self.compression == Compression::Zstd => remedy,
            _ => format!("cannot be decompressed ({error}); download the file again"),
        };
        Error::at(&self.path, format!("the {} data {problem}", self.compression.name()))
    }
}

fn buffered<'a>(reader: impl Read + 'a) -> Box<dyn BufRead + 'a> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, reader))
}
