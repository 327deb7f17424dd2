//! The source of text and the options for reading it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::choice::choice;
use crate::error::Result;

pub enum TextSource<'a> {
    Files(Vec<PathBuf>),
    /// A stream of documents. Such a run cannot be resumed; it starts from the beginning.
    Documents(Box<dyn Iterator<Item = Result<String>> + Send + 'a>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DocumentSeparator {
    /// One or more blank lines (and the end of a file).
    #[default]
    BlankLine,
    /// None: each file is one document.
    File,
    /// Every line; blank lines are ignored.
    Line,
}

choice!(DocumentSeparator { "blank-line" => BlankLine, "file" => File, "line" => Line });

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    Text,
    JsonLines,
    /// JSON objects in a list, or one after another on any number of lines.
    Json,
    Parquet,
    Arrow,
}

choice!(InputFormat { "txt" => Text, "jsonl" => JsonLines, "json" => Json, "parquet" => Parquet, "arrow" => Arrow });

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InvalidUtf8 {
    /// Fail and report the offset.
    #[default]
    Error,
    /// Replace each invalid sequence with U+FFFD.
    Replace,
}

choice!(InvalidUtf8 { "error" => Error, "replace" => Replace });

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReadOptions {
    /// The format of every file. By default the extension decides, and files with unknown extensions are skipped.
    pub format: Option<InputFormat>,
    #[serde(rename = "documents")]
    pub separator: DocumentSeparator,
    /// Fields (columns) that hold the text. Several fields are joined with line ends.
    pub text_fields: Vec<String>,
    pub invalid_utf8: InvalidUtf8,
    pub skip_bad_rows: u64,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            format: None,
            separator: DocumentSeparator::default(),
            text_fields: vec!["text".to_owned()],
            invalid_utf8: InvalidUtf8::default(),
            skip_bad_rows: 0,
        }
    }
}

pub(super) fn missing_field(field: &str, existing: &[String]) -> String {
    let existing = if existing.is_empty() { "none".to_owned() } else { existing.join(", ") };
    format!("no text field \"{field}\"; available: {existing}")
}
