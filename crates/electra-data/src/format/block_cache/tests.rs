use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{BlockCache, CacheOptions};
use crate::format::Manifest;
use crate::format::testing::write_corpus;
use crate::store::test_server::{Fault, TestServer};
use crate::store::{Cancel, Store};

/// A shard of 20 blocks of tokens, and their line lengths.
fn corpus() -> (tempfile::TempDir, TestServer) {
    let dir = tempfile::tempdir().unwrap();
    let documents: Vec<Vec<Vec<u32>>> = (0..20).map(|number| vec![vec![5 + number; 32_768]]).collect();
    write_corpus(dir.path(), 30_005, &documents, 1 << 30);
    let server = TestServer::start(dir.path());
    (dir, server)
}

fn open(server: &TestServer, dir: &Path, bytes: u64) -> Arc<BlockCache> {
    let (store, options) = (Store::open(&server.url).unwrap(), CacheOptions { dir: dir.to_owned(), bytes });
    let manifest = Manifest::fetch(&store).unwrap();
    Arc::new(BlockCache::open(store, &manifest, Some(&options)).unwrap())
}

#[test]
fn a_block_is_fetched_with_the_table_that_verifies_it() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    for file in 0..2 {
        let block = cache.geometry(file).first;
        cache.fetch(std::slice::from_ref(&(block..block + 1)), &Cancel::default()).unwrap();
        assert!(cache.state.is_present(block));
    }
}

#[test]
fn a_block_that_is_damaged_in_the_store_is_not_shared() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let block = cache.geometry(0).first;
    cache.fetch(&[cache.geometry(0).tail()], &Cancel::default()).unwrap();
    server.log().always = Some(Fault::Corrupt);
    let error = cache.fetch(std::slice::from_ref(&(block..block + 1)), &Cancel::default()).unwrap_err();
    assert!(error.to_string().contains("block 0 of") && !cache.state.is_present(block), "{error}");
}

#[test]
fn a_table_that_a_crash_lost_is_fetched_again() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let geometry = cache.geometry(0);
    cache.require(geometry.tail()).unwrap();
    let length = (geometry.bytes - geometry.table) as usize;
    let file = cache.local_file(0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![0; length], geometry.table).unwrap();
    cache.require(geometry.first..geometry.first + 1).unwrap();
    assert!(cache.state.is_present(geometry.first));
}

#[test]
fn what_is_read_unannounced_keeps_its_table() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let (reader, other) = (open(&server, dir.path(), 1 << 40), open(&server, dir.path(), 0));
    let geometry = reader.geometry(0);
    reader.fetch(&[geometry.tail()], &Cancel::default()).unwrap();
    reader.require(geometry.first + 3..geometry.first + 4).unwrap();
    other.make_room(1).unwrap();
    assert!(reader.state.is_present(geometry.first + 3));
    assert!(reader.state.is_present(geometry.table_block()));
    drop(reader); // as a killed one, which says nothing
    other.make_room(1).unwrap();
    assert_eq!(other.state.used(), 0);
}

#[test]
fn what_is_no_longer_pinned_is_verified_again() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let (tail, table) = (cache.geometry(0).tail(), cache.geometry(0).table_block());
    let pins = cache.pin(vec![tail]).unwrap();
    cache.verified.at(0).store(1 << table, Ordering::Relaxed);
    drop(pins);
    assert_eq!(cache.verified.at(0).load(Ordering::Relaxed), 0);
}

#[test]
fn the_first_reader_counts_anew_what_is_present() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let tail = cache.geometry(0).tail();
    cache.require(tail.clone()).unwrap();
    cache.state.set_present(tail.start, 1 << 16); // another reader has fetched it as well
    let (used, path) = (cache.state.used(), cache.dir().join("state"));
    drop(cache);
    // What a kill between a block's bit and the sum of bytes leaves in the header.
    let file = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &0_u64.to_le_bytes(), 16).unwrap();
    assert!(used > 0 && open(&server, dir.path(), 1 << 40).state.used() == used);
}

#[test]
fn a_cache_that_is_removed_while_in_use_is_one_line() {
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 40);
    let blocks = cache.geometry(0).tail();
    cache.require(blocks.clone()).unwrap();
    std::fs::remove_dir_all(cache.dir()).unwrap();
    let _other = open(&server, dir.path(), 1 << 40); // a new one in its place, whose blocks are not ours
    let error = cache.require(blocks.start - 1..blocks.start).unwrap_err().to_string();
    assert!(error.contains("state: the cache was removed while it was in use; start again"), "{error}");
}

#[test]
fn the_space_of_a_readers_state_is_taken_when_it_opens() {
    use std::os::unix::fs::MetadataExt;
    let (_corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let cache = open(&server, dir.path(), 1 << 30);
    // A hole in a mapped file would kill the process on a full disk.
    assert!(512 * cache.dir().join("state").metadata().unwrap().blocks() > 256 << 10);
}
