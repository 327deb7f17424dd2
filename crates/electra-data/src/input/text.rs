//! Bytes to lines: checks UTF-8, strips BOM and CR, cuts very long lines at positions that [`Cut`] allows.

use std::borrow::Cow;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::encoding::Encoding;
use super::input_file::InputFile;
use super::read_options::InvalidUtf8;
use crate::error::{Error, Result};

/// Bytes kept of a word longer than a fragment: still too long for any vocabulary.
const WORD_HEAD: usize = 4 << 10;
pub(super) const MAX_LINE_BYTES: usize = 1 << 30;

const BOM: &[u8] = b"\xef\xbb\xbf";

pub(super) struct Fragment<'a> {
    /// The text, or the position of invalid UTF-8. Reading can continue after it.
    pub text: std::result::Result<Cow<'a, str>, InvalidBytes>,
    pub ends_line: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineEndings {
    Newline,
    /// Like `Universal` if the first 64 KiB have a "\r" but no "\n" (files of old Macs), else like `Newline`, so
    /// that a stray "\r" in terminal output does not split a line.
    Detect,
    /// "\r", "\n" or "\r\n", like Python's `open`.
    Universal,
}

/// Whether lines end in "\r" alone, as in files of old Macs, according to the first 64 KiB.
fn has_old_line_ends(head: &[u8]) -> bool {
    memchr::memchr(b'\n', head).is_none() && memchr::memchr(b'\r', head).is_some()
}

/// Whether a text must be read as a whole, according to the start of the file: its lines end as on old Macs (unless only
/// "\n" is a line end, `newline`), or it is UTF-16.
pub(super) fn is_indivisible(file: &InputFile, newline: bool) -> Result<bool> {
    let mut head = Vec::new();
    file.raw()?.take(FRAGMENT_BYTES as u64).read_to_end(&mut head).map_err(|e| file.unreadable(&e))?;
    let is_utf8 = Encoding::of(&head, &file.path)? == Encoding::Utf8;
    Ok(!is_utf8 || (!newline && has_old_line_ends(&head)))
}

fn count_lines(file: &InputFile, bytes: u64) -> Result<u64> {
    let failed = |e| file.unreadable(&e);
    if bytes == 0 {
        return Ok(0);
    }
    let mut input = BufReader::with_capacity(1 << 18, file.raw()?.take(bytes));
    let mut lines = 0;
    loop {
        let chunk = input.fill_buf().map_err(failed)?;
        if chunk.is_empty() {
            return Ok(lines);
        }
        lines += memchr::memchr_iter(b'\n', chunk).count() as u64;
        let length = chunk.len();
        input.consume(length);
    }
}

pub(super) struct Lines<'a, R> {
    input: R,
    file: &'a InputFile,
    invalid: InvalidUtf8,
    line_ends: LineEndings,
    cut: Cut<'a>,
    buffer: Vec<u8>,
    start: usize,
    offset: u64,
    /// Bytes of the next fragment that were removed from the buffer to shorten a word.
    left_out: u64,
    /// Offset in the file where this reader began …
    begin: u64,
    /// … and the number of lines before it, once an error needs it.
    lines_before: Option<u64>,
    /// Number of the current line, counted from 1 where this reader began.
    number: u64,
    ended_line: bool,
}

impl<'a, R: BufRead> Lines<'a, R> {
    /// Reads a stream that begins at `offset`, the start of a line; long lines come in fragments if `cut` allows it.
    pub fn new(
        input: R,
        (file, begin): (&'a InputFile, u64),
        invalid: InvalidUtf8,
        line_ends: LineEndings,
        cut: Cut<'a>,
    ) -> Self {
        Self {
            input,
            file,
            invalid,
            line_ends,
            cut,
            buffer: Vec::new(),
            start: 0,
            offset: begin,
            left_out: 0,
            begin,
            lines_before: None,
            number: 0,
            ended_line: true,
        }
    }

    /// The number of the current line, from 1. Used only for errors, because it counts all lines before a part of a file.
    pub fn line_number(&mut self) -> Result<u64> {
        let before = match self.lines_before {
            Some(before) => before,
            None => *self.lines_before.insert(count_lines(self.file, self.begin)?),
        };
        Ok(before + self.number)
    }

    pub fn next(&mut self) -> Result<Option<Fragment<'_>>> {
        self.number += u64::from(self.ended_line);
        if self.line_ends == LineEndings::Detect {
            self.detect_line_ends()?;
        }
        let (mut searched, mut limit) = (0, FRAGMENT_BYTES);
        loop {
            if let Some((at, length)) = self.line_end(searched)? {
                return Ok(Some(self.fragment(at, length, true)));
            }
            searched = self.buffer.len() - self.start;
            if searched >= limit {
                if let Some(at) = self.cut.last_position(&self.buffer[self.start..]) {
                    return Ok(Some(self.fragment(at, 0, false)));
                }
                if matches!(self.cut, Cut::Words(_)) {
                    self.shorten_word()?;
                    searched = self.buffer.len() - self.start;
                } else {
                    limit = searched * 2;
                }
            }
            if searched > MAX_LINE_BYTES {
                let number = self.line_number()?;
                let reason = format!("line {number} is longer than 1 GiB; split it");
                return Err(Error::at(&self.file.path, reason));
            }
            let more = self.read_more()?;
            if !more && searched == 0 && self.ended_line {
                return Ok(None);
            }
            if !more {
                return Ok(Some(self.fragment(searched, 0, true)));
            }
        }
    }

