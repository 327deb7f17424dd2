//! JSON records: the wanted fields of an object, and its errors.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::read_options::{InvalidUtf8, ReadOptions, missing_field};
use super::skipped::SkippedRecord;
use super::text::InvalidBytes;
use crate::error::Error;

#[derive(Clone, Debug)]
pub(super) struct BadRecord {
    /// Line (0 is the record's first) and column; `None` if the whole record is bad.
    position: Option<(usize, usize)>,
    reason: String,
    remedy: &'static str,
}

impl BadRecord {
    fn new(reason: String, remedy: &'static str) -> Self {
        Self { position: None, reason, remedy }
    }

    fn broken(error: &serde_json::Error) -> Self {
        let text = error.to_string();
        let reason = text.split_once(" at line ").map_or(&*text, |(reason, _)| reason);
        let position = Some((error.line().max(1) - 1, error.column()));
        Self { position, ..Self::new(format!("broken JSON: {reason}"), "fix or remove it") }
    }

    pub fn invalid(bad: &InvalidBytes) -> Self {
        Self::new(bad.reason(), InvalidBytes::REMEDY)
    }

    pub fn error(&self, path: &Path, line: u64) -> Error {
        let (below, column) =
            self.position.map_or((0, String::new()), |(below, column)| (below, format!(", column {column}")));
        let (reason, remedy) = (&self.reason, self.remedy);
        Error::at(path, format!("line {}{column}: {reason}; {remedy}", line + below as u64))
    }

    pub fn skipped(&self, file: &str, line: u64) -> SkippedRecord {
        let (line, reason) = match self.position {
            Some((below, column)) => (line + below as u64, format!("column {column}: {}", self.reason)),
            None => (line, self.reason.clone()),
        };
        SkippedRecord { file: file.to_owned(), line, reason }
    }
}

pub(super) fn parse_record<'a>(
    record: &'a str,
    reading: &ReadOptions,
) -> std::result::Result<Cow<'a, str>, BadRecord> {
    let fields = &reading.text_fields;
    if let Ok(values) = deserialize(record, fields) {
        return joined(values, fields, record);
    }
    let read = |half| {
        let plain = plain(record, half);
        let values = deserialize(&plain, fields).map_err(|error| BadRecord::broken(&error))?;
        joined(values, fields, &plain).map(Cow::into_owned)
    };
    let text = read("fffd")?;
    if reading.invalid_utf8 == InvalidUtf8::Error
        && text.contains('\u{fffd}')
        && read("fffe").is_ok_and(|other| other != text)
    {
        let reason = format!("unpaired surrogate in field \"{}\"", fields.join(", "));
        return Err(BadRecord::new(reason, "fix it, or read it as U+FFFD with --invalid-utf8 replace"));
    }
    Ok(text.into())
}

fn joined<'a>(
    values: Vec<Option<Field<'a>>>,
    fields: &[String],
    record: &str,
) -> std::result::Result<Cow<'a, str>, BadRecord> {
    let mut texts = Vec::with_capacity(fields.len());
    for (field, value) in fields.iter().zip(values) {
        match value {
            Some(Field::Text(text)) => texts.push(text),
            Some(Field::Null) => {}
            Some(Field::Other(kind)) => {
                let reason = format!("field \"{field}\" is {kind}, not text");
                return Err(BadRecord::new(reason, "fix or remove it, or choose another field with --text"));
            }
            None => {
                let reason = missing_field(field, &names_in(record));
                return Err(BadRecord::new(reason, "choose one with --text"));
            }
        }
    }
    Ok(if texts.len() == 1 { texts.remove(0) } else { texts.join("\n").into() })
}

pub(super) fn has_text(record: &[u8], reading: &ReadOptions) -> bool {
    let is_text = |field: &Option<Field>| matches!(field, Some(Field::Text(_) | Field::Null));
    let record = plain(&String::from_utf8_lossy(record), "fffd");
    deserialize(&record, &reading.text_fields).is_ok_and(|values| values.iter().any(is_text))
}

fn deserialize<'a>(record: &'a str, fields: &[String]) -> serde_json::Result<Vec<Option<Field<'a>>>> {
    let mut parser = serde_json::Deserializer::from_str(record);
    let mut values: Vec<_> = fields.iter().map(|_| None).collect();
    let fields =
        fields.iter().enumerate().map(|(number, name)| Wish { number, name, key_bytes: 0 }).collect();
    parser.deserialize_map(Wanted { fields, values: &mut values })?;
    parser.end().map(|()| values)
}

