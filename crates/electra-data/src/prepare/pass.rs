//! The passes over the input: to leave out duplicates, all text is hashed before any of it is built.

use serde::{Deserialize, Serialize};

use crate::choice::choice;

/// What occurs only once in a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropDuplicates {
    /// Documents with the same lines.
    Documents,
    /// Lines.
    Lines,
}

choice!(DropDuplicates { "documents" => Documents, "lines" => Lines });

/// What a run does with the input groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Pass {
    /// Stores the hash of each document or line.
    Hash(DropDuplicates),
    /// Builds shards.
    Build(Option<Decided>),
}

/// The duplicates to leave out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Decided {
    pub what: DropDuplicates,
    /// Hash of the hashes by which they were found.
    pub digest: String,
}

impl Pass {
    /// The hash of the hashes by which duplicates were found.
    pub fn digest(&self) -> Option<&str> {
        match self {
            Self::Build(Some(decided)) => Some(&decided.digest),
            _ => None,
        }
    }
}