    /// Appends the stream's next bytes to the buffer; `false` at the end.
    fn read_more(&mut self) -> Result<bool> {
        let chunk = self.input.fill_buf().map_err(|e| self.file.unreadable(&e))?;
        let length = chunk.len();
        self.buffer.drain(..std::mem::take(&mut self.start));
        self.buffer.extend_from_slice(chunk);
        self.input.consume(length);
        Ok(length > 0)
    }

    /// Removes whole characters from the middle of a word that is too long for any vocabulary.
    fn shorten_word(&mut self) -> Result<()> {
        let word = &self.buffer[self.start..];
        let character_before = |at: usize| (0..=at).rev().find(|&at| word[at] & 0xc0 != 0x80).unwrap_or(0);
        let (head, tail) = (character_before(WORD_HEAD), character_before(word.len() - 1));
        if let (Err(error), InvalidUtf8::Error) = (std::str::from_utf8(&word[..tail]), self.invalid) {
            let at = self.offset + self.left_out + error.valid_up_to() as u64;
            return Err(InvalidBytes { at }.in_file(&self.file.path));
        }
        self.left_out += (tail - head) as u64;
        self.buffer.drain(self.start + head..self.start + tail);
        Ok(())
    }

    fn detect_line_ends(&mut self) -> Result<()> {
        while self.buffer.len() < FRAGMENT_BYTES && self.read_more()? {}
        let is_old = has_old_line_ends(&self.buffer[..self.buffer.len().min(FRAGMENT_BYTES)]);
        self.line_ends = if is_old { LineEndings::Universal } else { LineEndings::Newline };
        Ok(())
    }

    /// Position and length of the next line ending in the buffer, starting at `searched`.
    fn line_end(&mut self, searched: usize) -> Result<Option<(usize, usize)>> {
        let rest = &self.buffer[self.start + searched..];
        if self.line_ends != LineEndings::Universal {
            return Ok(memchr::memchr(b'\n', rest).map(|at| (searched + at, 1)));
        }
        let Some(at) = memchr::memchr2(b'\r', b'\n', rest).map(|at| searched + at) else { return Ok(None) };
        if self.buffer[self.start + at] == b'\n' {
            return Ok(Some((at, 1)));
        }
        let followed = self.start + at + 1 < self.buffer.len() || self.read_more()?;
        let is_pair = followed && self.buffer[self.start + at + 1] == b'\n';
        Ok(Some((at, if is_pair { 2 } else { 1 })))
    }

    fn fragment(&mut self, length: usize, newline: usize, ends_line: bool) -> Fragment<'_> {
        let offset = self.offset;
        let bytes = &self.buffer[self.start..self.start + length];
        let left_out = std::mem::take(&mut self.left_out);
        self.start += length + newline;
        self.offset += (length + newline) as u64 + left_out;
        let bytes = if newline == 1 { bytes.strip_suffix(b"\r").unwrap_or(bytes) } else { bytes };
        let (bytes, bom) = match bytes.strip_prefix(BOM) {
            Some(rest) if offset == 0 => (rest, BOM.len() as u64),
            _ => (bytes, 0),
        };
        self.ended_line = ends_line;
        let text = match (std::str::from_utf8(bytes), self.invalid) {
            (Ok(text), _) => Ok(text.into()),
            (Err(_), InvalidUtf8::Replace) => Ok(String::from_utf8_lossy(bytes)),
            (Err(error), InvalidUtf8::Error) => {
                Err(InvalidBytes { at: offset + left_out + bom + error.valid_up_to() as u64 })
            }
        };
        Fragment { text, ends_line }
    }
}

