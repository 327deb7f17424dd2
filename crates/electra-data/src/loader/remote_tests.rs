//! Loaders over a corpus on a web server: the same batches as from disk, little traffic, a bounded cache, and
//! faulty servers.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tests::{hashes, loader_of, named, rows};
use super::{Loader, LoaderOptions, LoaderState};
use crate::error::{Error, Result};
use crate::format::testing::write_corpus;
use crate::format::{CacheOptions, Corpus};
use crate::philox::{Purpose, Stream};
use crate::store::test_server::{Fault, TestServer};

const GENEROUS: u64 = 1 << 40;

/// Writes `count` documents of up to `lines` lines with fewer than `tokens` tokens.
fn write(dir: &Path, seed: u64, count: u32, (lines, tokens): (u32, u32), max_tokens: u64) {
    let mut stream = Stream::new(seed, Purpose::Tie, [0; 3]);
    let mut document = |_| -> Vec<Vec<u32>> {
        let lines = 0..1 + stream.below(lines);
        lines.map(|_| (0..stream.below(tokens)).map(|_| 5 + stream.below(30_000)).collect()).collect()
    };
    let documents: Vec<_> = (0..count).map(&mut document).collect();
    write_corpus(dir, 30_005, &documents, max_tokens);
}

/// Some shards of two blocks each: two million tokens in documents of about 300.
fn write_shards(dir: &Path) {
    write(dir, 8, 8_000, (9, 120), 524_288);
}

fn served(write: fn(&Path)) -> (tempfile::TempDir, tempfile::TempDir, TestServer) {
    let (corpus, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(corpus.path());
    let server = TestServer::start(corpus.path());
    (corpus, scratch, server)
}

fn options() -> LoaderOptions {
    LoaderOptions { batch_size: 500, seed: 3, epochs: Some(1), ..LoaderOptions::default() }
}

fn cached(server: &TestServer, dir: &Path, bytes: u64, options: &LoaderOptions) -> Result<Loader> {
    let cache = CacheOptions { dir: dir.join("cache"), bytes };
    Loader::new(Arc::new(Corpus::open_with(Path::new(&server.url), Some(&cache))?), options)
}

pub(super) fn token_bytes(dir: &Path) -> u64 {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let tokens = files.filter(|file| file.file_name().to_string_lossy().ends_with(".tokens"));
    tokens.map(|file| file.metadata().unwrap().len()).sum()
}

fn runs(dir: &Path) -> Vec<PathBuf> {
    let folder = std::fs::read_dir(dir.join("cache")).unwrap().next().unwrap().unwrap().path();
    let files = std::fs::read_dir(folder.join("runs")).unwrap();
    files.map(|entry| entry.unwrap().path()).collect()
}

/// Bytes on disk of files, some of which other threads may remove.
fn disk_usage(files: &[PathBuf]) -> u64 {
    use std::os::unix::fs::MetadataExt;
    files.iter().filter_map(|file| file.metadata().ok()).map(|metadata| 512 * metadata.blocks()).sum()
}

#[test]
fn batches_equal_batches_from_disk_in_any_packing() {
    let (corpus, scratch, server) = served(write_shards);
    for (packing, cut_at) in
        [("best-fit", "token"), ("best-fit", "word"), ("best-fit", "line"), ("examples", "token")]
    {
        let word_starts = (cut_at == "word").then(|| (0..30_005).map(|id| id % 3 > 0).collect());
        let cuts = LoaderOptions { cut_at: named(cut_at), word_starts, ..options() };
        let options = LoaderOptions { packing: named(packing), ..cuts };
        let local = hashes(loader_of(corpus.path(), &options));
        let remote = cached(&server, scratch.path(), GENEROUS, &options).unwrap();
        assert_eq!(remote.num_rows().unwrap(), loader_of(corpus.path(), &options).num_rows().unwrap());
        assert_eq!(hashes(remote), local, "{packing}");
        let private = Corpus::open(Path::new(&server.url)).unwrap();
        assert_eq!(hashes(Loader::new(Arc::new(private), &options).unwrap()), local, "{packing}");
    }
}

#[test]
fn readers_of_one_node_fetch_each_byte_once() {
    let (corpus, scratch, server) = served(write_shards);
    let options = LoaderOptions { epochs: Some(2), ..options() };
    let local = hashes(loader_of(corpus.path(), &options));
    let read = || assert_eq!(hashes(cached(&server, scratch.path(), GENEROUS, &options).unwrap()), local);
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(read))));
    read();
    assert_eq!(server.bytes_served(".tokens"), token_bytes(corpus.path()));
    assert_eq!(server.bytes_served(".lines"), 0, "best-fit packing reads no lines");
}

