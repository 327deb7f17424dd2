//! The bytes of an input file, on disk or in an object store: read from the start, from any offset, or by ranges
//! known in advance.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufReader, Error as IoError, ErrorKind, Read, Result as IoResult, Seek, SeekFrom};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{ChunkReader, Length};

use crate::error::{Error, Result};
use crate::store::{Cancel, Object, Request, Store};
use crate::threads::lock;

/// Length of a sequential reader's first request; it doubles with each request …
const FIRST_REQUEST: u64 = 256 << 10;
/// … up to this length.
const LAST_REQUEST: u64 = 8 << 20;
/// Requests ahead of a sequential reader: a store sends a single stream at only about 100 MB/s.
const REQUESTS_AHEAD: usize = 3;
/// Bytes requested ahead in all columns of a table, whose ranges are known, and requests ahead in each column.
const COLUMNS_AHEAD: (u64, usize) = (16 << 20, 16);
/// Length of the first request for a table: its metadata is at the end, and a file that is not much longer is read whole.
const TABLE_END: u64 = 64 << 10;
const PAGE_HEADER_BYTES: usize = 512;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) type Failure = Arc<Mutex<Option<Error>>>;

type Answer = Receiver<Result<Vec<u8>>>;

pub(super) enum RawFile {
    Local(File),
    Stored(Box<StoredFile>),
}

pub(super) struct StoredFile {
    store: Store,
    object: Object,
    cancel: Cancel,
    failure: Failure,
    position: u64,
    chunk: Bytes,
    chunk_start: u64,
    /// Requests ahead, in the order in which their bytes are read …
    ahead: VecDeque<(Range<u64>, Answer)>,
    /// … and the ranges to request after them.
    planned: VecDeque<Range<u64>>,
    request_bytes: u64,
    longest_request: u64,
    requests_ahead: usize,
    /// Bytes that need no request, and their offset.
    known: (u64, Bytes),
}

impl StoredFile {
    /// An object, which is read when its bytes are requested. `cancel` cancels the requests.
    pub fn new(store: Store, object: Object, cancel: Cancel, failure: Failure) -> Self {
        Self {
            store,
            object,
            cancel,
            failure,
            position: 0,
            chunk: Bytes::new(),
            chunk_start: 0,
            ahead: VecDeque::new(),
            planned: VecDeque::new(),
            request_bytes: FIRST_REQUEST,
            longest_request: LAST_REQUEST,
            requests_ahead: 1,
            known: (0, Bytes::new()),
        }
    }

    /// A reader of one of several columns, which reads the `planned` ranges in order, without requesting buffered bytes.
    fn column(&self, planned: VecDeque<Range<u64>>, num_columns: usize) -> Self {
        let longest_request = (COLUMNS_AHEAD.0 / 4 / num_columns.max(1) as u64).max(FIRST_REQUEST);
        Self {
            planned,
            request_bytes: longest_request.min(4 * FIRST_REQUEST),
            longest_request,
            requests_ahead: COLUMNS_AHEAD.1,
            known: (self.chunk_start, self.chunk.clone()),
            ..Self::new(self.store.clone(), self.object.clone(), self.cancel.clone(), self.failure.clone())
        }
    }

    /// Keeps a store's error, which the table libraries would turn into text.
    fn failed(&self, error: Error) -> IoError {
        let text = error.to_string();
        *lock(&self.failure) = Some(error);
        IoError::other(text)
    }

    fn request(&self, range: Range<u64>) -> IoResult<Answer> {
        let (first, known) = &self.known;
        if range.start >= *first
            && let Some(bytes) = known.get((range.start - first) as usize..(range.end - first) as usize)
        {
            let (sender, answer) = bounded(1);
            let _ = sender.send(Ok(bytes.to_vec()));
            return Ok(answer);
        }
        let Object { name, version, .. } = self.object.clone();
        self.store.start(Request { name, range, version }).map_err(|error| self.failed(error))
    }

