//! Observes the texts of an input group while they are read: stores their hashes, or counts
//! repetitions and drops duplicates.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::counts::Counts;
use super::drops::{Drops, save_hashes};
use super::sketches::TEXT_BYTES;
use crate::error::{Error, Result};
use crate::format::FileEntry;
use crate::input::{Mark, Watch, character_boundary};
use crate::prepare::options::{Decided, DropDuplicates, Pass};
use crate::prepare::output_dir::OutputDir;

pub(crate) fn watch<'a>(out: &'a OutputDir, pass: &Pass, num_groups: usize) -> Box<dyn Watch + 'a> {
    match pass {
        Pass::Hash(unit) => {
            Box::new(HashWriter { out, unit: *unit, group: 0, hasher: Hasher::default(), hashes: Vec::new() })
        }
        Pass::Build(decided) => {
            let (decided, group) = (decided.clone(), GroupState::new(0, num_groups));
            Box::new(Counter { out, num_groups, decided, group })
        }
    }
}

struct HashWriter<'a> {
    out: &'a OutputDir,
    unit: DropDuplicates,
    group: usize,
    hasher: Hasher,
    hashes: Vec<u8>,
}

impl Watch for HashWriter<'_> {
    fn begin(&mut self, input_group: usize) -> Result<()> {
        (self.group, self.hasher) = (input_group, Hasher::default());
        Ok(())
    }

    fn keeps(&mut self, text: &str, mark: &Mark) -> bool {
        let hash = match (self.hasher.push(text, mark), self.unit) {
            (Some(Ended::Document(hash)), DropDuplicates::Documents) => hash,
            (Some(Ended::Line(hash)), DropDuplicates::Lines) => hash,
            _ => return false,
        };
        self.hashes.extend(hash.to_le_bytes());
        false
    }

    fn end(&mut self) -> Result<FileEntry> {
        save_hashes(self.out, self.group, &std::mem::take(&mut self.hashes))
    }
}

struct Counter<'a> {
    out: &'a OutputDir,
    num_groups: usize,
    decided: Option<Decided>,
    group: GroupState,
}

struct GroupState {
    number: usize,
    hasher: Hasher,
    counts: Counts,
    beginning: String,
    drops: Option<Dropping>,
}

struct Dropping {
    unit: DropDuplicates,
    drops: Drops,
    at: u64,
    hashes: Xxh3,
    /// Lines of the current document that are not blank, and the kept ones among them.
    lines: u64,
    kept_lines: u64,
}

impl Watch for Counter<'_> {
    fn begin(&mut self, input_group: usize) -> Result<()> {
        self.group = GroupState::new(input_group, self.num_groups);
        if let Some(Decided { unit, digest }) = &self.decided {
            let drops = Drops::read(self.out, input_group, digest)?.ok_or_else(|| {
                Error::Input("the list of an input group's duplicates is missing; run again".to_owned())
            })?;
            let (unit, hashes) = (*unit, Xxh3::new());
            self.group.drops = Some(Dropping { unit, drops, at: 0, hashes, lines: 0, kept_lines: 0 });
        }
        Ok(())
    }

    fn keeps(&mut self, text: &str, mark: &Mark) -> bool {
        self.group.keeps(text, mark)
    }

    fn end(&mut self) -> Result<FileEntry> {
        if self.group.drops.as_ref().is_some_and(|drops| !drops.is_complete()) {
            let number = self.group.number;
            return Err(Error::Input(format!(
                "the text of input group {number} has changed since it was hashed to find duplicates; run again with \
                 --verify-inputs"
            )));
        }
        let counts =
            std::mem::replace(&mut self.group.counts, Counts::of_group(self.num_groups)).into_bytes();
        self.out.save_counts(self.group.number, &counts.map_err(|e| Error::io(self.out.parts(), e.into()))?)
    }
}

impl GroupState {
    fn new(number: usize, num_groups: usize) -> Self {
        let (hasher, counts) = (Hasher::default(), Counts::of_group(num_groups));
        Self { number, hasher, counts, beginning: String::new(), drops: None }
    }

    fn keeps(&mut self, text: &str, mark: &Mark) -> bool {
        let Some(ended) = self.hasher.push(text, mark) else {
            if self.beginning.len() < TEXT_BYTES {
                self.beginning.push_str(&text[..character_boundary(text, TEXT_BYTES)]);
            }
            return self.drops.as_ref().is_none_or(|drops| !drops.is_in_duplicate());
        };
        match ended {
            Ended::Line(hash) if hash != BLANK => {
                let beginning = if self.beginning.is_empty() { text } else { &self.beginning };
                self.counts.add_line(hash, beginning);
            }
            Ended::Document(hash) if hash != BLANK => self.counts.add_document(hash),
            Ended::Line(_) | Ended::Document(_) => {}
        }
        self.beginning.clear();
        let Some(drops) = &mut self.drops else { return true };
        drops.keeps(ended, &mut self.counts)
    }
}

impl Dropping {
    fn is_in_duplicate(&self) -> bool {
        self.drops.contains(self.at)
    }

    /// Whether the end of a line or document is kept, together with the text of the line.
    fn keeps(&mut self, ended: Ended, counts: &mut Counts) -> bool {
        let is_duplicate = self.is_in_duplicate();
        match (self.unit, ended) {
            (DropDuplicates::Documents, Ended::Line(_)) => return !is_duplicate,
            (DropDuplicates::Documents, Ended::Document(hash)) => {
                counts.dropped.documents += u64::from(is_duplicate);
                self.count(hash);
            }
            (DropDuplicates::Lines, Ended::Line(hash)) => {
                counts.dropped.lines += u64::from(is_duplicate);
                self.lines += u64::from(hash != BLANK);
                self.kept_lines += u64::from(hash != BLANK && !is_duplicate);
                self.count(hash);
            }
            (DropDuplicates::Lines, Ended::Document(_)) => {
                let is_emptied = self.lines > 0 && self.kept_lines == 0;
                counts.dropped.emptied_documents += u64::from(is_emptied);
                (self.lines, self.kept_lines) = (0, 0);
                return !is_emptied;
            }
        }
        !is_duplicate
    }

    fn count(&mut self, hash: u64) {
        self.hashes.update(&hash.to_le_bytes());
        self.at += 1;
    }

    fn is_complete(&self) -> bool {
        self.at == self.drops.len && self.hashes.digest() == self.drops.hash
    }
}

/// The hash of no text: of a blank line, and of a document of blank lines.
pub(super) const BLANK: u64 = 0;

/// A line or a document that has ended, as the xxh3-64 of a line without trailing whitespace, or of the hashes of a
/// document's lines that are not blank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Line(u64),
    Document(u64),
}

#[derive(Default)]
pub(super) struct Hasher {
    /// The state of a partly read line …
    begun: Option<Box<Xxh3>>,
    /// … and the hash of its text so far, without trailing whitespace.
    trimmed: u64,
    document: u64,
}

impl Hasher {
    /// Adds a text; returns the line or document that it ends.
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
        let (text, blanks) = text.split_at(text.trim_end().len());
        state.update(text.as_bytes());
        if !text.is_empty() {
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
