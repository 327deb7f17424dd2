//! The crate's error type: the problem, its place, and the remedy.

use std::path::{Path, PathBuf};

/// Everything that can go wrong between text and batch. Each message is one line that names the file or
/// option and the remedy, because users see it unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("{path}: not found{hint}", path = path.display())]
    NotFound {
        path: PathBuf,
        /// The remedy, beginning with "; ", or empty.
        hint: String,
    },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The user's text, vocabulary or arguments cannot be used as they are.
    #[error("{0}")]
    Input(String),
    /// A shard or manifest differs from the one written: damaged, truncated or of another corpus.
    #[error("{path}: {reason}", path = path.display())]
    Damaged {
        path: PathBuf,
        /// The damage, with block or field, and the remedy.
        reason: String,
    },
    /// The caller asked to stop (Ctrl-C, SIGTERM). Finished work is kept.
    #[error("interrupted")]
    Interrupted,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// An error about a file that the user named: the problem and the remedy.
    pub(crate) fn at(path: impl AsRef<Path>, message: impl std::fmt::Display) -> Self {
        Self::Input(format!("{}: {message}", path.as_ref().display()))
    }
}
