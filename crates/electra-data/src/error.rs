//! The crate's one error type: what was wrong, where, and what to do about it.

use std::path::PathBuf;

/// Everything that can go wrong between text and batch. Each message is one line that names the
/// place and the remedy, because it reaches the user as it stands.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder that has to exist does not.
    #[error("{path}: not found{hint}", path = path.display())]
    NotFound {
        /// What was looked for.
        path: PathBuf,
        /// What to do, beginning with "; " (or empty).
        hint: String,
    },
    /// The operating system refused a read or a write.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file concerned.
        path: PathBuf,
        /// The system's own word.
        source: std::io::Error,
    },
    /// The user's text, vocabulary or arguments cannot be used as they are.
    #[error("{0}")]
    Input(String),
    /// A shard or manifest is not what was written: damaged, truncated or foreign.
    #[error("{path}: {reason}", path = path.display())]
    Damaged {
        /// The damaged file.
        path: PathBuf,
        /// What does not hold, with block or field, and what to do.
        reason: String,
    },
    /// The caller asked to stop (Ctrl-C, SIGTERM); everything finished so far is kept.
    #[error("interrupted")]
    Interrupted,
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wraps a system error with the file it happened on.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
}
