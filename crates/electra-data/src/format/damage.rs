//! Errors about damaged files of a corpus.

use std::path::Path;

use super::header::BLOCK_BYTES;
use crate::error::Error;

const REMEDY: &str = "restore the file from a copy or prepare the corpus again";

pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason: format!("{reason}; {REMEDY}") }
}

pub(super) fn access_error(path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => damaged(path, "missing, although the manifest lists it".into()),
        _ => Error::io(path, error),
    }
}

pub(super) fn wrong_length(path: &Path, length: u64, expected: u64) -> Error {
    let last = length.min(expected) / BLOCK_BYTES as u64;
    damaged(path, format!("{length} bytes instead of {expected}: truncated in block {last}"))
}

/// The error for an intact file that differs from the manifest's description.
pub(crate) fn foreign(path: &Path) -> Error {
    let reason = "not the file that the corpus's manifest describes (an interrupted copy?); copy the corpus again, and check \
                  it with `electra-fast verify`";
    Error::Damaged { path: path.to_owned(), reason: reason.to_owned() }
}
