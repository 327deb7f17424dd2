//! The objects of a JSON file, in a list or in sequence, each on any number of lines, and the layouts of files.

use std::io::{BufRead, Error as IoError, Read};
use std::sync::atomic::AtomicU64;

use super::input_file::InputFile;
use super::json::has_text;
use super::read_options::{InputFormat, ReadOptions};
use super::text::MAX_LINE_BYTES;
use crate::error::{Error, Result};

/// Bytes at the start of a file that show its layout: a first object and the beginning of another one.
const HEAD_BYTES: u64 = 16 << 20;

pub(super) struct Object {
    pub bytes: Vec<u8>,
    pub offset: u64,
    pub line: u64,
}

pub(super) enum Trouble {
    Unreadable(IoError),
    Malformed { line: u64, reason: String },
}

impl Trouble {
    pub fn in_file(self, file: &InputFile) -> Error {
        match self {
            Self::Unreadable(error) => file.unreadable(&error),
            Self::Malformed { line, reason } => Error::at(&file.path, format!("line {line}: {reason}")),
        }
    }
}

impl From<IoError> for Trouble {
    fn from(error: IoError) -> Self {
        Self::Unreadable(error)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Start,
    Sequence,
    List,
    End,
}

pub(super) struct Objects<R> {
    input: R,
    state: State,
    offset: u64,
    line: u64,
}

impl<R: BufRead> Objects<R> {
    pub fn new(input: R) -> Self {
        Self { input, state: State::Start, offset: 0, line: 1 }
    }

    pub fn next(&mut self) -> std::result::Result<Option<Object>, Trouble> {
        use State::{End, List, Sequence, Start};
        while let Some(&byte) = self.input.fill_buf()?.first() {
            self.state = match (byte, self.state) {
                (b'{', Start | Sequence) => Sequence,
                (b'{', List) => List,
                (b'[', Start) => List,
                (b']', List) => End,
                (b',', List) | (b' ' | b'\t' | b'\r' | b'\n', _) => self.state,
                (0xef | 0xbb | 0xbf, Start) if self.offset < 3 => Start, // the byte order mark
                _ => {
                    return Err(
                        self.malformed("expected an object such as {\"text\": \"…\"}; fix or remove it")
                    );
                }
            };
            if byte == b'{' {
                return self.object().map(Some);
            }
            self.line += u64::from(byte == b'\n');
            self.advance(1);
        }
        match self.state {
            List => Err(self.malformed("the list is truncated; download the file again")),
            Start | Sequence | End => Ok(None),
        }
    }

    fn object(&mut self) -> std::result::Result<Object, Trouble> {
        let (mut object, mut depth) = (Object { bytes: Vec::new(), offset: self.offset, line: self.line }, 0);
        let (mut in_string, mut is_escaped) = (false, false);
        loop {
            let chunk = self.input.fill_buf()?;
            let ends = chunk.iter().position(|&byte| {
                let is_plain = !std::mem::take(&mut is_escaped);
                match byte {
                    b'"' if is_plain => in_string = !in_string,
                    b'\\' if in_string && is_plain => is_escaped = true,
                    b'{' | b'[' if !in_string => depth += 1,
                    b'}' | b']' if !in_string => depth -= 1,
                    _ => {}
                }
                depth == 0
            });
            let length = ends.map_or(chunk.len(), |at| at + 1);
            object.bytes.extend_from_slice(&chunk[..length]);
            self.advance(length);
            if ends.is_some() {
                self.line += memchr::memchr_iter(b'\n', &object.bytes).count() as u64;
                return Ok(object);
            }
            if length == 0 {
                return Err(self.malformed(
                    "the object that begins here does not end; fix it, or download the file again",
                ));
            }
            if object.bytes.len() > MAX_LINE_BYTES {
                return Err(self.malformed("the object that begins here is longer than 1 GiB; split it"));
            }
        }
    }

    fn advance(&mut self, count: usize) {
        self.input.consume(count);
        self.offset += count as u64;
    }

