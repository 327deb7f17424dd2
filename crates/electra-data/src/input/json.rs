//! JSON records: the wanted fields of an object, and what is wrong with it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::read_options::{InvalidUtf8, ReadOptions, missing_field};
use super::skipped::SkippedRecord;
use super::text::InvalidBytes;
use crate::error::Error;

/// The error in a record, and the remedy.
#[derive(Debug)]
pub(super) struct BadRecord {
    /// Lines from the record's first one, and the column; `None` if it is the record as a whole.
    position: Option<(usize, usize)>,
    reason: String,
    remedy: &'static str,
}

impl BadRecord {
    fn new(reason: String, remedy: &'static str) -> Self {
        Self { position: None, reason, remedy }
    }

    pub fn invalid(bad: &InvalidBytes) -> Self {
        Self::new(bad.reason(), InvalidBytes::REMEDY)
    }

    pub fn error(&self, path: &Path, line: u64) -> Error {
        let (below, column) =
            self.position.map_or((0, String::new()), |(below, column)| (below, format!(", column {column}")));
        let (path, reason, remedy) = (path.display(), &self.reason, self.remedy);
        Error::Input(format!("{path}: line {}{column}: {reason}; {remedy}", line + below as u64))
    }

    pub fn skipped(&self, file: &str, line: u64) -> SkippedRecord {
        let (line, reason) = match self.position {
            Some((below, column)) => (line + below as u64, format!("column {column}: {}", self.reason)),
            None => (line, self.reason.clone()),
        };
        SkippedRecord { file: file.to_owned(), line, reason }
    }
}

