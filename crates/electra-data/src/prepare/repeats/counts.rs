//! The counts of an input group, their file in the folder of records, and the counts of a whole corpus.

use serde::{Deserialize, Serialize};

use super::sketches::Sample;
use super::sketches::{Frequent, Line};
use crate::error::{Error, Result};
use crate::format::{FileEntry, hash_hex};
use crate::prepare::output_dir::{OutputDir, part_request, total};
use crate::prepare::progress::Step;

/// Maximum number of distinct documents, or lines, that are counted exactly in an input group …
const GROUP_CAPACITY: usize = 1 << 18;
/// … and in a corpus. Of more, a sample of between half this number and this number is counted.
const CORPUS_CAPACITY: usize = 1 << 22;
/// Maximum number stored for all input groups; more would never be used. Each group stores at least `MIN_STORED`.
const MAX_STORED: usize = 1 << 26;
const MIN_STORED: usize = 1 << 12;
const NAMED: usize = 10;

/// Repetitions in the text of a corpus, as read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    pub documents: RepeatCount,
    pub lines: RepeatCount,
    pub most_repeated: Vec<RepeatedLine>,
    /// Upper bound on the uncounted occurrences of a listed line, unless all distinct lines were counted (`lines.sampled`
    /// is 1). An unlisted line occurs at most this often, or less than the listed lines.
    pub most_repeated_error: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepeatCount {
    pub total: u64,
    /// Repeated occurrences; an estimate if `sampled` is not 1.
    pub repeated: u64,
    /// N if one in N of the distinct texts was counted.
    pub sampled: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepeatedLine {
    /// Its first 200 bytes.
    pub text: String,
    pub count: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dropped {
    pub documents: u64,
    pub lines: u64,
    pub emptied_documents: u64,
}

impl std::ops::AddAssign for Dropped {
    fn add_assign(&mut self, other: Self) {
        self.documents += other.documents;
        self.lines += other.lines;
        self.emptied_documents += other.emptied_documents;
    }
}

#[derive(Debug)]
pub(crate) struct Counts {
    documents: Sample,
    lines: Sample,
    frequent: Frequent,
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

const ENTRY: usize = 12;

impl Counts {
    pub fn of_group(num_groups: usize) -> Self {
        Self::new((MAX_STORED / num_groups.max(1)).clamp(MIN_STORED, GROUP_CAPACITY))
    }

    fn new(capacity: usize) -> Self {
        let (documents, lines) = (Sample::new(capacity), Sample::new(capacity));
        Self { documents, lines, frequent: Frequent::default(), dropped: Dropped::default() }
    }

    pub fn add_document(&mut self, hash: u64) {
        self.documents.add(hash);
    }

    pub fn add_line(&mut self, hash: u64, text: &str) {
        self.lines.add(hash);
        self.frequent.add(hash, text);
    }

    pub fn into_bytes(mut self) -> serde_json::Result<Vec<u8>> {
        self.documents.finish();
        self.lines.finish();
        let (documents, lines) = (self.documents.sorted(), self.lines.sorted());
        let stored = |sample: &Sample, len| StoredSample { total: sample.total, limit: sample.limit, len };
        let (frequent, frequent_error) = self.frequent.repeated();
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

    /// Adds the counts of an input group; `None` if `into_bytes` did not write them.
    fn merge(&mut self, bytes: &[u8]) -> Option<()> {
        let (length, rest) = bytes.split_first_chunk()?;
        let (head, entries) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let stored: Stored = serde_json::from_slice(head).ok()?;
        let (documents, lines) = entries.split_at_checked(stored.documents.len.checked_mul(ENTRY)?)?;
        for (sample, stored, entries) in
            [(&mut self.documents, stored.documents, documents), (&mut self.lines, stored.lines, lines)]
        {
            sample.merge(stored.total, stored.limit, entries.as_chunks().0.iter().map(entry));
        }
        self.frequent.merge(stored.frequent, stored.frequent_error);
        self.dropped += stored.dropped;
        Some(())
    }

    fn report(&self) -> Repeats {
        let count = |sample: &Sample| {
            let (total, sampled) = (sample.total, sample.one_of());
            RepeatCount { total, repeated: total - sample.num_distinct(), sampled }
        };
        let (is_exact, (lines, most_repeated_error)) = (self.lines.one_of() == 1, self.frequent.repeated());
        let times = |line: &Line| if is_exact { self.lines.count(line.hash) } else { line.count };
        let mut named: Vec<_> = lines.into_iter().map(|line| (times(&line), line.text, line.hash)).collect();
        named.sort_unstable_by(|a, b| b.0.cmp(&a.0).then_with(|| (&a.1, a.2).cmp(&(&b.1, b.2))));
        let line = |(count, text, _): (u64, Box<str>, u64)| RepeatedLine { text: text.into(), count };
        let most_repeated = named.into_iter().take(NAMED).map(line).collect();
        let (documents, lines) = (count(&self.documents), count(&self.lines));
        Repeats { documents, lines, most_repeated, most_repeated_error }
    }
}

fn entry(bytes: &[u8; ENTRY]) -> (u64, u32) {
    let [a, b, c, d, e, f, g, h, count @ ..] = *bytes;
    (u64::from_le_bytes([a, b, c, d, e, f, g, h]), u32::from_le_bytes(count))
}

/// The counts of a corpus, from the files of all its input groups.
pub(crate) fn merge(out: &OutputDir, files: &[FileEntry], step: &Step) -> Result<(Repeats, Dropped)> {
    let mut all = Counts::new(CORPUS_CAPACITY);
    let requests: Vec<_> = files.iter().map(|file| part_request(&file.file, 0..file.bytes)).collect();
    step.begin("adding up counts", total(&requests));
    out.place.read_batches(step, &requests, |start, counts| {
        files[start..].iter().zip(counts).try_for_each(|(file, bytes)| {
            if hash_hex(&bytes) != file.hash {
                return Err(out.damaged(&file.file));
            }
            all.merge(&bytes).ok_or_else(|| {
                let message = "another version of electra-fast began this corpus; choose another --out";
                Error::Input(message.to_owned())
            })
        })
    })?;
    Ok((all.report(), all.dropped))
}
