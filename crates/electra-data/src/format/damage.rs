//! Errors about damaged files of a corpus.

use std::path::Path;

use crate::error::Error;

const REMEDY: &str = "restore the file from a copy or prepare the corpus again";

/// An error about a damaged file, with the remedy that all of these share.
pub(super) fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason: format!("{reason}; {REMEDY}") }
}

/// An error about accessing a file that the manifest names; a missing one counts as damage.
pub(super) fn access_error(path: &Path, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::NotFound => damaged(path, "missing, though the manifest names it".into()),
        _ => Error::io(path, error),
    }
}
