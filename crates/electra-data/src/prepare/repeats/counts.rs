//! What is counted of an input group, how it is stored beside its record, and the counts of a whole corpus.

use serde::{Deserialize, Serialize};

use super::frequent::{Frequent, GroupFrequent, Line};
use super::sample::Sample;
use crate::error::{Error, Result};

/// Distinct documents, or lines, that are counted exactly in an input group …
const GROUP_CAPACITY: usize = 1 << 18;
/// … and in a corpus. Of more, a sample of half to all of so many is counted.
const CORPUS_CAPACITY: usize = 1 << 22;
/// The number of lines that a report names.
const NAMED: usize = 10;

/// How often text is repeated in a corpus, as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// Documents that have a line that is not blank.
    pub documents: RepeatCount,
    /// Lines that are not blank.
    pub lines: RepeatCount,
    /// The ten most repeated lines.
    pub most_repeated: Vec<RepeatedLine>,
    /// A line occurs at most so many times more than is said, unless all distinct lines were counted (`lines.sampled` is
    /// 1). A line that is not named occurs at most so often, or less than those that are.
    pub most_repeated_error: u64,
}

/// How many documents or lines are repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepeatCount {
    /// All of them.
    pub total: u64,
    /// Those that have occurred before; an estimate if `sampled` is not 1.
    pub repeated: u64,
    /// One in how many of the distinct ones was counted.
    pub sampled: u64,
}

/// A line that is repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepeatedLine {
    /// Its first 200 bytes.
    pub text: String,
    /// Number of occurrences.
    pub count: u64,
}

/// What was left out of an input group or corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::prepare) struct Dropped {
    pub documents: u64,
    pub lines: u64,
    /// Documents all of whose lines were left out.
    pub emptied_documents: u64,
}

/// The counts of an input group.
#[derive(Debug)]
pub(in crate::prepare) struct GroupCounts {
    documents: Sample,
    lines: Sample,
    frequent: GroupFrequent,
    pub dropped: Dropped,
}

/// The beginning of a file of counts; the hashes and counts of both samples follow.
#[derive(Serialize, Deserialize)]
struct Stored {
    documents: StoredSample,
    lines: StoredSample,
    frequent: Vec<Line>,
    frequent_error: u64,
    dropped: Dropped,
}

#[derive(Serialize, Deserialize)]
struct StoredSample {
    total: u64,
    limit: u64,
    len: usize,
}

impl Default for GroupCounts {
    fn default() -> Self {
        let sample = || Sample::new(GROUP_CAPACITY);
        let (frequent, dropped) = (GroupFrequent::default(), Dropped::default());
        Self { documents: sample(), lines: sample(), frequent, dropped }
    }
}

impl GroupCounts {
    pub fn add_document(&mut self, hash: u64) {
        self.documents.add(hash);
    }

    pub fn add_line(&mut self, hash: u64, text: &str) {
        self.lines.add(hash);
        self.frequent.add(hash, text);
    }

    /// The bytes of the file that stores this.
    pub fn into_bytes(mut self) -> serde_json::Result<Vec<u8>> {
        self.documents.finish();
        self.lines.finish();
        let (documents, lines) = (self.documents.sorted(), self.lines.sorted());
        let stored = |sample: &Sample, len| StoredSample { total: sample.total, limit: sample.limit, len };
        let (frequent, frequent_error) = self.frequent.lines();
        let head = serde_json::to_vec(&Stored {
            documents: stored(&self.documents, documents.len()),
            lines: stored(&self.lines, lines.len()),
            frequent,
            frequent_error,
            dropped: self.dropped,
        })?;
        let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
        bytes.extend(head);
        for (hash, count) in documents.into_iter().chain(lines) {
            bytes.extend(hash.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        Ok(bytes)
    }
}

/// The counts of several input groups.
struct CorpusCounts {
    documents: Sample,
    lines: Sample,
    frequent: Frequent,
    dropped: Dropped,
}

impl CorpusCounts {
    /// Adds what was counted in an input group; `None` if `into_bytes` did not write this.
    fn merge(&mut self, bytes: &[u8]) -> Option<()> {
        let (length, rest) = bytes.split_first_chunk()?;
        let (head, entries) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let stored: Stored = serde_json::from_slice(head).ok()?;
        let (documents, lines) = entries.split_at_checked(stored.documents.len.checked_mul(ENTRY)?)?;
        for (sample, stored, entries) in
            [(&mut self.documents, stored.documents, documents), (&mut self.lines, stored.lines, lines)]
        {
            sample.merge(stored.total, stored.limit, entries.chunks_exact(ENTRY).map(entry));
        }
        self.frequent.merge(stored.frequent, stored.frequent_error);
        self.dropped.documents += stored.dropped.documents;
        self.dropped.lines += stored.dropped.lines;
        self.dropped.emptied_documents += stored.dropped.emptied_documents;
        Some(())
    }

    fn report(&self) -> Repeats {
        let count = |sample: &Sample| RepeatCount {
            total: sample.total,
            repeated: sample.total - sample.num_distinct(),
            sampled: sample.one_of(),
        };
        let is_exact = self.lines.is_exact();
        let occurrences = |line: &Line| if is_exact { self.lines.count(line.hash) } else { line.count };
        let mut named: Vec<_> =
            self.frequent.lines().map(|line| (occurrences(line), &line.text, line.hash)).collect();
        named.sort_unstable_by(|a, b| b.0.cmp(&a.0).then_with(|| (a.1, a.2).cmp(&(b.1, b.2))));
        let most_repeated = named.into_iter().take(NAMED);
        Repeats {
            documents: count(&self.documents),
            lines: count(&self.lines),
            most_repeated: most_repeated
                .map(|(count, text, _)| RepeatedLine { text: text.to_string(), count })
                .collect(),
            most_repeated_error: self.frequent.error,
        }
    }
}

/// Bytes of a hash with its count.
const ENTRY: usize = 12;

fn entry(bytes: &[u8]) -> (u64, u32) {
    let (hash, count) = bytes.split_at(8);
    (u64::from_le_bytes(array(hash)), u32::from_le_bytes(array(count)))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

/// The counts of a corpus, from the files of all its input groups.
pub(in crate::prepare) fn merge(files: impl Iterator<Item = Result<Vec<u8>>>) -> Result<(Repeats, Dropped)> {
    let sample = || Sample::new(CORPUS_CAPACITY);
    let (frequent, dropped) = (Frequent::default(), Dropped::default());
    let mut all = CorpusCounts { documents: sample(), lines: sample(), frequent, dropped };
    for bytes in files {
        all.merge(&bytes?).ok_or_else(|| {
            Error::Input(
                "another version of electra-fast has begun this corpus; start in another --out".to_owned(),
            )
        })?;
    }
    Ok((all.report(), all.dropped))
}