#[test]
fn cache_of_three_windows_stays_small_and_fetches_each_block_once() {
    let (corpus, scratch, server) = served(write_many_windows);
    let options = LoaderOptions { batch_size: 4_096, sequence_length: 512, ..options() };
    let needed = cached(&server, scratch.path(), 1 << 20, &options).err().unwrap().to_string();
    let limit: u64 =
        needed.split_once("must be at least ").unwrap().1.split_once(';').unwrap().0.parse().unwrap();
    assert!(needed.starts_with("cache_bytes = 1048576: must be at least "), "{needed}");
    let total = token_bytes(corpus.path());
    assert!(limit < total * 7 / 8, "{limit} of {total}");
    let local = hashes(loader_of(corpus.path(), &options));
    let mut remote = cached(&server, scratch.path(), limit, &options).unwrap();
    let (mut hashes, mut largest) = (Vec::new(), 0);
    for batch in remote.by_ref() {
        hashes.push(super::tests::hash(&rows(&batch.unwrap())));
        largest = largest.max(disk_usage(&runs(scratch.path())));
    }
    assert_eq!(hashes, local);
    assert!(largest <= limit + (1 << 20), "{largest} of {limit}");
    // A block begins and ends within a checksummed block, which its neighbor needs too: 9 instead of 8 per block.
    let served = server.bytes_served(".tokens");
    assert!(served < total * 5 / 4, "{served} of {total}");
}

/// Five windows: 320 blocks, eight per shard.
fn write_many_windows(dir: &Path) {
    let documents: Vec<Vec<Vec<u32>>> =
        (0..40 * 8 * 64).map(|number| vec![vec![5 + number % 20_000; 4_096]]).collect();
    write_corpus(dir, 30_005, &documents, 8 * 262_144);
}