#[derive(Debug)]
pub(super) struct InvalidBytes {
    pub at: u64,
}

impl InvalidBytes {
    pub const REMEDY: &str = "convert the file (iconv -f ITS-ENCODING -t UTF-8), or, if only a few bytes are wrong, \
                              read them as U+FFFD with --invalid-utf8 replace";

    pub fn reason(&self) -> String {
        format!("invalid UTF-8 at byte {} of the text", self.at)
    }

    pub fn in_file(&self, path: &Path) -> Error {
        Error::at(path, format!("{}; {}", self.reason(), Self::REMEDY))
    }
}

pub(super) const FRAGMENT_BYTES: usize = 64 << 10;

#[derive(Clone, Copy)]
pub(crate) enum Cut<'a> {
    Nowhere,
    /// After a space or tab.
    Blanks,
    /// After every character that ends a word or is a word; a very long word is shortened.
    Words(&'a (dyn Fn(char) -> bool + Sync)),
}

impl Cut<'_> {
    pub fn last_position(self, text: &[u8]) -> Option<usize> {
        let blank = memchr::memrchr2(b' ', b'\t', text).map(|at| at + 1);
        match self {
            Cut::Nowhere => None,
            Cut::Blanks => blank,
            Cut::Words(ends_word) => blank.or_else(|| last_word_end(text, ends_word)),
        }
    }

    /// The first position at which `text` may be cut; for `Words`, before the character that ends the first word.
    pub fn first_position(self, text: &str) -> Option<usize> {
        match self {
            Cut::Nowhere => None,
            Cut::Blanks => memchr::memchr2(b' ', b'\t', text.as_bytes()).map(|at| at + 1),
            Cut::Words(ends_word) => text.find(ends_word),
        }
    }
}

