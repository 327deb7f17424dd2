//! Hashes of lines and documents, whatever fragments they are read in.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::input::Mark;

/// The hash that stands for no text: of a blank line, and of a document of such lines.
pub(super) const BLANK: u64 = 0;

/// A line or a document that has ended, as the xxh3-64 of a line without whitespace at its end, or of the hashes of a
/// document's lines that are not blank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Line(u64),
    Document(u64),
}

/// Hashes the texts of an input group in order.
#[derive(Default)]
pub(super) struct Hasher {
    /// The state of a line of which only a beginning has been read …
    begun: Option<Box<Xxh3>>,
    /// … and the hash of what has been read of it, without whitespace at the end.
    trimmed: u64,
    document: u64,
}

impl Hasher {
    /// Adds a text; returns what it ends.
    pub fn push(&mut self, text: &str, mark: &Mark) -> Option<Ended> {
        match mark {
            Mark::Line if self.begun.is_none() => {
                let text = text.trim_end();
                let hash = if text.is_empty() { BLANK } else { not_blank(xxh3_64(text.as_bytes())) };
                Some(self.end_line(hash))
            }
            Mark::Line => {
                self.extend(text);
                self.begun = None;
                let hash = std::mem::replace(&mut self.trimmed, BLANK);
                Some(self.end_line(hash))
            }
            Mark::Document => Some(Ended::Document(std::mem::replace(&mut self.document, BLANK))),
            Mark::Partial => {
                self.extend(text);
                None
            }
            Mark::Begin(_) | Mark::InputGroup(_) => None,
        }
    }

    fn extend(&mut self, text: &str) {
        let state = self.begun.get_or_insert_default();
        let (kept, blanks) = text.split_at(text.trim_end().len());
        state.update(kept.as_bytes());
        if !kept.is_empty() {
            self.trimmed = not_blank(state.digest());
        }
        state.update(blanks.as_bytes());
    }

    fn end_line(&mut self, hash: u64) -> Ended {
        if hash != BLANK {
            let mut both = [0; 16];
            both[..8].copy_from_slice(&self.document.to_le_bytes());
            both[8..].copy_from_slice(&hash.to_le_bytes());
            self.document = not_blank(xxh3_64(&both));
        }
        Ended::Line(hash)
    }
}

fn not_blank(hash: u64) -> u64 {
    if hash == BLANK { 1 } else { hash }
}