/// A record with replacements for values that Python's `json` reads and `serde_json` rejects, of the same width: numbers,
/// NaN and infinities become 0, and unpaired surrogates become the character with the code `surrogate`.
fn plain(record: &str, surrogate: &str) -> String {
    let (mut bytes, mut at, mut in_string) = (record.as_bytes().to_vec(), 0, false);
    while at < bytes.len() {
        let rest = &bytes[at..];
        at += match rest[0] {
            b'"' => {
                in_string = !in_string;
                1
            }
            b'\\' => match (half_of_pair(rest), rest.get(6..).and_then(half_of_pair)) {
                (Some(..0xdc00), Some(0xdc00..)) => 12,
                (Some(_), _) => {
                    bytes[at + 2..at + 6].copy_from_slice(surrogate.as_bytes());
                    6
                }
                (None, _) => 2,
            },
            _ if in_string => memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len()),
            _ => {
                let ends = |byte: &u8| b",:[]{}\"\\ \t\r\n".contains(byte);
                let length = rest.iter().position(ends).unwrap_or(rest.len());
                if is_number(&rest[..length]) {
                    bytes[at..at + length].fill(b' ');
                    bytes[at] = b'0';
                }
                length.max(1)
            }
        };
    }
    String::from_utf8(bytes).unwrap_or_default()
}

fn is_number(token: &[u8]) -> bool {
    matches!(token, b"NaN" | b"Infinity" | b"-Infinity")
        || (matches!(token, [b'-' | b'0'..=b'9', ..]) && serde_json::from_slice::<&RawValue>(token).is_ok())
}

/// The surrogate whose escape `text` begins with.
fn half_of_pair(text: &[u8]) -> Option<u16> {
    let digits = std::str::from_utf8(text.strip_prefix(b"\\u")?.get(..4)?).ok()?;
    u16::from_str_radix(digits, 16).ok().filter(|unit| (0xd800..0xe000).contains(unit))
}

fn names_in(record: &str) -> Vec<String> {
    let fields = |object| serde_json::from_str::<BTreeMap<String, &RawValue>>(object).unwrap_or_default();
    let names = fields(record).into_iter().flat_map(|(name, value)| {
        let inner = if value.get().starts_with('{') { fields(value.get()) } else { BTreeMap::new() };
        let inner: Vec<_> = inner.into_keys().map(|key| format!("{name}.{key}")).collect();
        if inner.is_empty() { vec![name] } else { inner }
    });
    names.collect()
}

#[derive(Clone, PartialEq)]
enum Field<'a> {
    Text(Cow<'a, str>),
    Null,
    Other(&'static str),
}

/// A wanted field: its number, and the rest of its name, with dots that lead into objects; "" is the value itself.
struct Wish<'a> {
    number: usize,
    name: &'a str,
    /// The length of the key that led to its current value.
    key_bytes: usize,
}

/// Finds the wanted fields in a JSON value and skips everything else without allocating it.
struct Wanted<'a, 'f, 'de> {
    fields: Vec<Wish<'a>>,
    values: &'f mut [Option<Field<'de>>],
}

impl<'de> Wanted<'_, '_, 'de> {
    /// Records a value that is not an object. Null counts as a missing field.
    fn note(self, value: &Field<'de>) {
        for Wish { number, name, .. } in self.fields {
            if name.is_empty() || *value == Field::Null {
                self.values[number] = Some(value.clone());
            }
        }
    }
}

impl<'de> DeserializeSeed<'de> for Wanted<'_, '_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

/// Visitor methods that record a value.
macro_rules! visit {
    ($($method:ident($($value:tt: $kind:ty)?) => $field:expr,)*) => {$(
        fn $method<E: serde::de::Error>(self $(, $value: $kind)?) -> std::result::Result<(), E> {
            self.note(&$field);
            Ok(())
        }
    )*};
}

