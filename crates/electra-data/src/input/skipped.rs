//! Unreadable records that are skipped: their limit, and their list in the corpus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The name of the list inside a corpus.
pub(crate) const SKIPPED: &str = "skipped.jsonl";

/// A record that was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecord {
    /// The file's path relative to the common parent of all inputs.
    pub file: String,
    /// The line number, from 1.
    pub line: u64,
    /// Why it was skipped.
    pub reason: String,
}

/// The records skipped in the current input group, and the limit for the whole run. Clones share one count.
#[derive(Clone, Debug, Default)]
pub(crate) struct SkipLog {
    allowed: u64,
    count: Arc<AtomicU64>,
    records: Vec<SkippedRecord>,
}

impl SkipLog {
    /// A log that allows `allowed` records in total, of which `count` have been skipped before.
    pub fn new(allowed: u64, count: u64) -> Self {
        Self { allowed, count: Arc::new(AtomicU64::new(count)), records: Vec::new() }
    }

    /// Adds a record, or fails with its error if the limit is reached.
    pub fn add(&mut self, record: SkippedRecord, error: &Error) -> Result<()> {
        let remedy = match self.allowed {
            0 => "--skip-bad-records N leaves up to N such records out".to_owned(),
            n if self.count.fetch_add(1, Ordering::Relaxed) >= n => {
                format!("{n} bad records were skipped before it: --skip-bad-records {n} allows no more")
            }
            _ => {
                self.records.push(record);
                return Ok(());
            }
        };
        Err(Error::Input(format!("{error}; {remedy}")))
    }

    /// The records added since the last call.
    pub fn take(&mut self) -> Vec<SkippedRecord> {
        std::mem::take(&mut self.records)
    }
}

/// The list as JSON lines.
pub(crate) fn skipped_to_jsonl(records: &[SkippedRecord]) -> serde_json::Result<Vec<u8>> {
    let mut lines = Vec::new();
    for record in records {
        serde_json::to_writer(&mut lines, record)?;
        lines.push(b'\n');
    }
    Ok(lines)
}

/// The first records of a corpus's list.
pub(crate) fn first_skipped(list: &[u8], count: usize) -> Result<Vec<SkippedRecord>> {
    let parse = |line| serde_json::from_slice(line).map_err(|e| Error::io(SKIPPED, e.into()));
    list.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).take(count).map(parse).collect()
}
