//! How text is found in files: the options of `corpus` and `columns`, and the error they share.

use crate::error::Error;
use crate::text::InvalidUtf8;

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

/// How text is found in files.
#[derive(Clone, Debug)]
pub struct Reading {
    /// What separates documents in `.txt` files.
    pub documents: Documents,
    /// Fields (columns) that hold the text; several are joined by a line end.
    pub text_fields: Vec<String>,
    /// What to do with bytes that are not UTF-8.
    pub invalid_utf8: InvalidUtf8,
}

impl Default for Reading {
    fn default() -> Self {
        Self {
            documents: Documents::default(),
            text_fields: vec!["text".to_owned()],
            invalid_utf8: InvalidUtf8::default(),
        }
    }
}

/// Says which fields there are when the wanted one is not among them.
pub(crate) fn missing_field(place: &str, field: &str, there: &[String]) -> Error {
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    Error::Input(format!("{place}: no text field \"{field}\"; there are: {there}; choose with --text-field"))
}
