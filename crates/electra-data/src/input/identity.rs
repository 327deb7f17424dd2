//! The identity of an input's content, to detect a change since it was read: size,
//! modification time, a hash of its beginning, middle and end, and a hash of all of it. Objects in stores have an
//! ETag instead of hashes; pipes have no identity.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::division::Part;
use super::input_file::InputFile;
use crate::error::{Error, Result};
use crate::format::hex128;
use crate::store::Cancel;

const SAMPLE_BYTES: u64 = 64 << 10;
const CHUNK_BYTES: u64 = 1 << 18;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct InputIdentity {
    /// The file's path relative to the common parent of all inputs.
    pub file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    part: Option<Part>,
    pub bytes: u64,
    modified: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
    /// xxh3-128 of three samples of the file, hexadecimal, or of the whole file if it is no longer than the samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    samples: Option<String>,
    /// xxh3-128 of the file or part, hexadecimal, unless the samples cover the whole file. The hash of a part begins one
    /// byte earlier, because whether a line begins with the part depends on that byte.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Same,
    /// The file was modified, but the bytes of this part are the same.
    SamePart,
    Changed,
    /// The content should be compared, but no hash of it was recorded.
    Unknown,
}

impl InputIdentity {
    /// The identity of a file that was just read. Reads it again, because most formats are not read in order. `None` for
    /// a pipe.
    pub fn of(file: &InputFile, part: Option<&Part>, cancel: &Cancel) -> Result<Option<Self>> {
        if !file.regular {
            return Ok(None);
        }
        let mut identity = Self::without_content(file, part)?;
        if file.object.is_none() && !are_all(file.size) {
            identity.content = Some(content(file, part, cancel)?);
        }
        Ok(Some(identity))
    }

    fn without_content(file: &InputFile, part: Option<&Part>) -> Result<Self> {
        let (part, bytes, file_name) = (part.cloned(), file.size, file.name.clone());
        let (modified, etag, samples) = match &file.object {
            Some(object) => (object.listed.modified, object.listed.version.clone(), None),
            None => (file.modified.and_then(nanoseconds), None, Some(samples(file)?)),
        };
        Ok(Self { file: file_name, part, bytes, modified, etag, samples, content: None })
    }

    /// Compares the file with this record, including its whole content if the modification time differs or with `verify`.
    pub fn compare(&self, file: &InputFile, verify: bool, cancel: &Cancel) -> Result<Comparison> {
        if file.size != self.bytes {
            return Ok(Comparison::Changed);
        }
        let now = Self::without_content(file, self.part.as_ref())?;
        file.check_unchanged()?;
        let is_same_time = now.modified == self.modified;
        let (Some(old_samples), Some(new_samples)) = (&self.samples, &now.samples) else {
            // At least one of them is in a store.
            return Ok(match (&self.etag, &now.etag) {
                (Some(old), Some(new)) if old != new => Comparison::Changed,
                (Some(_), Some(_)) => Comparison::Same,
                _ if verify => Comparison::Unknown,
                (None, None) if !is_same_time => Comparison::Changed,
                _ => Comparison::Same,
            });
        };
        if old_samples != new_samples {
            return Ok(Comparison::Changed);
        }
        if are_all(self.bytes) || (is_same_time && !verify) {
            return Ok(Comparison::Same);
        }
        let Some(old) = &self.content else { return Ok(Comparison::Unknown) };
        let is_same = content(file, self.part.as_ref(), cancel)? == *old;
        file.check_unchanged()?;
        Ok(match is_same {
            true if self.part.is_none() => Comparison::Same,
            true => Comparison::SamePart,
            false => Comparison::Changed,
        })
    }
}

fn are_all(bytes: u64) -> bool {
    bytes <= 3 * SAMPLE_BYTES
}

fn samples(file: &InputFile) -> Result<String> {
    let starts = [0, file.size / 2 - SAMPLE_BYTES.min(file.size) / 2, file.size.saturating_sub(SAMPLE_BYTES)];
    let ranges = starts.map(|start| start..start + SAMPLE_BYTES);
    if are_all(file.size) {
        return content(file, None, &Cancel::default());
    }
    hash(file, &ranges, &Cancel::default())
}

fn content(file: &InputFile, part: Option<&Part>, cancel: &Cancel) -> Result<String> {
    let range = part.map_or(0..file.size, |part| part.start.saturating_sub(1)..part.end);
    hash(file, std::slice::from_ref(&range), cancel)
}

fn hash(file: &InputFile, ranges: &[Range<u64>], cancel: &Cancel) -> Result<String> {
    let (mut raw, mut hash, mut chunk) = (file.raw()?, Xxh3::new(), Vec::new());
    let failed = |e| file.unreadable(&e);
    for range in ranges {
        raw.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        let mut rest = raw.by_ref().take(range.end - range.start);
        loop {
            chunk.clear();
            rest.by_ref().take(CHUNK_BYTES).read_to_end(&mut chunk).map_err(failed)?;
            if chunk.is_empty() {
                break;
            }
            hash.update(&chunk);
            if cancel.is_raised() {
                return Err(Error::Interrupted);
            }
        }
    }
    Ok(hex128(hash.digest128()))
}

fn nanoseconds(time: SystemTime) -> Option<i64> {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).ok(),
        Err(before) => i64::try_from(before.duration().as_nanos()).ok().map(|nanos| -nanos),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::input::{Compression, InputFormat};

    const SIZE: u64 = 1 << 20;

    fn listed(path: &Path) -> InputFile {
        let metadata = path.metadata().unwrap();
        let kind = (InputFormat::Text, Compression::None);
        InputFile { modified: metadata.modified().ok(), ..InputFile::new(path, path, metadata.len(), kind) }
    }

    /// Compares a file with its identity after changing one byte and moving its time by `seconds`.
    fn after_a_change(at: u64, part: Option<&Part>, seconds: u64, verify: bool) -> Comparison {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, vec![b' '; SIZE as usize]).unwrap();
        let (before, cancel) = (listed(&path), Cancel::default());
        let identity = InputIdentity::of(&before, part, &cancel).unwrap().unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"a", at).unwrap();
        file.set_modified(before.modified.unwrap() + Duration::from_secs(seconds)).unwrap();
        identity.compare(&listed(&path), verify, &cancel).unwrap()
    }

    #[test]
    fn change_outside_samples_is_found_by_time_or_with_verify() {
        use Comparison::{Changed, Same, SamePart};
        let (middle, end) = ((SIZE - SAMPLE_BYTES) / 2, SIZE - SAMPLE_BYTES);
        for at in [0, middle, end].into_iter().flat_map(|start| [start, start + SAMPLE_BYTES - 1]) {
            assert_eq!(after_a_change(at, None, 0, false), Changed, "{at}");
        }
        for at in [SAMPLE_BYTES, middle - 1, middle + SAMPLE_BYTES, end - 1] {
            let results =
                [(0, false), (0, true), (1, false)].map(|(s, verify)| after_a_change(at, None, s, verify));
            assert_eq!(results, [Same, Changed, Changed], "{at}");
        }
        // A part's hash includes the byte before it.
        let part = Part { start: 100_000, end: 200_000 };
        for (at, expected) in [(99_998, SamePart), (99_999, Changed), (199_999, Changed), (200_000, SamePart)]
        {
            assert_eq!(after_a_change(at, Some(&part), 1, false), expected, "{at}");
        }
    }
}
