use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::locks::PATIENCE;
use super::{BlockCache, CacheOptions};
use crate::format::Manifest;
use crate::format::header::BLOCK_BYTES;
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
    Arc::new(BlockCache::open(store, &Arc::new(manifest), Some(&options)).unwrap())
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
    let (file, _) = cache.local_file(0).unwrap();
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
    let (used, path) = (cache.state.used(), cache.dir().unwrap().join("state"));
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
    std::fs::remove_dir_all(cache.dir().unwrap()).unwrap();
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
    assert!(512 * cache.dir().unwrap().join("state").metadata().unwrap().blocks() > 256 << 10);
}

#[test]
fn a_suspended_reader_holds_up_nobody_for_ever() {
    let (corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let (reader, suspended) = (open(&server, dir.path(), 1 << 40), open(&server, dir.path(), 1 << 40));
    let geometry = reader.geometry(0);
    // It fetches blocks that begin elsewhere, of which it has listed one as present.
    for turn in 0..2 {
        assert!(suspended.state.try_lock_fetch(&(geometry.first..geometry.first + 4), turn).unwrap());
    }
    let start = Instant::now();
    reader.require(geometry.first + 1..geometry.first + 3).unwrap();
    assert!(start.elapsed() >= 2 * PATIENCE);
    assert!(reader.state.is_present(geometry.first + 1));
    // It is resumed after the block was evicted, and again where it had written it.
    let run = geometry.first + 1..geometry.first + 2;
    let range = geometry.bytes_of(&run);
    let bytes = std::fs::read(corpus.path().join(&reader.files.entry(0).file)).unwrap();
    let bytes = &bytes[range.start as usize..range.end as usize];
    reader.unpin(std::slice::from_ref(&(run.start..run.end + 1))).unwrap();
    reader.evict(&reader.state.hold().unwrap(), run.start).unwrap();
    let used = reader.state.used();
    for _ in 0..2 {
        suspended.accept(&run, bytes).unwrap();
        assert!(reader.state.is_present(run.start) && reader.state.used() == used + range.end - range.start);
        assert_eq!(&reader.map(0).unwrap()[range.start as usize..range.end as usize], bytes);
    }
    let held = suspended.state.hold().unwrap();
    let error = reader.pin(vec![run.clone()]).unwrap_err().to_string();
    assert!(error.contains("another process has held it for 2 s; if it is suspended, resume it"), "{error}");
    drop(held);
    reader.pin(vec![run]).unwrap();
}

#[test]
fn a_forged_manifest_cannot_have_the_cache_cut_its_own_files_or_those_of_another() {
    let (corpus, server) = corpus();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&server.url).unwrap();
    let options = CacheOptions { dir: dir.path().to_owned(), bytes: 1 << 40 };
    let open =
        |manifest: Manifest| BlockCache::open(store.clone(), &Arc::new(manifest.seal()), Some(&options));
    let sound = Manifest::read(corpus.path()).unwrap();
    let other = sound.shards[0].lines.file.clone();
    for name in ["state", "lock", "manifest.json", "vocab.txt", ".tmp-1-state", &other] {
        let mut forged = sound.clone();
        forged.shards[0].tokens.file = name.to_owned();
        let error = open(forged).unwrap_err().to_string();
        assert!(error.contains(&format!("/{name}: no release gives")), "{error}");
    }
    let mut forged = sound.clone();
    forged.tokenizer.file = "state".to_owned();
    assert!(open(forged).is_err());
    let mut forged = sound.clone();
    forged.shards[0].lines.bytes = 1 << 60;
    assert!(open(forged).is_err());
    // Equal hashes, other lengths.
    let (first, mut longer) = (open(sound.clone()).unwrap(), sound.clone());
    longer.shards[0].lines.bytes += BLOCK_BYTES as u64 + 8;
    let second = open(longer.clone()).unwrap();
    assert_eq!(longer.seal().content_hash, sound.content_hash);
    let file = |cache: &BlockCache| cache.local_file(1).unwrap().0.metadata().unwrap().len();
    assert!(file(&second) > file(&first) && file(&first) == sound.shards[0].lines.bytes);
}

#[test]
fn a_private_cache_leaves_no_names() {
    let (_corpus, server) = corpus();
    let store = Store::open(&server.url).unwrap();
    let manifest = Manifest::fetch(&store).unwrap();
    let cache = BlockCache::open(store, &Arc::new(manifest), None).unwrap();
    assert!(cache.dir().is_none() && cache.limit().is_none());
    for file in 0..2 {
        let (file, _) = cache.local_file(file).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        assert!(std::fs::read_link(path).unwrap().to_string_lossy().ends_with(" (deleted)"));
    }
}
