//! Input groups, the unit of resuming and of partitions: consecutive files, or a part of a huge file.
//!
//! Which files form a group depends on their names and sizes alone, so every machine forms the same groups without
//! opening a file. A part is a range of bytes; its text follows a rule on which the readers of neighboring
//! parts agree without communicating: it begins at the first line (blank line) that ends (begins) at or after the
//! part's first byte; a row group or record batch belongs to the part that contains its first byte. So a part may be
//! empty, and nothing is read twice.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use serde::{Deserialize, Serialize};

use super::files::Inputs;
use super::input_file::{Compression, InputFile};
use super::read_options::{DocumentSeparator, InputFormat, ReadOptions};
use super::text::FRAGMENT_BYTES;
use crate::error::Result;

/// Bytes at which a group of consecutive files is complete.
const GROUP_BYTES: u64 = 4 << 20;
/// A larger file is divided into parts of at most this size, if its format allows.
pub(crate) const PART_BYTES: u64 = 512 << 20;

#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub file: &'a InputFile,
    pub part: Option<&'a Part>,
    pub reading: &'a ReadOptions,
    pub bytes: &'a AtomicU64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InputGroup {
    pub files: Range<usize>,
    pub part: Option<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub start: u64,
    pub end: u64,
}

impl InputGroup {
    pub fn num_bytes(&self, inputs: &Inputs) -> u64 {
        match &self.part {
            Some(part) => part.end - part.start,
            None => inputs.files[self.files.clone()].iter().map(|file| file.size).sum(),
        }
    }
}

impl Inputs {
    /// The input groups: consecutive files of at least 4 MiB in total, and parts of at most `part_bytes`.
    pub fn input_groups(&self, reading: &ReadOptions, part_bytes: u64) -> Vec<InputGroup> {
        let (mut groups, mut start, mut bytes) = (Vec::new(), 0, 0);
        for (index, file) in self.files.iter().enumerate() {
            let is_divided = file.is_divided(reading, part_bytes);
            if is_divided && start < index {
                groups.push(InputGroup { files: start..index, part: None });
            }
            if is_divided {
                let group = |part| InputGroup { files: index..index + 1, part: Some(part) };
                groups.extend(parts(file.size, part_bytes).map(group));
                (start, bytes) = (index + 1, 0);
                continue;
            }
            bytes += file.size;
            if bytes >= GROUP_BYTES || index + 1 == self.files.len() {
                groups.push(InputGroup { files: start..index + 1, part: None });
                (start, bytes) = (index + 1, 0);
            }
        }
        groups
    }
}

impl InputFile {
    /// Whether the file is read in parts, by its name and size.
    pub fn is_divided(&self, reading: &ReadOptions, part_bytes: u64) -> bool {
        let is_whole = match self.format {
            InputFormat::Text => reading.separator == DocumentSeparator::File,
            format => format == InputFormat::Json,
        };
        self.size > part_bytes && self.regular && self.compression == Compression::None && !is_whole
    }
}

impl Part {
    /// Whether this is the file's first part. If the file turns out to be indivisible, the first part's reader reads all of it.
    pub fn is_first(&self) -> bool {
        self.start == 0
    }

    pub fn contains(&self, first_byte: u64) -> bool {
        (self.start..self.end).contains(&first_byte)
    }
}

fn parts(size: u64, part_bytes: u64) -> impl Iterator<Item = Part> {
    let count = size.div_ceil(part_bytes.max(1));
    let bound = move |index| (u128::from(size) * u128::from(index) / u128::from(count)) as u64;
    (0..count).map(move |index| Part { start: bound(index), end: bound(index + 1) })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SplitPoint {
    /// After the first "\n" at or after the nominal offset.
    Line,
    /// Before the first blank line that begins at or after the nominal offset. Lines as long as a fragment do not count,
    /// even if blank: whether their fragments appear blank depends on the buffer.
    BlankLine,
}

impl SplitPoint {
    /// The range of a part's text, `None` if it is empty. The lines must end in "\n".
    pub fn text_of(self, part: &Part, file: &InputFile) -> Result<Option<Range<u64>>> {
        let failed = |e| file.unreadable(&e);
        let mut input = BufReader::new(file.raw()?);
        let mut find = |from, limit| self.find(&mut input, from, limit).map_err(failed);
        // A boundary beyond the part is also the next part's boundary, so this part is empty.
        let Some(start) = find(part.start, part.end)? else { return Ok(None) };
        let end = if part.end < file.size { find(part.end, u64::MAX)? } else { None };
        Ok(Some(start..end.unwrap_or(file.size)))
    }

    fn find(self, input: &mut (impl BufRead + Seek), from: u64, limit: u64) -> std::io::Result<Option<u64>> {
        if from == 0 {
            return Ok(Some(0));
        }
        match self {
            Self::Line => {
                input.seek(SeekFrom::Start(from))?;
                after_newline(input, from, limit)
            }
            Self::BlankLine => {
                input.seek(SeekFrom::Start(from - 1))?;
                match after_newline(input, from - 1, limit)? {
                    Some(start) => blank_line(input, start, limit),
                    None => Ok(None),
                }
            }
        }
    }
}

/// The offset after the next "\n" from the offset `at`; `None` if there is none before `limit`.
fn after_newline(input: &mut impl BufRead, mut at: u64, limit: u64) -> std::io::Result<Option<u64>> {
    loop {
        let chunk = input.fill_buf()?;
        if chunk.is_empty() || at >= limit {
            return Ok(None);
        }
        let length = chunk.len();
        if let Some(newline) = memchr::memchr(b'\n', chunk) {
            input.consume(newline + 1);
            let newline = at + newline as u64;
            return Ok((newline < limit).then_some(newline + 1));
        }
        input.consume(length);
        at += length as u64;
    }
}

/// The offset of the next blank line that begins before `limit`, from a line that begins at `start`.
fn blank_line(input: &mut impl BufRead, mut start: u64, limit: u64) -> std::io::Result<Option<u64>> {
    let mut line = Vec::new();
    while start < limit {
        line.clear();
        let length = input.by_ref().take(FRAGMENT_BYTES as u64).read_until(b'\n', &mut line)?;
        if length == 0 {
            return Ok(None);
        }
        let is_whole = length < FRAGMENT_BYTES || line.ends_with(b"\n");
        if is_whole && std::str::from_utf8(&line).is_ok_and(|text| text.trim().is_empty()) {
            return Ok(Some(start));
        }
        start += length as u64;
        if !is_whole {
            match after_newline(input, start, u64::MAX)? {
                Some(next) => start = next,
                None => return Ok(None),
            }
        }
    }
    Ok(None)
}
