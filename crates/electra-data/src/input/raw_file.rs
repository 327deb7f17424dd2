//! The bytes of an input file, on disk or in an object store: read from the start, from any offset, or by ranges.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind, Read, Result as IoResult, Seek, SeekFrom};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

use crate::error::{Error, Result};
use crate::store::{Cancel, Object, Request, Store};

/// The first request of a sequential reader; each one is twice as long as the one before …
const FIRST_REQUEST: u64 = 256 << 10;
/// … up to this.
const LAST_REQUEST: u64 = 8 << 20;
/// Requests in flight ahead of a sequential reader, once it has read two: a store sends a single stream at only about
/// 100 MB/s.
const REQUESTS_AHEAD: usize = 3;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The last error of the store that a file is in.
pub(super) type Failure = Arc<Mutex<Option<Error>>>;

/// The bytes of a file.
pub(super) enum RawFile {
    Local(File),
    Stored(Box<StoredFile>),
}

/// The bytes of an object in a store.
pub(super) struct StoredFile {
    store: Store,
    object: Object,
    cancel: Cancel,
    failure: Failure,
    /// Offset of the next byte to be read.
    position: u64,
    /// Buffered bytes, and the offset of the first one.
    chunk: Vec<u8>,
    chunk_start: u64,
    /// Requests whose bytes follow the chunk, with the offset after them.
    ahead: VecDeque<(u64, Receiver<Result<Vec<u8>>>)>,
    request_bytes: u64,
}

impl StoredFile {
    /// An object, which is read when its bytes are requested. `cancel` cancels the requests.
    pub fn new(store: Store, object: Object, cancel: Cancel, failure: Failure) -> Self {
        let (chunk, ahead) = (Vec::new(), VecDeque::new());
        Self {
            store,
            object,
            cancel,
            failure,
            position: 0,
            chunk,
            chunk_start: 0,
            ahead,
            request_bytes: FIRST_REQUEST,
        }
    }

    /// Keeps a store's error, which libraries that read tables would turn into text.
    fn failed(&self, error: Error) -> IoError {
        let text = error.to_string();
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        IoError::other(text)
    }

    fn request(&self, start: u64, end: u64) -> IoResult<Receiver<Result<Vec<u8>>>> {
        let Object { name, version, .. } = self.object.clone();
        self.store.start(Request { name, range: start..end, version }).map_err(|error| self.failed(error))
    }

    fn wait(&self, answer: &Receiver<Result<Vec<u8>>>) -> IoResult<Vec<u8>> {
        loop {
            match answer.recv_timeout(POLL_INTERVAL) {
                Ok(bytes) => return bytes.map_err(|error| self.failed(error)),
                Err(RecvTimeoutError::Timeout) if self.cancel.is_raised() => {
                    return Err(self.failed(Error::Interrupted));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(ErrorKind::BrokenPipe.into()),
            }
        }
    }

    /// Loads the chunk that contains the byte at the current position.
    fn fill(&mut self) -> IoResult<()> {
        let end = self.chunk_start + self.chunk.len() as u64;
        if self.position != end {
            // After a seek.
            (self.chunk_start, self.request_bytes) = (self.position, FIRST_REQUEST);
            self.ahead.clear();
        } else {
            self.chunk_start = end;
        }
        self.chunk.clear();
        let wanted = if self.request_bytes == FIRST_REQUEST { 1 } else { REQUESTS_AHEAD };
        while self.ahead.len() < wanted {
            let start = self.ahead.back().map_or(self.chunk_start, |(end, _)| *end);
            let end = (start + self.request_bytes).min(self.object.size);
            if start >= end {
                break;
            }
            let answer = self.request(start, end)?;
            self.ahead.push_back((end, answer));
            self.request_bytes = (2 * self.request_bytes).min(LAST_REQUEST);
        }
        if let Some((_, answer)) = self.ahead.pop_front() {
            self.chunk = self.wait(&answer)?;
        }
        Ok(())
    }
}

impl Read for StoredFile {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        if self.position >= self.object.size || buffer.is_empty() {
            return Ok(0);
        }
        if !(self.chunk_start..self.chunk_start + self.chunk.len() as u64).contains(&self.position) {
            self.fill()?;
        }
        let rest = &self.chunk[(self.position - self.chunk_start) as usize..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

impl Read for RawFile {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        match self {
            Self::Local(file) => file.read(buffer),
            Self::Stored(file) => file.read(buffer),
        }
    }
}

impl Seek for RawFile {
    fn seek(&mut self, to: SeekFrom) -> IoResult<u64> {
        match self {
            Self::Local(file) => file.seek(to),
            Self::Stored(file) => {
                file.position = match to {
                    SeekFrom::Start(offset) => Some(offset),
                    SeekFrom::End(offset) => file.object.size.checked_add_signed(offset),
                    SeekFrom::Current(offset) => file.position.checked_add_signed(offset),
                }
                .ok_or(ErrorKind::InvalidInput)?;
                Ok(file.position)
            }
        }
    }
}

impl Length for RawFile {
    fn len(&self) -> u64 {
        match self {
            Self::Local(file) => Length::len(file),
            Self::Stored(file) => file.object.size,
        }
    }
}

impl ChunkReader for RawFile {
    type T = Box<dyn Read>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(match self {
            Self::Local(file) => Box::new(file.get_read(start)?),
            Self::Stored(file) => {
                let new = StoredFile::new(
                    file.store.clone(),
                    file.object.clone(),
                    file.cancel.clone(),
                    file.failure.clone(),
                );
                Box::new(StoredFile { position: start, ..new })
            }
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<bytes::Bytes> {
        match self {
            Self::Local(file) => file.get_bytes(start, length),
            Self::Stored(file) => {
                let answer = file.request(start, start + length as u64).and_then(|answer| file.wait(&answer));
                Ok(answer.map_err(|error| ParquetError::External(Box::new(error)))?.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::test_server::TestServer;

    fn stored(server: &TestServer) -> RawFile {
        let store = Store::open(&server.url).unwrap();
        let object = store.head("text").unwrap();
        RawFile::Stored(Box::new(StoredFile::new(store, object, Cancel::default(), Failure::default())))
    }

    #[test]
    fn a_stored_file_reads_as_one_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let text: Vec<u8> =
            (0..30_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        std::fs::write(dir.path().join("text"), &text).unwrap();
        let server = TestServer::start(dir.path());
        let mut found = Vec::new();
        stored(&server).read_to_end(&mut found).unwrap();
        assert!(found == text);
        let served: Vec<u64> = server.log().served.iter().map(|(_, range)| range.end - range.start).collect();
        assert!(served.iter().sum::<u64>() == text.len() as u64 && served.len() < 12, "{served:?}");
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(20));
        let file = std::cell::RefCell::new(stored(&server));
        let places = (0..text.len() as u64 + 10, 0_usize..3_000_000, any::<bool>());
        runner
            .run(&places, |(start, length, by_range)| {
                let start = start.min(text.len() as u64);
                let expected = &text[start as usize..text.len().min(start as usize + length)];
                let mut file = file.borrow_mut();
                let found = if by_range && !expected.is_empty() {
                    file.get_bytes(start, expected.len()).unwrap().to_vec()
                } else {
                    file.seek(SeekFrom::Start(start)).unwrap();
                    let mut found = Vec::new();
                    Read::by_ref(&mut *file).take(length as u64).read_to_end(&mut found).unwrap();
                    found
                };
                prop_assert!(found == expected);
                Ok(())
            })
            .unwrap();
    }
}