pub(crate) fn character_boundary(text: &str, limit: usize) -> usize {
    (0..=limit.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

fn last_word_end(text: &[u8], ends_word: &dyn Fn(char) -> bool) -> Option<usize> {
    let (mut last, mut at) = (None, 0);
    for chunk in text.utf8_chunks() {
        for (offset, c) in chunk.valid().char_indices() {
            if ends_word(c) {
                last = Some(at + offset + c.len_utf8());
            }
        }
        at += chunk.valid().len() + chunk.invalid().len();
    }
    last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::input::{Compression, InputFormat};

    /// The fragments of a text, each with a flag for the end of a line, or with an error.
    fn fragments(
        bytes: &[u8],
        invalid: InvalidUtf8,
        line_ends: LineEndings,
        cut: Cut,
    ) -> Vec<std::result::Result<(String, bool), String>> {
        // A small buffer, unless that would take too long.
        let input = BufReader::with_capacity(if bytes.len() < 1_000 { 7 } else { 8 << 10 }, bytes);
        let kind = (InputFormat::Text, Compression::None);
        let file = InputFile::new("x".as_ref(), "x".as_ref(), 0, kind);
        let mut lines = Lines::new(input, (&file, 0), invalid, line_ends, cut);
        let mut all = Vec::new();
        loop {
            match lines.next() {
                Ok(Some(Fragment { text, ends_line })) => all.push(
                    text.map(|text| (text.into_owned(), ends_line))
                        .map_err(|bad| bad.in_file("x".as_ref()).to_string()),
                ),
                Ok(None) => return all,
                Err(error) => {
                    all.push(Err(error.to_string()));
                    return all;
                }
            }
        }
    }

    fn read(bytes: &[u8], line_ends: LineEndings, cut: Cut) -> Vec<String> {
        let (mut all, mut line) = (Vec::new(), String::new());
        for fragment in fragments(bytes, InvalidUtf8::Error, line_ends, cut) {
            let (text, ends_line) = fragment.unwrap();
            line.push_str(&text);
            if ends_line {
                all.push(std::mem::take(&mut line));
            }
        }
        assert!(line.is_empty());
        all
    }

    #[test]
    fn byte_order_marks_and_line_ends_are_not_text() {
        let read = |text: &[u8]| read(text, LineEndings::Detect, Cut::Blanks);
        assert_eq!(read(b"\xef\xbb\xbfa\r\n\r\nb\xef\xbb\xbf\nc"), ["a", "", "b\u{feff}", "c"]);
        assert!(read(b"").is_empty());
        // Line ends of old Macs.
        assert_eq!(read(b"a b\r\rc\r"), ["a b", "", "c"]);
        assert_eq!(read(b"50 %\r100 %\nend\n"), ["50 %\r100 %", "end"]);
        let lines = read(&["line\r".repeat(FRAGMENT_BYTES / 5 + 1).as_bytes(), b"a\nb\r\nc"].concat());
        assert_eq!(lines.len(), FRAGMENT_BYTES / 5 + 4);
        assert_eq!(lines[lines.len() - 3..], ["a", "b", "c"]);
        assert_eq!(read(&["x".repeat(FRAGMENT_BYTES).as_bytes(), b"\na\rb"].concat()).len(), 2);
    }

    #[test]
    fn invalid_bytes_are_located_and_reading_continues() {
        let read = |bytes: &[u8], invalid, cut| fragments(bytes, invalid, LineEndings::Newline, cut);
        let lines = read(b"\xef\xbb\xbfok\nab\xffc\nd", InvalidUtf8::Error, Cut::Nowhere);
        assert_eq!((&lines[0], &lines[2]), (&Ok(("ok".into(), true)), &Ok(("d".into(), true))));
        let error = lines[1].as_ref().unwrap_err();
        assert!(error.contains("at byte 8 ") && error.contains("--invalid-utf8 replace"), "{error}");
        let replaced = read(b"ab\xffc", InvalidUtf8::Replace, Cut::Blanks);
        assert_eq!(replaced, [Ok(("ab\u{fffd}c".into(), true))]);
        // In a very long word.
        for at in [10, 1 << 20, (3 << 20) - 5, (3 << 20) + 2] {
            let mut bytes = ["x".repeat(3 << 20).as_bytes(), b" abc"].concat();
            bytes[at] = 0xff;
            let lines = read(&bytes, InvalidUtf8::Error, Cut::Words(&|c| c == ' '));
            let error = lines.into_iter().find_map(std::result::Result::err).unwrap();
            assert!(error.contains(&format!("at byte {at} ")), "{error}");
        }
    }

    #[test]
    fn very_long_lines_are_cut_without_changing_tokens() {
        let read = |text: &str, cut| -> Vec<_> {
            let pieces = fragments(text.as_bytes(), InvalidUtf8::Error, LineEndings::Newline, cut);
            pieces.into_iter().map(std::result::Result::unwrap).collect()
        };
        let joined = |pieces: &[(String, bool)]| pieces.iter().map(|(text, _)| &**text).collect::<String>();
        let text = "wörd ".repeat(3 * FRAGMENT_BYTES / 6) + &"x".repeat(3 * FRAGMENT_BYTES) + " end";
        let pieces = read(&text, Cut::Blanks);
        assert!(
            pieces.len() >= 3 && pieces.iter().all(|(text, ends_line)| *ends_line || text.ends_with(' '))
        );
        assert_eq!(joined(&pieces), text);
        // Text without spaces is cut between words, and very long words are shortened.
        let sentence = "日本語です。".repeat(FRAGMENT_BYTES / 4);
        let word = "ß".repeat(3 << 20);
        let pieces = read(&format!("{sentence}{word}。{sentence}"), Cut::Words(&|c| "。 ".contains(c)));
        assert!(pieces.iter().all(|(text, ends_line)| *ends_line || text.ends_with('。')));
        let all = joined(&pieces);
        let rest = all.strip_prefix(&sentence).and_then(|rest| rest.strip_suffix(&sentence)).unwrap();
        let short = rest.strip_suffix('。').unwrap();
        assert!(short.chars().all(|c| c == 'ß') && (WORD_HEAD..4 * FRAGMENT_BYTES).contains(&short.len()));
    }

    proptest! {
        #[test]
        fn lines_match_the_standard_library(text in "[a-z\r\n ß]{0,60}") {
            let expected: Vec<String> = text.lines().map(str::to_owned).collect();
            prop_assert_eq!(read(text.as_bytes(), LineEndings::Newline, Cut::Nowhere), expected);
            let unix = text.replace("\r\n", "\n").replace('\r', "\n");
            let expected: Vec<String> = unix.lines().map(str::to_owned).collect();
            prop_assert_eq!(read(text.as_bytes(), LineEndings::Universal, Cut::Nowhere), expected);
        }
    }
}