    fn malformed(&self, reason: &str) -> Trouble {
        Trouble::Malformed { line: self.line, reason: reason.to_owned() }
    }
}

/// The layout of a file that ends in `.json`, by its first objects: lines, or objects in sequence. `None` if it
/// holds settings or other data instead of records: one object, or a list, without the text field.
pub(super) fn layout(file: &InputFile, reading: &ReadOptions) -> Result<Option<InputFormat>> {
    let uncounted = AtomicU64::new(0);
    let mut objects = Objects::new(file.open_text(&uncounted)?.take(HEAD_BYTES));
    let first = match objects.next() {
        Ok(Some(first)) => first,
        Err(Trouble::Unreadable(error)) => return Err(file.unreadable(&error)),
        Ok(None) | Err(Trouble::Malformed { .. }) => return Ok(None),
    };
    let is_list = objects.state == State::List;
    let first_end = objects.line;
    let next_line = match objects.next() {
        Ok(next) => next.map(|next| next.line),
        Err(Trouble::Malformed { line, .. }) => Some(line),
        Err(Trouble::Unreadable(error)) => return Err(file.unreadable(&error)),
    };
    if (is_list || next_line.is_none()) && !has_text(&first.bytes, reading) {
        return Ok(None);
    }
    let is_by_line = first_end == first.line && next_line.is_none_or(|line| line > first_end);
    Ok(Some(if is_by_line && !is_list { InputFormat::JsonLines } else { InputFormat::Json }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::input::Inputs;

    fn objects(text: &str) -> std::result::Result<Vec<(u64, String)>, String> {
        // A small buffer, so that it ends within objects and escapes.
        let mut objects = Objects::new(std::io::BufReader::with_capacity(3, text.as_bytes()));
        let mut all = Vec::new();
        loop {
            match objects.next() {
                Ok(Some(object)) => {
                    assert!(text.as_bytes()[object.offset as usize..].starts_with(&object.bytes));
                    all.push((object.line, String::from_utf8(object.bytes).unwrap()));
                }
                Ok(None) => return Ok(all),
                Err(Trouble::Malformed { line, reason }) => return Err(format!("{line}: {reason}")),
                Err(Trouble::Unreadable(error)) => return Err(error.to_string()),
            }
        }
    }

    #[test]
    fn objects_are_read_from_lists_and_sequences() {
        let (a, b) = (r#"{"text": "}\"\\", "x": [1, {"y": "]"}]}"#, "{\n\"text\": \"b\"\n}");
        for text in [
            format!("{a}\n{b}\n"),
            format!("{a} {b}"),
            format!("[{a},\n{b}]\n"),
            format!("\u{feff} [ {a} , {b} ] "),
        ] {
            let parsed = objects(&text).unwrap();
            assert_eq!(parsed.iter().map(|(_, text)| &**text).collect::<Vec<_>>(), [a, b], "{text}");
        }
        let parsed = objects(&format!("\n[\n{a},\n\n{b},\n{a}\n]")).unwrap();
        assert_eq!(parsed.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3, 5, 8]);
        assert_eq!(objects(" \n").unwrap(), []);
        for (text, error) in [
            ("[{},\n{}", "2: the list is truncated"),
            ("{}\n{\"a\": \"}", "2: the object that begins here does not end"),
            ("[\"a\"]", "1: expected an object"),
            ("[{}] {}", "1: expected an object"),
            ("{}, {}", "1: expected an object"),
            ("null", "1: expected an object"),
        ] {
            let message = objects(text).unwrap_err();
            assert!(message.starts_with(error), "{text}: {message}");
        }
    }

    #[test]
    fn only_record_files_of_a_folder_are_read() {
        use InputFormat::{Json, JsonLines};
        let line = r#"{"text": "a", "n": NaN}"#;
        let long = format!("{{\"text\": \"{}\"}}\n", "x".repeat(HEAD_BYTES as usize / 2));
        let cases: [(String, Option<InputFormat>); 14] = [
            (format!("{line}\n{line}\n"), Some(JsonLines)),
            (format!("\u{feff}{line}"), Some(JsonLines)),
            (format!("\n\n{line}\n\n"), Some(JsonLines)),
            ("{\"body\": \"a\"}\n{\"body\": \"b\"}\n".to_owned(), Some(JsonLines)), // the error lists the fields
            (long.repeat(3), Some(JsonLines)),
            (format!("{line}{line}\n"), Some(Json)),
            (format!("[{line},\n{line}]"), Some(Json)),
            (format!("[\n  {line}\n]"), Some(Json)),
            ("{\n  \"text\": \"a\"\n}\n".to_owned(), Some(Json)),
            ("{\n  \"body\": \"a\"\n}\n{}".to_owned(), Some(Json)),
            ("{\"license\": \"MIT\"}\n".to_owned(), None),
            ("{\"text\": {\"dtype\": \"string\"}}\n".to_owned(), None),
            ("[{\"id\": 1}, {\"id\": 2}]".to_owned(), None),
            (String::new(), None),
        ];
        for (number, (text, expected)) in cases.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("b.JSON");
            std::fs::write(&path, text).unwrap();
            std::fs::write(dir.path().join("c.txt"), "c").unwrap();
            let expand =
                |path: &Path| Inputs::expand(&[path.to_owned()], None, &ReadOptions::default()).unwrap();
            let inputs = expand(dir.path());
            let formats: Vec<_> = inputs.files.iter().map(|file| file.format).collect();
            let both: Vec<_> = expected.iter().copied().chain([InputFormat::Text]).collect();
            assert_eq!(
                (formats, inputs.passed_over.files),
                (both, usize::from(expected.is_none())),
                "case {number}"
            );
            // A file passed by name is read in any case, and its errors report missing fields.
            assert_eq!(expand(&path).files[0].format, expected.unwrap_or(Json));
        }
    }
}
