//! Unreadable records that are skipped: their limit, and their list in the corpus.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

pub(crate) const SKIPPED: &str = "skipped.jsonl";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecord {
    pub file: String,
    pub line: u64,
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
    pub fn new(allowed: u64, count: u64) -> Self {
        Self { allowed, count: Arc::new(AtomicU64::new(count)), records: Vec::new() }
    }

    pub fn add(&mut self, record: SkippedRecord, error: &Error) -> Result<()> {
        let remedy = match self.allowed {
            0 => "--skip-bad-rows N skips up to N such rows".to_owned(),
            n if self.count.fetch_add(1, Ordering::Relaxed) >= n => {
                format!("--skip-bad-rows {n} is used up; raise it")
            }
            _ => {
                self.records.push(record);
                return Ok(());
            }
        };
        Err(Error::Input(format!("{error}; {remedy}")))
    }

    pub fn take(&mut self) -> Vec<SkippedRecord> {
        std::mem::take(&mut self.records)
    }
}

pub(crate) fn skipped_to_jsonl(records: &[SkippedRecord]) -> serde_json::Result<Vec<u8>> {
    let mut lines = Vec::new();
    for record in records {
        serde_json::to_writer(&mut lines, record)?;
        lines.push(b'\n');
    }
    Ok(lines)
}

pub(crate) fn first_skipped(list: &[u8], count: usize) -> Result<Vec<SkippedRecord>> {
    let parse = |line| serde_json::from_slice(line).map_err(|e| Error::io(SKIPPED, e.into()));
    list.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).take(count).map(parse).collect()
}