#[test]
fn temporary_faults_change_nothing_and_only_faults_cause_retries() {
    let (corpus, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_shards(corpus.path());
    let local = hashes(loader_of(corpus.path(), &options()));
    let mut without_faults = 0;
    for (fault, count) in [
        (Fault::Sound, 0),
        (Fault::Undone(503, ""), 2),
        (Fault::Cut, 2),
        (Fault::Stall, 1), // lasts as long as the timeout
        (Fault::Short, 2),
        (Fault::Corrupt, 2),
        (Fault::Slow, 1), // a slow line is not a fault
    ] {
        let server = TestServer::start(corpus.path());
        server.log().faults = vec![(".tokens", fault); count];
        let dir = scratch.path().join(format!("{fault:?}"));
        assert_eq!(hashes(cached(&server, &dir, GENEROUS, &options()).unwrap()), local, "{fault:?}");
        let log = server.log();
        without_faults = if count == 0 { log.requests.len() } else { without_faults };
        let repeated = if fault == Fault::Slow { 0 } else { count };
        let expected = (0, without_faults + repeated);
        assert_eq!((log.faults.len(), log.requests.len()), expected, "{fault:?}");
    }
}

#[test]
fn permanent_faults_are_one_line_and_reads_are_bounded() {
    let corpus = tempfile::tempdir().unwrap();
    write_corpus(corpus.path(), 100, &[vec![vec![5, 6]]], 1);
    for (name, fault, expected) in [
        ("", Fault::Undone(403, ""), "check the credentials and their read permission"),
        (".tokens", Fault::Corrupt, "restore the file from a copy"),
        (".tokens", Fault::Endless(200), "longer than"),
        ("manifest.json", Fault::Endless(200), "longer than the 1073741824 bytes"),
        ("vocab.txt", Fault::Endless(200), "longer than the 268435456 bytes"),
        (".tokens", Fault::Endless(403), "check the credentials"),
    ] {
        let server = TestServer::start(corpus.path());
        server.log().always = Some((name, fault));
        let read = || {
            let corpus = Corpus::open(Path::new(&server.url))?;
            corpus.document(0)?;
            corpus.tokenizer_path()
        };
        let error = read().unwrap_err().to_string();
        let is_expected = error.starts_with(&server.url) && error.contains(name) && error.contains(expected);
        assert!(is_expected && !error.contains('\n') && !server.log().was_flooded, "{error}");
    }
    let nothing = tempfile::tempdir().unwrap();
    let server = TestServer::start(nothing.path());
    assert!(matches!(Corpus::open(Path::new(&server.url)), Err(Error::NotFound { .. })));
}

#[test]
fn blocks_lost_in_a_crash_are_fetched_again() {
    let (_corpus, scratch, server) = served(write_shards);
    let local = hashes(cached(&server, scratch.path(), GENEROUS, &options()).unwrap());
    // Zeros in blocks and tables, truncated and missing files.
    let mut files = runs(scratch.path());
    files.sort();
    assert!(
        files.len() > 12 && files.iter().all(|file| !file.to_string_lossy().contains(".lock")),
        "{files:?}"
    );
    for (number, path) in files.iter().enumerate() {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        match number % 4 {
            0 => std::os::unix::fs::FileExt::write_all_at(&file, &[0; 70_000], 7_000).unwrap(),
            1 => file.set_len(1_000).unwrap(),
            2 => std::fs::remove_file(path).unwrap(),
            _ => {}
        }
    }
    assert_eq!(hashes(cached(&server, scratch.path(), GENEROUS, &options()).unwrap()), local);
}

/// The store stops responding after any number of requests, also after requests that no planner announced: documents reach
/// beyond the blocks of this rank by more than the margin that is fetched ahead.
#[test]
fn loader_waiting_for_a_dead_store_ends_at_once() {
    let corpus = tempfile::tempdir().unwrap();
    let documents: Vec<_> = (0..3).map(|_| vec![vec![7; 100]; 6_000]).collect();
    write_corpus(corpus.path(), 30_005, &documents, 1 << 20);
    let ways = [("best-fit", "token"), ("best-fit", "line"), ("examples", "token")];
    let faults = [Fault::Undone(503, ""), Fault::Stall, Fault::Slow];
    let interrupt = |(packing, cut_at): (&str, &str), fault, requests: usize| -> bool {
        let (scratch, server) = (tempfile::tempdir().unwrap(), TestServer::start(corpus.path()));
        server.log().faults = vec![("s", Fault::Sound); requests]; // of both files
        let options = LoaderOptions {
            packing: named(packing),
            cut_at: named(cut_at),
            epochs: None,
            lanes: 2,
            world_size: 2,
            ..options()
        };
        let mut loader = cached(&server, scratch.path(), GENEROUS, &options).unwrap();
        server.log().always = Some(("s", fault));
        let mut poll = || loader.poll_next(Duration::from_millis(200)).unwrap();
        let waits = (0..40).any(|_| matches!(poll(), super::Poll::Pending));
        let start = Instant::now();
        drop(loader); // the request would be retried for three minutes
        assert!(start.elapsed() < Duration::from_secs(1), "{packing} {cut_at} {fault:?} {requests}");
        waits
    };
    let end = |way, fault| (0..99).find(|&requests| !interrupt(way, fault, requests)).expect("the end");
    let ends: Vec<_> = std::thread::scope(|scope| {
        let all = ways.iter().flat_map(|way| faults.map(|fault| (*way, fault)));
        let threads: Vec<_> = all.map(|(way, fault)| scope.spawn(move || end(way, fault))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(ends.iter().all(|&requests| requests > 2), "{ends:?}");
}

const READER: &str = "ELECTRA_FAST_TEST_READER";

/// Options of the three readers of the test below: packing, cuts, seed.
const READERS: [(&str, &str, i64); 3] =
    [("best-fit", "token", 1), ("examples", "token", 2), ("best-fit", "line", 3)];

fn reader_options(number: usize) -> LoaderOptions {
    let (packing, cut_at, seed) = READERS[number];
    let (packing, cut_at) = (named(packing), named(cut_at));
    LoaderOptions { packing, cut_at, seed, batch_size: 1_000, sequence_length: 128, ..options() }
}

/// A process of the test below. Appends a line for each batch, and resumes after the last line.
#[test]
fn reader_in_a_separate_process() {
    let Ok(job) = std::env::var(READER) else { return };
    let [number, url, dir, bytes, output] = job.split(' ').collect::<Vec<_>>()[..] else { panic!("{job}") };
    let cache = CacheOptions { dir: dir.into(), bytes: bytes.parse().unwrap() };
    let corpus = Arc::new(Corpus::open_with(Path::new(url), Some(&cache)).unwrap());
    let mut loader = Loader::new(corpus, &reader_options(number.parse().unwrap())).unwrap();
    let earlier = std::fs::read_to_string(output).unwrap_or_default();
    if let Some((_, state)) = earlier.lines().last().and_then(|line| line.split_once(' ')) {
        loader.restore(&LoaderState::from_json(state).unwrap()).unwrap();
    }
    let mut output = std::fs::File::options().create(true).append(true).open(output).unwrap();
    while let Some(batch) = loader.next() {
        let (hash, state) = (super::tests::hash(&rows(&batch.unwrap())), loader.state().to_json().unwrap());
        output.write_all(format!("{hash} {state}\n").as_bytes()).unwrap();
    }
}

/// Readers of different rows, killed all the time, with a cache that is too small for the corpus and for their blocks
/// in use.
#[test]
fn killed_readers_of_a_small_cache_get_the_rows_from_disk() {
    let (corpus, scratch, server) = served(write_blocks);
    let local: Vec<Vec<u64>> =
        (0..3).map(|number| hashes(loader_of(corpus.path(), &reader_options(number)))).collect();
    let needed = |number| {
        let refused = cached(&server, scratch.path(), 1, &reader_options(number)).err().unwrap().to_string();
        refused.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let bytes = (0..3).map(needed).max().unwrap();
    let output = |number: usize| scratch.path().join(number.to_string());
    let start = |number: usize| {
        let (url, dir, output) = (&server.url, scratch.path().join("cache"), output(number));
        let job = format!("{number} {url} {} {bytes} {}", dir.display(), output.display());
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["reader_in_a_separate_process"]).env(READER, job).stdout(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let hashes_of = |number: usize| -> Vec<u64> {
        let text = std::fs::read_to_string(output(number)).unwrap_or_default();
        text.lines().map(|line| line.split_once(' ').unwrap().0.parse().unwrap()).collect()
    };
    let mut readers: Vec<_> = (0..3).map(|number| (start(number), 0)).collect();
    let mut kills = 0;
    while (0..3).any(|number| hashes_of(number).len() < local[number].len()) {
        for (number, (reader, killed_at)) in readers.iter_mut().enumerate() {
            let (done, all) = (hashes_of(number).len(), local[number].len());
            if done < all && done >= *killed_at + all / 6 {
                reader.kill().unwrap();
                reader.wait().unwrap();
                (*reader, *killed_at, kills) = (start(number), hashes_of(number).len(), kills + 1);
            }
            let ended = reader.try_wait().unwrap();
            assert!(ended.is_none_or(|status| status.success()), "reader {number} failed at {done} of {all}");
        }
        std::thread::sleep(Duration::from_millis(30));
    }
    readers.iter_mut().for_each(|(reader, _)| assert!(reader.wait().unwrap().success()));
    assert_eq!((0..3).map(hashes_of).collect::<Vec<_>>(), local);
    assert!(kills >= 6, "{kills}");
    let total: u64 =
        std::fs::read_dir(corpus.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes < total * 3 / 4, "a cache of {bytes} of {total} bytes");
}

/// Five windows of blocks, one block per shard: a checksummed block of tokens, and another one with the rest and the tables.
fn write_blocks(dir: &Path) {
    write(dir, 9, 13_000, (20, 200), 40_000);
}
