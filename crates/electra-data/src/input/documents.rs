//! Files to documents: plain text and JSON lines here, Parquet and Arrow in `tables`.

use std::path::Path;
use std::sync::atomic::AtomicU64;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::arrow::read_arrow;
use super::cut::Cut;
use super::division::{Part, SplitPoint};
use super::identity::InputIdentity;
use super::input_file::{Compression, InputFile};
use super::pipeline::{Batcher, Mark};
use super::read_options::{DocumentSeparator, InputFormat, ReadOptions, missing_field};
use super::skipped::SkippedRecord;
use super::tables::read_parquet;
use super::text::{InvalidBytes, LineEndings, Lines, is_indivisible};
use crate::error::{Error, Result};
use crate::panics::caught;
use crate::store::Cancel;

/// Sends every document of a file, or of a part of it, to the batcher; `bytes` counts the bytes read from disk.
pub(crate) fn read_file(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let mut read = || match file.format {
        InputFormat::Text => read_text(file, part, reading, bytes, to),
        InputFormat::JsonLines => read_json_lines(file, part, reading, bytes, to),
        InputFormat::Parquet => read_parquet(file, part, reading, bytes, to),
        InputFormat::Arrow => read_arrow(file, part, reading, bytes, to),
    };
    let is_plain = matches!(file.format, InputFormat::Text | InputFormat::JsonLines);
    let result = if is_plain && file.compression == Compression::None { read() } else { guarded(file, read) };
    // Checked first: a change explains whatever else went wrong.
    file.check_unchanged()?;
    result
}

/// Sends the documents of an input group, and records the identities of its files.
pub(crate) fn read_input_group(
    files: &[InputFile],
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    cancel: &Cancel,
    to: &mut Batcher,
) -> Result<()> {
    for file in files {
        read_file(file, part, reading, bytes, to)?;
        to.note_input(InputIdentity::of(file, part, cancel)?);
        // Otherwise the bytes that were hashed might not be those that were read.
        file.check_unchanged()?;
    }
    Ok(())
}

/// Turns a panic into an error: the libraries that read tables and compressed files panic on some damaged ones.
fn guarded(file: &InputFile, read: impl FnOnce() -> Result<()>) -> Result<()> {
    caught(read).unwrap_or_else(|_| {
        let path = file.path.display();
        Err(Error::Input(format!("{path}: too damaged to be read; get the file again")))
    })
}

fn read_text(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let boundary = match reading.separator {
        DocumentSeparator::Line => SplitPoint::Line,
        DocumentSeparator::BlankLine | DocumentSeparator::File => SplitPoint::BlankLine,
    };
    let is_whole = part.is_some() && is_indivisible(file, false)?;
    let (input, begin, line_ends) = match part.filter(|_| !is_whole) {
        Some(part) => match boundary.text_of(part, file)? {
            Some(range) => (file.open_range(&range, bytes)?, range.start, LineEndings::Newline),
            None => return Ok(()),
        },
        None if part.is_some_and(|part| !part.is_first()) => return Ok(()),
        None => (file.open_text(bytes)?, 0, LineEndings::Detect),
    };
    let mut lines =
        Lines::new(input, &file.path, reading.invalid_utf8, line_ends, to.cut()).beginning_at(begin, file);
    // Whether the current line and the current document have any text yet.
    let (mut line_begun, mut document_begun) = (false, reading.separator == DocumentSeparator::File);
    while let Some(fragment) = lines.next(|e| file.unreadable(e))? {
        let text = fragment.text.map_err(|bad| bad.in_file(&file.path))?;
        let blank = !line_begun && text.trim().is_empty() && fragment.ends_line;
        line_begun = !fragment.ends_line;
        if blank && reading.separator != DocumentSeparator::File {
            if std::mem::take(&mut document_begun) {
                to.push("", Mark::Document)?;
            }
            continue;
        }
        document_begun = true;
        to.push(&text, if fragment.ends_line { Mark::Line } else { Mark::Partial })?;
        if fragment.ends_line && reading.separator == DocumentSeparator::Line {
            to.push("", Mark::Document)?;
            document_begun = false;
        }
    }
    if document_begun { to.push("", Mark::Document) } else { Ok(()) }
}

fn read_json_lines(
    file: &InputFile,
    part: Option<&Part>,
    reading: &ReadOptions,
    bytes: &AtomicU64,
    to: &mut Batcher,
) -> Result<()> {
    let is_whole = part.is_some() && is_indivisible(file, true)?;
    let (input, begin) = match part.filter(|_| !is_whole) {
        Some(part) => match SplitPoint::Line.text_of(part, file)? {
            Some(range) => (file.open_range(&range, bytes)?, range.start),
            None => return Ok(()),
        },
        None if part.is_some_and(|part| !part.is_first()) => return Ok(()),
        None => (file.open_text(bytes)?, 0),
    };
    // A record must be parsed as a whole, so its line is never cut.
    let mut lines = Lines::new(input, &file.path, reading.invalid_utf8, LineEndings::Newline, Cut::Nowhere)
        .beginning_at(begin, file);
    while let Some(fragment) = lines.next(|e| file.unreadable(e))? {
        let document = match &fragment.text {
            Ok(text) if text.trim().is_empty() => continue,
            Ok(text) => parse_record(text, &reading.text_fields),
            Err(bad) => Err(BadRecord { column: None, reason: bad.reason(), remedy: InvalidBytes::REMEDY }),
        };
        match document {
            Ok(document) => to.push_document(&document)?,
            Err(bad) => {
                let number = lines.line_number()?;
                to.skip(bad.skipped(&file.name, number), &bad.error(&file.path, number))?;
            }
        }
    }
    Ok(())
}