impl<'de> Visitor<'de> for Wanted<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object such as {\"text\": \"…\"}")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> std::result::Result<(), M::Error> {
        let Self { mut fields, values } = self;
        while let Some(key) = map.next_key::<Cow<str>>()? {
            let mut inner = Vec::new();
            for field in &mut fields {
                let rest = field.name.strip_prefix(&*key);
                let rest =
                    rest.and_then(|rest| if rest.is_empty() { Some("") } else { rest.strip_prefix('.') });
                // The longest of several keys with dots leads to the field, and the last of equal ones.
                if let Some(name) = rest.filter(|_| key.len() >= field.key_bytes) {
                    field.key_bytes = key.len();
                    values[field.number] = None;
                    inner.push(Wish { number: field.number, name, key_bytes: 0 });
                }
            }
            if inner.is_empty() {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(Wanted { fields: inner, values: &mut *values })?;
            }
        }
        for field in fields.iter().filter(|field| field.name.is_empty()) {
            values[field.number] = Some(Field::Other("an object"));
        }
        Ok(())
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> std::result::Result<(), S::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        self.note(&Field::Other("a list"));
        Ok(())
    }

    visit! {
        visit_str(text: &str) => Field::Text(text.to_owned().into()),
        visit_borrowed_str(text: &'de str) => Field::Text(text.into()),
        visit_unit() => Field::Null,
        visit_bool(_: bool) => Field::Other("a boolean"),
        visit_i64(_: i64) => Field::Other("a number"),
        visit_u64(_: u64) => Field::Other("a number"),
        visit_f64(_: f64) => Field::Other("a number"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, fields: &str, invalid_utf8: InvalidUtf8) -> String {
        let text_fields = fields.split(',').map(str::to_owned).collect();
        let text = parse_record(line, &ReadOptions { text_fields, invalid_utf8, ..ReadOptions::default() })
            .map(|text| format!("[{text}]"));
        text.unwrap_or_else(|bad| bad.error(Path::new("a.jsonl"), 3).to_string())
    }

    #[test]
    fn fields_are_read_and_errors_name_line_and_remedy() {
        let line = r#"{"id": [1, {"text": 2}], "text": "a\nb \u00e9", "title": "T"}"#;
        let nested = r#"{"id": {"n": 1}, "review": {"body": "b", "by": {"name": "n"}}, "a.b": "literal", "gone": null}"#;
        let deep = format!(r#"{{"x": {}1e999{}, "text": "NaN"}}"#, "[".repeat(900), "]".repeat(900));
        let python =
            r#"{"x": [NaN, {"\udc00": -Infinity}], "y": "\ud83d NaN", "text": "NaN \"\ud83d\ude00\""}"#;
        for (line, fields, expected) in [
            (line, "text", "[a\nb é]"),
            (line, "title,text", "[T\na\nb é]"),
            (r#"{"text": null}"#, "text", "[]"),
            (
                r#"{"body": "a", "id": 1}"#,
                "text",
                "no text field \"text\"; available: body, id; choose one with",
            ),
            (r#"{"text": 5}"#, "text", "line 3: field \"text\" is a number, not text; fix or remove it, or"),
            (r#"["text"]"#, "text", "line 3, column 0: broken JSON: invalid type"),
            (r#"{"text": "a"} x"#, "text", "broken JSON: trailing"),
            (nested, "review.by.name,review.body,gone.text", "[n\nb]"),
            (nested, "review.text", "available: a.b, gone, id.n, review.body, review.by;"),
            (nested, "review", "is an object, not text"),
            (nested, "id.n", "is a number, not text"),
            // Only Python's `json` reads these.
            (python, "text", "[NaN \"😀\"]"),
            (python, "body", "available: text, x, y;"),
            (&deep, "text", "[NaN]"),
            (r#"{"text": NaN}"#, "text", "line 3: field \"text\" is a number"),
            (r#"{"text": 1e999}"#, "text", "line 3: field \"text\" is a number"),
            (r#"{"x": NaN, "text": nan}"#, "text", "line 3, column 21: broken JSON"),
            (r#"{"text": "a\ud83d"}"#, "text", "line 3: unpaired surrogate in field"),
        ] {
            let text = parse(line, fields, InvalidUtf8::Error);
            assert!(text.contains(expected), "{line}: {text}");
        }
        assert_eq!(parse(r#"{"text": "a\ud83d"}"#, "text", InvalidUtf8::Replace), "[a\u{fffd}]");
    }
}
