//! How text is found in files: the options of `input`, `corpus` and `columns`, and words they share.

use super::text::InvalidUtf8;

/// What separates documents in `.txt` files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Documents {
    /// One or more blank lines (and the end of a file).
    #[default]
    BlankLine,
    /// Each file is one document.
    File,
    /// Each line that is not blank is one document.
    Line,
}

/// How a file's bytes become documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Lines of plain text, whatever language or markup they are in.
    Text,
    /// One JSON object per line.
    JsonLines,
    /// Apache Parquet.
    Parquet,
    /// An Arrow IPC stream or file.
    Arrow,
}

impl Format {
    /// The format of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Text, Self::JsonLines, Self::Parquet, Self::Arrow].into_iter().find(|f| f.name() == name)
    }

    /// Its name as an option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::JsonLines => "jsonl",
            Self::Parquet => "parquet",
            Self::Arrow => "arrow",
        }
    }
}

/// How text is found in files.
#[derive(Clone, Debug)]
pub struct Reading {
    /// What every file is read as; by default each name's ending tells, and others are passed over.
    pub format: Option<Format>,
    /// What separates documents in `.txt` files.
    pub documents: Documents,
    /// Fields (columns) that hold the text; several are joined by a line end.
    pub text_fields: Vec<String>,
    /// What to do with bytes that are not UTF-8.
    pub invalid_utf8: InvalidUtf8,
    /// Records of JSON lines that may be left out because they cannot be read, over all the input.
    pub skip_bad_records: u64,
}

impl Default for Reading {
    fn default() -> Self {
        Self {
            format: None,
            documents: Documents::default(),
            text_fields: vec!["text".to_owned()],
            invalid_utf8: InvalidUtf8::default(),
            skip_bad_records: 0,
        }
    }
}

/// Says which fields there are when the wanted one is not among them.
pub(super) fn missing_field(field: &str, there: &[String]) -> String {
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    format!("no text field \"{field}\"; there are: {there}")
}