/// The error in a record, and the remedy.
#[derive(Debug)]
struct BadRecord {
    column: Option<usize>,
    reason: String,
    remedy: &'static str,
}

impl BadRecord {
    fn error(&self, path: &Path, line: u64) -> Error {
        let column = self.column.map_or(String::new(), |column| format!(", column {column}"));
        let (path, reason, remedy) = (path.display(), &self.reason, self.remedy);
        Error::Input(format!("{path}: line {line}{column}: {reason}; {remedy}"))
    }

    fn skipped(&self, file: &str, line: u64) -> SkippedRecord {
        let reason = match self.column {
            Some(column) => format!("column {column}: {}", self.reason),
            None => self.reason.clone(),
        };
        SkippedRecord { file: file.to_owned(), line, reason }
    }
}

/// The text of one JSON record: the wanted fields, joined by line ends.
fn parse_record(line: &str, fields: &[String]) -> std::result::Result<String, BadRecord> {
    let bad = |reason, remedy| BadRecord { column: None, reason, remedy };
    let mut parser = serde_json::Deserializer::from_str(line);
    let found = TextFields(fields)
        .deserialize(&mut parser)
        .and_then(|found| parser.end().map(|()| found))
        .map_err(|error| {
            let text = error.to_string();
            let reason = text.split_once(" at line ").map_or(&*text, |(reason, _)| reason);
            let reason = format!("broken JSON: {reason}");
            BadRecord { column: Some(error.column()), ..bad(reason, "fix or remove it") }
        })?;
    let mut texts = Vec::with_capacity(fields.len());
    for (field, value) in fields.iter().zip(found) {
        match value {
            Some(Field::Text(text)) => texts.push(text),
            Some(Field::Null) => {}
            Some(Field::Other(kind)) => {
                let reason = format!("field \"{field}\" is {kind}, not text");
                return Err(bad(reason, "fix or remove it, or choose with --text-field"));
            }
            None => return Err(bad(missing_field(field, &keys_of(line)), "choose with --text-field")),
        }
    }
    Ok(texts.join("\n"))
}

fn keys_of(line: &str) -> Vec<String> {
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(line)
        .map(|map| map.keys().cloned().collect())
        .unwrap_or_default()
}

/// A field's value; of values that are not text, only the kind.
enum Field {
    Text(String),
    Null,
    Other(&'static str),
}

/// Extracts the wanted fields of a JSON object and skips the others without allocating them.
struct TextFields<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for TextFields<'_> {
    type Value = Vec<Option<Field>>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<Self::Value, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextFields<'_> {
    type Value = Vec<Option<Field>>;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object such as {\"text\": \"…\"}")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<Self::Value, M::Error> {
        let mut found: Self::Value = self.0.iter().map(|_| None).collect();
        while let Some(key) = map.next_key::<std::borrow::Cow<str>>()? {
            let Some(index) = self.0.iter().position(|field| *field == key) else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            found[index] = Some(match map.next_value()? {
                serde_json::Value::String(text) => Field::Text(text),
                serde_json::Value::Null => Field::Null,
                serde_json::Value::Bool(_) => Field::Other("a boolean"),
                serde_json::Value::Number(_) => Field::Other("a number"),
                serde_json::Value::Array(_) => Field::Other("a list"),
                serde_json::Value::Object(_) => Field::Other("an object"),
            });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, fields: &[&str]) -> std::result::Result<String, String> {
        let fields: Vec<_> = fields.iter().map(|field| (*field).to_owned()).collect();
        parse_record(line, &fields).map_err(|bad| bad.error(Path::new("a.jsonl"), 3).to_string())
    }

    #[test]
    fn fields_are_found_and_joined() {
        let line = r#"{"id": [1, {"text": 2}], "text": "a\nb \u00e9", "title": "T"}"#;
        assert_eq!(parse(line, &["text"]).unwrap(), "a\nb é");
        assert_eq!(parse(line, &["title", "text"]).unwrap(), "T\na\nb é");
        assert_eq!(parse(r#"{"text": null}"#, &["text"]).unwrap(), "");
    }

    #[test]
    fn errors_name_line_and_remedy() {
        let broken = parse(r#"{"text": "a"#, &["text"]).unwrap_err();
        assert!(broken.starts_with("a.jsonl: line 3, column 11: broken JSON: EOF"), "{broken}");
        let missing = parse(r#"{"body": "a", "id": 1}"#, &["text"]).unwrap_err();
        assert!(missing.contains("no text field \"text\"; there are: body, id"), "{missing}");
        assert!(parse(r#"{"text": 5}"#, &["text"]).unwrap_err().contains("is a number"));
        assert!(parse(r#"["text"]"#, &["text"]).unwrap_err().contains("line 3"));
        assert!(parse(r#"{"text": "a"} x"#, &["text"]).unwrap_err().contains("broken JSON"));
    }
}
