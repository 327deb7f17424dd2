//! Records that cannot be read and are left out: how many may be, which ones they are, and their list.

use std::io::{BufRead, BufReader};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The list's name inside a corpus.
pub(crate) const SKIPPED: &str = "skipped.jsonl";

/// One record that was left out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecord {
    /// The file's path below the folder that all inputs share.
    pub file: String,
    /// Its line there, counted from 1.
    pub line: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// The records left out since the last unit ended, and how many there may be in all.
#[derive(Debug, Default)]
pub(crate) struct SkipLog {
    allowed: u64,
    count: u64,
    records: Vec<SkippedRecord>,
}

impl SkipLog {
    /// A log of a run before which `count` records have been left out.
    pub fn new(allowed: u64, count: u64) -> Self {
        Self { allowed, count, records: Vec::new() }
    }

    /// Notes a record, or fails with its error if there have been enough of them.
    pub fn add(&mut self, record: SkippedRecord, error: &Error) -> Result<()> {
        let (allowed, count) = (self.allowed, self.count);
        if allowed == 0 {
            let remedy = "--skip-bad-records N leaves up to N such records out";
            return Err(Error::Input(format!("{error}; {remedy}")));
        }
        if count >= allowed {
            let before = format!("{count} bad records were skipped before it");
            return Err(Error::Input(format!(
                "{error}; {before}: --skip-bad-records {allowed} allows no more"
            )));
        }
        self.count += 1;
        self.records.push(record);
        Ok(())
    }

    /// The records noted since the last call.
    pub fn take(&mut self) -> Vec<SkippedRecord> {
        std::mem::take(&mut self.records)
    }
}

/// The list as a file: a JSON object per line.
pub(crate) fn to_lines(records: &[SkippedRecord]) -> serde_json::Result<Vec<u8>> {
    let mut lines = Vec::new();
    for record in records {
        serde_json::to_writer(&mut lines, record)?;
        lines.push(b'\n');
    }
    Ok(lines)
}

/// The first records of a corpus's list; none if somebody has removed it, for no program needs it.
pub(crate) fn read_first(dir: &Path, count: usize) -> Result<Vec<SkippedRecord>> {
    let path = dir.join(SKIPPED);
    let file = match std::fs::File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.map_err(|e| Error::io(&path, e))?,
    };
    let parse = |line: std::io::Result<String>| {
        serde_json::from_str(&line.map_err(|e| Error::io(&path, e))?).map_err(|e| Error::io(&path, e.into()))
    };
    BufReader::new(file).lines().take(count).map(parse).collect()
}
