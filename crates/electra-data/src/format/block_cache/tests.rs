use std::io::{Error as IoError, ErrorKind};
use std::time::Instant;

use super::folder::PATIENCE;
use super::*;
use crate::format::header::BLOCK_BYTES;
use crate::format::testing::write_corpus;
use crate::store::test_server::{Fault, TestServer};

/// A shard with 20 blocks of tokens, and its line lengths.
fn corpus() -> (tempfile::TempDir, TestServer) {
    let dir = tempfile::tempdir().unwrap();
    let documents: Vec<Vec<Vec<u32>>> = (0..20).map(|number| vec![vec![5 + number; 32_768]]).collect();
    write_corpus(dir.path(), 30_005, &documents, 1 << 30);
    let server = TestServer::start(dir.path());
    (dir, server)
}

fn open_with(server: &TestServer, options: Option<&CacheOptions>) -> BlockCache {
    let store = Store::open(&server.url).unwrap();
    let manifest = Manifest::fetch(&store).unwrap();
    BlockCache::open(store, &Arc::new(manifest), options).unwrap()
}

fn open(server: &TestServer, dir: &Path, bytes: u64) -> BlockCache {
    open_with(server, Some(&CacheOptions { dir: dir.to_owned(), bytes }))
}

fn pin(cache: &BlockCache, blocks: Range<usize>) -> Result<Pins> {
    let range = blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES;
    cache.pin(&[(cache.file(0), range)], &Cancel::default())
}

fn read(cache: &BlockCache, range: Range<usize>) -> Vec<u8> {
    let mut bytes_read = Vec::new();
    cache.read(&cache.file(0), range, |bytes| bytes_read.extend_from_slice(bytes)).unwrap();
    bytes_read
}

fn names(cache: &BlockCache) -> Vec<String> {
    let files = std::fs::read_dir(cache.dir().unwrap().join("runs")).unwrap();
    let mut names: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn absent_blocks_of_any_range_are_fetched() {
    let (corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(corpus.path().join("shard-000000-000.tokens")).unwrap();
    let (shared, private) = (open(&server, dir.path(), 1 << 40), open_with(&server, None));
    let block = BLOCK_BYTES;
    for range in [0..1, 7 * block + 9..8 * block + 1, 3 * block..3 * block, block..whole.len(), 5..2 * block]
    {
        for cache in [&shared, &private] {
            let _tail = pin(cache, 0..0).unwrap();
            assert_eq!(read(cache, range.clone()), whole[range.clone()], "{range:?}");
        }
    }
    assert_eq!(names(&shared), ["0.0", "0.1", "0.2", "0.3"]);
    assert!(server.bytes_served(".tokens") == 2 * whole.len() as u64, "each reader fetches each block once");
}

#[test]
fn block_damaged_in_the_store_is_not_shared() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let _tail = pin(&cache, 0..0).unwrap();
    server.log().always = Some((".tokens", Fault::Corrupt));
    let error = pin(&cache, 0..1).unwrap_err().to_string();
    assert!(error.contains("block 0 of 21 is damaged in the store"), "{error}");
    assert_eq!(names(&cache), ["0.3"]);
}

#[test]
fn pinned_blocks_survive_eviction_and_loss_of_the_folder() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let (reader, other) = (open(&server, dir.path(), 1 << 40), open(&server, dir.path(), 0));
    let pins = pin(&reader, 1..10).unwrap();
    let before = read(&reader, BLOCK_BYTES..10 * BLOCK_BYTES);
    other.folder.as_ref().unwrap().make_room(1);
    assert_eq!(names(&other), [""; 0]);
    std::fs::remove_dir_all(reader.dir().unwrap()).unwrap();
    let served = server.bytes_served("");
    assert!(read(&reader, BLOCK_BYTES..10 * BLOCK_BYTES) == before && server.bytes_served("") == served);
    pin(&reader, 0..1).unwrap(); // includes the mapped blocks
    assert_eq!(names(&reader), ["0.0"]);
    drop(pins);
    lock(&reader.recent).clear();
    assert!(read(&reader, BLOCK_BYTES..10 * BLOCK_BYTES) == before && server.bytes_served("") > served);
}

#[test]
fn least_recently_used_runs_are_evicted() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 13 * BLOCK_BYTES as u64);
    for blocks in [0..1, 8..16, 0..1] {
        drop(pin(&cache, blocks).unwrap());
    }
    drop(pin(&cache, 16..20).unwrap());
    assert_eq!(names(&cache), ["0.0", "0.2", "0.3"]);
    let lower = open(&server, dir.path(), 5 * BLOCK_BYTES as u64);
    lower.folder.as_ref().unwrap().make_room(1);
    assert_eq!(names(&lower), ["0.2", "0.3"], "a lower limit removes files at the next fetch");
}

#[test]
fn suspended_or_killed_reader_does_not_block_others() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let (reader, suspended) = (open(&server, dir.path(), 1 << 40), open(&server, dir.path(), 1 << 40));
    let claim = suspended.claim(&Pin::new(&suspended.file(0), 3), Duration::ZERO).unwrap();
    assert!(reader.claim(&Pin::new(&reader.file(0), 3), Duration::ZERO).is_none());
    let start = Instant::now();
    let tail = pin(&reader, 0..0).unwrap();
    assert!((PATIENCE..4 * PATIENCE).contains(&start.elapsed()));
    drop((tail, claim));
    std::fs::write(reader.dir().unwrap().join("runs/0.0.lock"), "").unwrap(); // left by a killed reader
    let start = Instant::now();
    pin(&reader, 0..1).unwrap();
    assert!(start.elapsed() < PATIENCE);
    assert_eq!(names(&reader), ["0.0", "0.3"]);
    // A canceled reader does not wait.
    let _claim = suspended.claim(&Pin::new(&suspended.file(0), 1), Duration::ZERO).unwrap();
    let cancel = Cancel::default();
    cancel.raise();
    assert!(matches!(reader.pin(&[(reader.file(0), 0..1 << 20)], &cancel), Err(Error::Interrupted)));
}

#[test]
fn full_disk_is_reported_with_a_remedy() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    for (options, kind, advice) in [
        (true, ErrorKind::StorageFull, "lower data.cache_bytes (99 now) or choose another data.cache_dir"),
        (true, ErrorKind::PermissionDenied, "choose another data.cache_dir"),
        (false, ErrorKind::StorageFull, "set TMPDIR to a writable folder with more free space"),
    ] {
        let options = options.then(|| CacheOptions { dir: dir.path().to_owned(), bytes: 99 });
        let error = open_with(&server, options.as_ref()).cannot_write(IoError::from(kind)).to_string();
        assert!(error.contains(advice) && !error.contains('\n'), "{error}");
    }
}