/// The text of one JSON record: the wanted fields, joined by line ends.
pub(super) fn parse_record(record: &str, reading: &ReadOptions) -> std::result::Result<String, BadRecord> {
    let fields = &reading.text_fields;
    let mut texts = Vec::with_capacity(fields.len());
    for (field, value) in fields.iter().zip(find_fields(record, reading)?) {
        match value {
            Some(Field::Text(text)) => texts.push(text),
            Some(Field::Null) => {}
            Some(Field::Other(kind)) => {
                let reason = format!("field \"{field}\" is {kind}, not text");
                return Err(BadRecord::new(reason, "fix or remove it, or choose with --text-field"));
            }
            None => {
                return Err(BadRecord::new(
                    missing_field(field, &names_in(record)),
                    "choose with --text-field",
                ));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// Whether a record has one of the wanted fields, with text or null.
pub(super) fn has_text(record: &[u8], reading: &ReadOptions) -> bool {
    let is_text = |field: &Option<Field>| matches!(field, Some(Field::Text(_) | Field::Null));
    std::str::from_utf8(record)
        .is_ok_and(|record| find_fields(record, reading).is_ok_and(|found| found.iter().any(is_text)))
}

/// The values of the wanted fields.
fn find_fields(record: &str, reading: &ReadOptions) -> std::result::Result<Vec<Option<Field>>, BadRecord> {
    let error = match deserialize(record, &reading.text_fields) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    let mut remedy = "fix or remove it";
    if let Some(plain) = plain(record)
        && let Ok(found) = deserialize(&plain, &reading.text_fields)
    {
        let is_broken =
            |field: &Option<Field>| matches!(field, Some(Field::Text(t)) if t.contains('\u{fffd}'));
        if reading.invalid_utf8 == InvalidUtf8::Replace || !found.iter().any(is_broken) {
            return Ok(found);
        }
        remedy = "fix it, or read it as U+FFFD with --invalid-utf8 replace";
    }
    let text = error.to_string();
    let reason = text.split_once(" at line ").map_or(&*text, |(reason, _)| reason);
    let position = Some((error.line().max(1) - 1, error.column()));
    Err(BadRecord { position, ..BadRecord::new(format!("broken JSON: {reason}"), remedy) })
}

fn deserialize(record: &str, fields: &[String]) -> serde_json::Result<Vec<Option<Field>>> {
    let mut parser = serde_json::Deserializer::from_str(record);
    let mut found: Vec<_> = fields.iter().map(|_| None).collect();
    let wanted = fields.iter().map(String::as_str).enumerate().collect();
    parser.deserialize_map(Wanted { fields: wanted, found: &mut found })?;
    parser.end().map(|()| found)
}

/// A record without what Python's `json` reads and JSON does not have, with the same columns: NaN and infinities become
/// 0, and unpaired surrogates U+FFFD. `None` if it has neither.
fn plain(record: &str) -> Option<String> {
    let (mut bytes, mut at, mut in_string) = (record.as_bytes().to_vec(), 0, false);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let constant = ["NaN", "Infinity", "-Infinity"].iter().find(|name| rest.starts_with(name.as_bytes()));
        at += match (rest[0], constant) {
            (b'"', _) => {
                in_string = !in_string;
                1
            }
            (b'\\', _) => match (surrogate(rest), rest.get(6..).and_then(surrogate)) {
                (Some(0xd800..0xdc00), Some(0xdc00..)) => 12,
                (Some(_), _) => {
                    bytes[at + 2..at + 6].copy_from_slice(b"fffd");
                    6
                }
                (None, _) => 2,
            },
            (_, Some(name)) if !in_string => {
                bytes[at..at + name.len()].fill(b' ');
                bytes[at] = b'0';
                name.len()
            }
            _ => 1,
        };
    }
    String::from_utf8(bytes).ok().filter(|plain| plain != record)
}

/// The surrogate whose escape begins here.
fn surrogate(text: &[u8]) -> Option<u16> {
    let digits = std::str::from_utf8(text.strip_prefix(b"\\u")?.get(..4)?).ok()?;
    u16::from_str_radix(digits, 16).ok().filter(|unit| (0xd800..0xe000).contains(unit))
}

/// The names of a record's fields, and of those in its objects: `id`, `review.body`.
fn names_in(record: &str) -> Vec<String> {
    let fields = |object: &str| -> BTreeMap<String, Box<RawValue>> {
        let read = |text: &str| serde_json::from_str(text).ok();
        read(object).or_else(|| read(&plain(object)?)).unwrap_or_default()
    };
    let names = fields(record).into_iter().flat_map(|(name, value)| {
        let inner = if value.get().starts_with('{') { fields(value.get()) } else { BTreeMap::new() };
        let inner: Vec<_> = inner.into_keys().map(|key| format!("{name}.{key}")).collect();
        if inner.is_empty() { vec![name] } else { inner }
    });
    names.collect()
}

/// A field's value; of values that are not text, only the kind.
enum Field {
    Text(String),
    Null,
    Other(&'static str),
}

/// Finds the wanted fields in a JSON value and skips everything else without allocating it.
struct Wanted<'a, 'f> {
    /// Their numbers, and their names from here on, in which dots lead into objects; "" is the value itself.
    fields: Vec<(usize, &'a str)>,
    found: &'f mut [Option<Field>],
}

impl Wanted<'_, '_> {
    /// Notes that the value is no object: null has no fields to be text.
    fn note(self, value: impl Fn() -> Field) {
        for (number, name) in self.fields {
            let value = value();
            if name.is_empty() || matches!(value, Field::Null) {
                self.found[number] = Some(value);
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for Wanted<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Wanted<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object such as {\"text\": \"…\"}")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<(), M::Error> {
        let Self { fields, found } = self;
        while let Some(key) = map.next_key::<std::borrow::Cow<str>>()? {
            let mut inner = Vec::new();
            for &(number, name) in &fields {
                match name.strip_prefix(&*key) {
                    Some("") => inner.push((number, "")),
                    // A field that has the whole name, with its dots, goes before one in an object.
                    Some(rest) if rest.starts_with('.') && found[number].is_none() => {
                        inner.push((number, &rest[1..]));
                    }
                    _ => {}
                }
            }
            if inner.is_empty() {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(Wanted { fields: inner, found: &mut *found })?;
            }
        }
        for (number, _) in fields.iter().filter(|(_, name)| name.is_empty()) {
            found[*number] = Some(Field::Other("an object"));
        }
        Ok(())
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> std::result::Result<(), S::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        self.note(|| Field::Other("a list"));
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<(), E> {
        self.note(|| Field::Text(text.to_owned()));
        Ok(())
    }

    fn visit_unit<E: serde::de::Error>(self) -> std::result::Result<(), E> {
        self.note(|| Field::Null);
        Ok(())
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> std::result::Result<(), E> {
        self.note(|| Field::Other("a boolean"));
        Ok(())
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> std::result::Result<(), E> {
        self.note(|| Field::Other("a number"));
        Ok(())
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> std::result::Result<(), E> {
        self.visit_i64(0)
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> std::result::Result<(), E> {
        self.visit_i64(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, fields: &[&str]) -> std::result::Result<String, String> {
        let text_fields = fields.iter().map(|field| (*field).to_owned()).collect();
        parse_record(line, &ReadOptions { text_fields, ..ReadOptions::default() })
            .map_err(|bad| bad.error(Path::new("a.jsonl"), 3).to_string())
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

    #[test]
    fn dots_lead_into_objects() {
        let line = r#"{"id": {"n": 1}, "review": {"body": "b", "by": {"name": "n"}}, "a.b": "literal", "gone": null}"#;
        assert_eq!(parse(line, &["review.by.name", "review.body", "gone.text"]).unwrap(), "n\nb");
        assert_eq!(parse(r#"{"a": {"b": "inner"}, "a.b": "literal"}"#, &["a.b"]).unwrap(), "literal");
        assert_eq!(parse(r#"{"a.b": "literal", "a": {"b": "inner"}}"#, &["a.b"]).unwrap(), "literal");
        let missing = parse(line, &["review.text"]).unwrap_err();
        assert!(missing.contains("there are: a.b, gone, id.n, review.body, review.by"), "{missing}");
        assert!(parse(line, &["review"]).unwrap_err().contains("is an object, not text"));
        assert!(parse(line, &["id.n"]).unwrap_err().contains("is a number, not text"));
    }

    #[test]
    fn what_python_reads_in_other_fields_is_passed_over() {
        let nested = format!("{}{}", "[".repeat(900), "]".repeat(900));
        for value in ["NaN", "-Infinity", "[Infinity, {\"x\": NaN}]", "1e999", r#""\ud83d NaN""#, &nested] {
            for line in [
                format!(r#"{{"x": {value}, "text": "NaN \"Infinity\" \ud83d\ude00"}}"#),
                format!(r#"{{"text": "NaN \"Infinity\" \ud83d\ude00", "\udc00 x": {value}}}"#),
            ] {
                assert_eq!(parse(&line, &["text"]).unwrap(), "NaN \"Infinity\" 😀", "{line}");
                assert!(parse(&line, &["body"]).unwrap_err().contains("there are: text, "), "{line}");
            }
        }
        for (line, part) in [
            (r#"{"text": NaN}"#, "field \"text\" is a number"),
            (
                r#"{"text": "a\ud83d"}"#,
                "column 18: broken JSON: unexpected end of hex escape; fix it, or read it as",
            ),
            (r#"{"x": NaN, "text": nan}"#, "broken JSON"),
        ] {
            let error = parse(line, &["text"]).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let reading = ReadOptions { invalid_utf8: InvalidUtf8::Replace, ..ReadOptions::default() };
        assert_eq!(parse_record(r#"{"text": "a\ud83d"}"#, &reading).unwrap(), "a\u{fffd}");
    }
}
