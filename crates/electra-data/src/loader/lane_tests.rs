//! Loaders whose batches are divided into lanes: the same batches on any number of ranks, each block once per epoch, and
//! what the nodes fetch.

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use super::tests::{corpora, hash, loader_of, options, rows};
use super::{Loader, LoaderOptions, LoaderState};
use crate::format::testing::write_corpus;
use crate::format::{CacheOptions, Corpus};
use crate::loader::tests::VOCAB;

/// Options of 24 rows per batch in 8 lanes, without an end.
fn laned() -> LoaderOptions {
    LoaderOptions { lanes: 8, batch_size: 24, epochs: None, ..options() }
}

fn ranks(corpora: &[Arc<Corpus>], world_size: i64) -> Vec<Loader> {
    let weighted = || corpora.iter().map(|corpus| (corpus.clone(), None)).collect();
    let loader = |rank| Loader::mixture(weighted(), &LoaderOptions { rank, world_size, ..laned() }).unwrap();
    (0..world_size).map(loader).collect()
}

/// Hashes of the next batches, concatenated over ranks.
fn next(ranks: &mut [Loader], count: usize) -> Vec<u64> {
    let mut batch = || {
        let parts = ranks.iter_mut().map(|rank| rows(&rank.next().unwrap().unwrap()));
        hash(&parts.flatten().collect::<Vec<_>>())
    };
    (0..count).map(|_| batch()).collect()
}

fn state(ranks: &[Loader]) -> LoaderState {
    let state = LoaderState::merged(ranks.iter().map(Loader::state).collect()).unwrap();
    LoaderState::from_json(&state.to_json().unwrap()).unwrap()
}

#[test]
fn the_order_of_lanes_is_fixed() {
    // As for the golden hashes of one corpus: saved states of running trainings depend on this.
    let dir = tempfile::tempdir().unwrap();
    let batches = next(&mut ranks(&corpora(dir.path()), 1), 60);
    let bytes: Vec<u8> = batches.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    assert_eq!(format!("{:016x}", xxh3_64(&bytes)), "30babd32aa00189c");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_run_resumes_on_any_number_of_ranks(
        before in 1_i64..17, after in prop::sample::select(vec![1, 2, 3, 5, 8, 30]), done in 0_usize..50,
        is_mixture: bool,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let corpora = corpora(dir.path());
        let corpora = if is_mixture { &corpora[..] } else { &corpora[..1] };
        let expected = next(&mut ranks(corpora, 1), 60);
        let mut first = ranks(corpora, before);
        prop_assert_eq!(next(&mut first, done), &expected[..done]);
        let mut second = ranks(corpora, after);
        second.iter_mut().try_for_each(|rank| rank.restore(&state(&first))).unwrap();
        prop_assert_eq!(state(&second), state(&first));
        prop_assert_eq!(next(&mut second, 60 - done), &expected[done..]);
    }
}

#[test]
fn nodes_fetch_their_own_lanes_only() {
    use crate::store::test_server::TestServer;
    // Eight shards of eight blocks.
    let corpus = tempfile::tempdir().unwrap();
    let documents: Vec<_> = (0..64 * 512).map(|number| vec![vec![5 + number % 20_000; 512]]).collect();
    write_corpus(corpus.path(), VOCAB, &documents, 8 * 262_144);
    let all = super::remote_tests::token_bytes(corpus.path());
    let options =
        LoaderOptions { lanes: 16, batch_size: 64, sequence_length: 512, epochs: None, ..options() };
    let whole = loader_of(corpus.path(), &options);
    let expected: Vec<_> = whole.take(300).map(|batch| rows(&batch.unwrap())).collect();
    let (rank, world_size) = (1, 4);
    let server = TestServer::start(corpus.path());
    let scratch = tempfile::tempdir().unwrap();
    let opened = |bytes| {
        let cache = CacheOptions { dir: scratch.path().into(), bytes };
        let opened = Arc::new(Corpus::open_with(Path::new(&server.url), Some(&cache)).unwrap());
        Loader::new(opened, &LoaderOptions { rank, world_size, ..options.clone() })
    };
    // With the smallest cache, nothing is fetched further ahead than the next window.
    let refused = opened(1).err().unwrap().to_string();
    let mut loader = opened(refused.rsplit(' ').next().unwrap().parse().unwrap()).unwrap();
    let found = loader.by_ref().take(300).map(|batch| rows(&batch.unwrap()));
    assert!(found.zip(&expected).all(|(part, batch)| part == batch[16..32]));
    assert!((0.5..0.75).contains(&loader.passes()[0]), "{:?}", loader.passes());
    // Its part of the first epoch, and of the second one, which is being fetched.
    let (bytes, share) = (server.bytes_served(".tokens"), all / world_size as u64);
    assert!(bytes >= share && bytes < share * 22 / 10, "{bytes} of {all}");
}