    fn wait(&self, answer: &Answer) -> IoResult<Bytes> {
        loop {
            match answer.recv_timeout(POLL_INTERVAL) {
                Ok(bytes) => return bytes.map(Bytes::from).map_err(|error| self.failed(error)),
                Err(RecvTimeoutError::Timeout) if self.cancel.is_raised() => {
                    return Err(self.failed(Error::Interrupted));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(ErrorKind::BrokenPipe.into()),
            }
        }
    }

    fn read_end(&mut self) -> IoResult<()> {
        let size = self.object.size;
        self.position = if size <= FIRST_REQUEST { 0 } else { size - TABLE_END };
        self.read(&mut [0]).map(drop)
    }

    fn fill(&mut self) -> IoResult<()> {
        let at = self.position;
        let is_seek = at != self.chunk_start + self.chunk.len() as u64;
        if is_seek && self.requests_ahead <= REQUESTS_AHEAD {
            self.ahead.clear();
            self.planned.clear();
        }
        let passed = self.ahead.iter().take_while(|(range, _)| !range.contains(&at)).count();
        self.ahead.drain(..passed);
        if self.ahead.is_empty() {
            let passed = self.planned.iter().take_while(|range| !range.contains(&at)).count();
            self.planned.drain(..passed);
            match self.planned.front_mut() {
                Some(range) => range.start = at,
                None => {
                    self.planned.push_back(at..self.object.size);
                    (self.request_bytes, self.longest_request) = (FIRST_REQUEST, LAST_REQUEST);
                    self.requests_ahead = 1;
                }
            }
        }
        self.request_ahead()?;
        self.requests_ahead = self.requests_ahead.max(REQUESTS_AHEAD);
        self.chunk = Bytes::new();
        if let Some((range, answer)) = self.ahead.pop_front() {
            (self.chunk_start, self.chunk) = (range.start, self.wait(&answer)?);
        }
        Ok(())
    }

    /// Sends requests until enough bytes are ahead: four of the longest requests.
    fn request_ahead(&mut self) -> IoResult<()> {
        let mut bytes_ahead = self.ahead.iter().map(|(range, _)| range.end - range.start).sum::<u64>();
        while self.ahead.len() < self.requests_ahead && bytes_ahead < 4 * self.longest_request {
            let Some(range) = self.planned.pop_front() else { break };
            let (start, last) = (range.start, range.end.min(self.object.size));
            let mut end = last.min(start + self.request_bytes);
            if start < self.known.0 {
                end = end.min(self.known.0);
            }
            if end < last {
                self.planned.push_front(end..last);
            }
            if start < end {
                self.ahead.push_back((start..end, self.request(start..end)?));
                bytes_ahead += end - start;
                self.request_bytes = (2 * self.request_bytes).min(self.longest_request);
            }
        }
        Ok(())
    }

    fn buffered(&self) -> Bytes {
        let start = self.position.checked_sub(self.chunk_start).map_or(usize::MAX, |start| start as usize);
        if start < self.chunk.len() { self.chunk.slice(start..) } else { Bytes::new() }
    }
}

impl Read for StoredFile {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        if self.position >= self.object.size || buffer.is_empty() {
            return Ok(0);
        }
        if self.buffered().is_empty() {
            self.fill()?;
        }
        let count = self.buffered().as_ref().read(buffer)?;
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

#[derive(Clone)]
pub(super) struct TableFile(Arc<Mutex<RawFile>>);

impl TableFile {
    pub fn new(mut file: RawFile) -> IoResult<Self> {
        if let RawFile::Stored(file) = &mut file {
            file.read_end()?;
        }
        Ok(Self(Arc::new(Mutex::new(file))))
    }

    /// One of `num_columns` columns that are read in parallel. `ranges` are its bytes, which a store sends ahead.
    pub fn column(&self, ranges: impl Iterator<Item = Range<u64>>, num_columns: usize) -> Self {
        let column = match &*self.file() {
            RawFile::Local(_) => return self.clone(),
            RawFile::Stored(file) => RawFile::Stored(Box::new(file.column(ranges.collect(), num_columns))),
        };
        Self(Arc::new(Mutex::new(column)))
    }

