//! Bytes to lines: UTF-8 checked with offsets, BOM and CRLF handled, endless lines cut.

use std::io::BufRead;
use std::path::Path;

use crate::error::{Error, Result};

/// Lines longer than this are handed on in fragments where the tokenizer allows it.
pub(crate) const FRAGMENT: usize = 64 << 10;
/// No line, word or JSON record may need more memory than this.
const LONGEST: usize = 1 << 30;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// What to do with bytes that are not UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InvalidUtf8 {
    /// Stop and say where.
    #[default]
    Error,
    /// Read each bad sequence as U+FFFD.
    Replace,
}

/// A line or, if lines may be cut, a piece of one.
pub(crate) struct Fragment<'a> {
    pub text: std::borrow::Cow<'a, str>,
    pub ends_line: bool,
}

/// Reads lines from a decompressed stream.
pub(crate) struct Lines<'a, R> {
    input: R,
    path: &'a Path,
    invalid: InvalidUtf8,
    cut: bool,
    buffer: Vec<u8>,
    /// Where in the buffer the next fragment begins.
    start: usize,
    /// Offset of that place in the stream.
    offset: u64,
    /// Number of the current line, from 1.
    pub number: u64,
    ended_line: bool,
}

impl<'a, R: BufRead> Lines<'a, R> {
    /// Reads from the stream's start; with `cut`, long lines come in pieces cut after whitespace.
    pub fn new(input: R, path: &'a Path, invalid: InvalidUtf8, cut: bool) -> Self {
        let buffer = Vec::new();
        Self { input, path, invalid, cut, buffer, start: 0, offset: 0, number: 0, ended_line: true }
    }

    /// The next fragment; `unreadable` words the stream's errors.
    pub fn next(&mut self, unreadable: impl Fn(&std::io::Error) -> Error) -> Result<Option<Fragment<'_>>> {
        self.number += u64::from(self.ended_line);
        let (mut searched, mut limit) = (0, FRAGMENT);
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.start + searched..]) {
                return self.fragment(searched + at, 1, true).map(Some);
            }
            searched = self.buffer.len() - self.start;
            if self.cut && searched >= limit {
                if let Some(at) = memchr::memrchr2(b' ', b'\t', &self.buffer[self.start..]) {
                    return self.fragment(at + 1, 0, false).map(Some);
                }
                limit = searched * 2;
            }
            if searched > LONGEST {
                let (path, number) = (self.path.display(), self.number);
                return Err(Error::Input(format!("{path}: line {number} is longer than 1 GiB; cut it up")));
            }
            let chunk = self.input.fill_buf().map_err(|e| unreadable(&e))?;
            let length = chunk.len();
            if length == 0 && searched == 0 && self.ended_line {
                return Ok(None);
            }
            if length == 0 {
                return self.fragment(searched, 0, true).map(Some);
            }
            self.buffer.drain(..std::mem::take(&mut self.start));
            self.buffer.extend_from_slice(chunk);
            self.input.consume(length);
        }
    }

    fn fragment(&mut self, length: usize, newline: usize, ends_line: bool) -> Result<Fragment<'_>> {
        let offset = self.offset;
        let bytes = &self.buffer[self.start..self.start + length];
        self.start += length + newline;
        self.offset += (length + newline) as u64;
        let bytes = if newline == 1 { bytes.strip_suffix(b"\r").unwrap_or(bytes) } else { bytes };
        let (bytes, bom) = match bytes.strip_prefix(BOM) {
            Some(rest) if offset == 0 => (rest, BOM.len() as u64),
            _ => (bytes, 0),
        };
        self.ended_line = ends_line;
        let text = match (std::str::from_utf8(bytes), self.invalid) {
            (Ok(text), _) => text.into(),
            (Err(_), InvalidUtf8::Replace) => String::from_utf8_lossy(bytes),
            (Err(error), InvalidUtf8::Error) => {
                let at = offset + bom + error.valid_up_to() as u64;
                return Err(invalid_utf8(self.path, at));
            }
        };
        Ok(Fragment { text, ends_line })
    }
}

fn invalid_utf8(path: &Path, at: u64) -> Error {
    let path = path.display();
    Error::Input(format!(
        "{path}: invalid UTF-8 at byte {at} of the text; convert the file, or read such bytes as U+FFFD \
         with --invalid-utf8 replace"
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8], invalid: InvalidUtf8, cut: bool) -> Result<Vec<String>> {
        let mut lines = Lines::new(std::io::BufReader::with_capacity(7, bytes), Path::new("x"), invalid, cut);
        let (mut all, mut line) = (Vec::new(), String::new());
        while let Some(fragment) = lines.next(|e| Error::Input(e.to_string()))? {
            line.push_str(&fragment.text);
            if fragment.ends_line {
                all.push(std::mem::take(&mut line));
            }
        }
        assert!(line.is_empty());
        Ok(all)
    }

    #[test]
    fn marks_and_line_ends_are_not_text() {
        let lines = read(b"\xef\xbb\xbfa\r\n\r\nb\xef\xbb\xbf\nc", InvalidUtf8::Error, true).unwrap();
        assert_eq!(lines, ["a", "", "b\u{feff}", "c"]);
        assert!(read(b"", InvalidUtf8::Error, true).unwrap().is_empty());
    }

    #[test]
    fn bad_bytes_are_placed() {
        let error = read(b"\xef\xbb\xbfok\nab\xffc\n", InvalidUtf8::Error, true).unwrap_err().to_string();
        assert!(error.contains("at byte 8 ") && error.contains("--invalid-utf8 replace"), "{error}");
        assert_eq!(read(b"ab\xffc", InvalidUtf8::Replace, true).unwrap(), ["ab\u{fffd}c"]);
    }

    #[test]
    fn endless_lines_are_cut_only_at_whitespace() {
        let text = "wörd ".repeat(3 * FRAGMENT / 6) + &"x".repeat(3 * FRAGMENT) + " end";
        let mut lines =
            Lines::new(std::io::BufReader::new(text.as_bytes()), Path::new("x"), InvalidUtf8::Error, true);
        let (mut all, mut count) = (String::new(), 0);
        while let Some(fragment) = lines.next(|e| Error::Input(e.to_string())).unwrap() {
            assert!(fragment.ends_line || fragment.text.ends_with(' '));
            all.push_str(&fragment.text);
            count += 1;
        }
        assert!(count >= 3);
        assert_eq!(all, text);
    }

    proptest! {
        #[test]
        fn lines_agree_with_the_standard_library(text in "[a-z\r\n ß]{0,60}") {
            let expected: Vec<String> = text.lines().map(str::to_owned).collect();
            prop_assert_eq!(read(text.as_bytes(), InvalidUtf8::Error, false).unwrap(), expected);
        }
    }
}