    fn file(&self) -> MutexGuard<'_, RawFile> {
        lock(&self.0)
    }
}

impl Length for TableFile {
    fn len(&self) -> u64 {
        match &*self.file() {
            RawFile::Local(file) => Length::len(file),
            RawFile::Stored(file) => file.object.size,
        }
    }
}

pub(super) struct TableReader(TableFile, u64);

impl Read for TableReader {
    fn read(&mut self, buffer: &mut [u8]) -> IoResult<usize> {
        let mut file = self.0.file();
        file.seek(SeekFrom::Start(self.1))?;
        let count = file.read(buffer)?;
        self.1 += count as u64;
        Ok(count)
    }
}

impl ChunkReader for TableFile {
    type T = BufReader<TableReader>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        Ok(BufReader::with_capacity(PAGE_HEADER_BYTES, TableReader(self.clone(), start)))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        let mut file = self.file();
        file.seek(SeekFrom::Start(start))?;
        if let RawFile::Stored(file) = &*file {
            let buffered = file.buffered();
            if buffered.len() >= length {
                return Ok(buffered.slice(..length));
            }
        }
        let mut bytes = Vec::with_capacity(length.min(LAST_REQUEST as usize));
        Read::by_ref(&mut *file).take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() == length { Ok(bytes.into()) } else { Err(ParquetError::EOF("truncated".to_owned())) }
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
    fn stored_file_reads_like_a_local_file() {
        let dir = tempfile::tempdir().unwrap();
        let text: Vec<u8> =
            (0..30_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        std::fs::write(dir.path().join("text"), &text).unwrap();
        let server = TestServer::start(dir.path());
        let served = |count: usize| {
            let log = server.log();
            assert!(log.served.len() <= count, "{:?}", log.served);
            log.served.iter().map(|(_, range)| range.end - range.start).sum::<u64>()
        };
        let mut bytes = Vec::new();
        stored(&server).read_to_end(&mut bytes).unwrap();
        assert!(bytes == text);
        assert_eq!(served(11), text.len() as u64);
        // Pages of a column; the last one is in the end of the file, which is buffered.
        let table = TableFile::new(stored(&server)).unwrap();
        let ranges = [5..9_000_000, 9_000_000..9_500_000, 20_000_000..20_000_000, 29_900_000..30_000_000_u64];
        let column = table.column(ranges.clone().into_iter(), 1);
        for (start, end) in ranges.into_iter().flat_map(|range| {
            let pages = range.clone().step_by(123_457).map(|start| (start, (start + 123_457).min(range.end)));
            pages.collect::<Vec<_>>()
        }) {
            let mut header = [0; 30];
            column.get_read(start).unwrap().read_exact(&mut header).unwrap();
            let body = column.get_bytes(start + 30, (end - start) as usize - 30).unwrap();
            assert!([&header, &*body].concat() == text[start as usize..end as usize]);
        }
        assert_eq!(served(30), 30_000_000 + (64 << 10) + 9_500_000 - 5 + 100_000 - (64 << 10));
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(20));
        let places = (0..text.len() as u64 + 10, 0_usize..3_000_000, any::<bool>());
        let file = std::cell::RefCell::new(stored(&server));
        runner
            .run(&places, |(start, length, by_range)| {
                let start = start.min(text.len() as u64);
                let expected = &text[start as usize..text.len().min(start as usize + length)];
                let mut file = file.borrow_mut();
                let bytes = if by_range && !expected.is_empty() {
                    column.get_bytes(start, expected.len()).unwrap().to_vec()
                } else {
                    file.seek(SeekFrom::Start(start)).unwrap();
                    let mut bytes = Vec::new();
                    Read::by_ref(&mut *file).take(length as u64).read_to_end(&mut bytes).unwrap();
                    bytes
                };
                prop_assert!(bytes == expected);
                Ok(())
            })
            .unwrap();
    }
}
