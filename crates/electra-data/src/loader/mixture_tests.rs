//! Loaders over several corpora: proportions, order, resuming, epochs, and what is refused.

use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use xxhash_rust::xxh3::xxh3_64;

use super::tests::{VOCAB, documents, hash, hashes, options, rows};
use super::{Loader, LoaderOptions, LoaderState};
use crate::error::Result;
use crate::format::testing::{rewrite_manifest, write_corpus};
use crate::format::{Corpus, TokenizerEntry};
use crate::loader::mixture::Mixture;

type Weighted = Vec<(Arc<Corpus>, Option<f64>)>;

/// Corpora of 120, 40 and 80 of the same documents each, in shards of 500 tokens: several windows in the first.
pub(super) fn corpora(dir: &Path) -> Vec<Arc<Corpus>> {
    let all = documents(240);
    let mut rest = &all[..];
    let mut write = |(number, count): (usize, usize)| {
        let dir = dir.join(number.to_string());
        let (ours, others) = rest.split_at(count);
        rest = others;
        write_corpus(&dir, VOCAB, ours, 500);
        Arc::new(Corpus::open(&dir).unwrap())
    };
    [120, 40, 80].into_iter().enumerate().map(&mut write).collect()
}

fn weighted(corpora: &[Arc<Corpus>], weights: &[f64]) -> Weighted {
    corpora.iter().cloned().zip(weights.iter().copied().map(Some)).collect()
}

fn loader(corpora: &[Arc<Corpus>], weights: &[f64], change: impl FnOnce(&mut LoaderOptions)) -> Loader {
    let mut options = options();
    change(&mut options);
    Loader::mixture(weighted(corpora, weights), &options).unwrap()
}

fn all_rows(loader: Loader) -> Vec<Vec<i32>> {
    loader.flat_map(|batch| rows(&batch.unwrap())).collect()
}

/// The stream of rows of each corpus alone, under its seed in a mixture.
fn alone(corpora: &[Arc<Corpus>], epochs: i64) -> Vec<Vec<Vec<i32>>> {
    let mixture =
        Mixture::new(weighted(corpora, &vec![1.0; corpora.len()]), options().seed as u64, 1).unwrap();
    let stream = |(corpus, seed): (&Arc<Corpus>, u64)| {
        let options = LoaderOptions { seed: seed as i64, epochs: Some(epochs), ..options() };
        all_rows(Loader::new(corpus.clone(), &options).unwrap())
    };
    corpora.iter().zip(mixture.corpora().iter().map(|blocks| blocks.seed())).map(stream).collect()
}

#[test]
fn a_mixture_interleaves_the_streams_of_its_corpora_in_proportion() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let alone = alone(&corpora, 2);
    let weights = [0.2, 0.3, 0.5];
    let mixed = all_rows(loader(&corpora, &weights, |_| {}));
    assert_eq!(mixed.len(), alone.iter().map(Vec::len).sum::<usize>());
    let mut given = [0; 3];
    let mut finished = Vec::new();
    for (row, values) in (1..).zip(&mixed) {
        // The next one of a corpus in its own order.
        let corpus = (0..3).find(|&corpus| alone[corpus].get(given[corpus]) == Some(values)).unwrap();
        given[corpus] += 1;
        if finished.is_empty() {
            for (given, weight) in given.iter().zip(weights) {
                assert!((*given as f64 - f64::from(row) * weight).abs() < 1.0);
            }
        }
        if given[corpus] == alone[corpus].len() {
            finished.push(corpus);
        }
    }
    // All have been read twice, and ended at different times.
    assert_eq!((finished, given.to_vec()), (vec![1, 2, 0], alone.iter().map(Vec::len).collect()));
}

#[test]
fn without_weights_all_corpora_end_together() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let unweighted = corpora.iter().map(|corpus| (corpus.clone(), None)).collect();
    let mut loader = Loader::mixture(unweighted, &LoaderOptions { batch_size: 1, ..options() }).unwrap();
    let rows = 2 * loader.num_rows().unwrap() as usize;
    assert_eq!(loader.by_ref().take(rows / 2).count(), rows / 2);
    assert!(loader.passes().iter().all(|passes| (passes - 1.0).abs() < 0.05), "{:?}", loader.passes());
    assert_eq!(loader.by_ref().count(), rows - rows / 2);
    assert_eq!(loader.passes(), [2.0; 3]);
    assert_eq!(
        loader.contents().unwrap().tokens,
        corpora.iter().map(|corpus| corpus.num_tokens()).sum::<u64>()
    );
}

#[test]
fn batches_ranks_and_threads_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let weights = [5.0, 1.0, 3.0];
    let global: Vec<_> = loader(&corpora, &weights, |_| {}).map(|batch| rows(&batch.unwrap())).collect();
    let expected = global.concat();
    for batch_size in [1, 5, 64, 4096] {
        assert_eq!(all_rows(loader(&corpora, &weights, |o| o.batch_size = batch_size)), expected);
    }
    assert_eq!(all_rows(loader(&corpora, &weights, |o| (o.num_threads, o.prefetch) = (3, 9))), expected);
    for world_size in [2, 3, 5] {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| loader(&corpora, &weights, |o| (o.rank, o.world_size) = (rank, world_size)))
            .map(|rank| rank.collect::<Result<Vec<RecordBatch>>>().unwrap())
            .collect();
        for (number, batch) in global.iter().enumerate() {
            assert_eq!(&ranks.iter().flat_map(|rank| rows(&rank[number])).collect::<Vec<_>>(), batch);
        }
    }
}

#[test]
fn a_resumed_mixture_continues_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let weights = [0.45, 0.35, 0.2];
    let expected = all_rows(loader(&corpora, &weights, |_| {}));
    let mut whole = loader(&corpora, &weights, |_| {});
    let mut done = 0;
    loop {
        let state = LoaderState::from_json(&whole.state().to_json().unwrap()).unwrap();
        let mut resumed = loader(&corpora, &weights, |o| o.batch_size = 11);
        resumed.restore(&state).unwrap();
        assert_eq!((resumed.state(), resumed.passes()), (state, whole.passes()));
        assert!(all_rows(resumed) == expected[done..], "after {done} rows");
        let Some(batch) = whole.next() else { break };
        done += batch.unwrap().num_rows();
    }
    assert_eq!(done, expected.len());
}

#[test]
fn one_corpus_in_a_list_is_read_as_alone() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = corpora(dir.path()).remove(1);
    let single = Loader::new(corpus.clone(), &options()).unwrap();
    let listed = loader(&[corpus], &[0.3], |_| {});
    assert_eq!(single.state(), listed.state());
    assert_eq!(hashes(single), hashes(listed));
}

#[test]
fn the_order_of_a_mixture_is_fixed() {
    // As for the golden hashes of one corpus: saved states of running trainings depend on this.
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let all = hashes(loader(&corpora, &[0.6, 0.1, 0.3], |_| {}));
    let bytes: Vec<u8> = all.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    assert_eq!(format!("{:016x}", xxh3_64(&bytes)), "e3c1866bef6ced19");
}

#[test]
fn damage_is_reported_after_the_batches_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let mut sound = loader(&corpora, &[1.0, 1.0, 1.0], |o| o.batch_size = 4);
    let expected: Vec<_> = sound.by_ref().map(|batch| hash(&rows(&batch.unwrap()))).collect();
    drop(sound);
    // The first window of the first corpus holds 64 of its blocks, each of which is a shard.
    for entry in std::fs::read_dir(dir.path().join("0")).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|extension| extension == "tokens") {
            let mut bytes = std::fs::read(&entry).unwrap();
            let at = bytes.len() - 40; // in the table of checksums
            bytes[at] ^= 4;
            std::fs::write(&entry, bytes).unwrap();
            break;
        }
    }
    let corpora: Vec<_> =
        (0..3).map(|n| Arc::new(Corpus::open(&dir.path().join(n.to_string())).unwrap())).collect();
    let mut damaged = loader(&corpora, &[1.0, 1.0, 1.0], |o| o.batch_size = 4);
    let mut before = Vec::new();
    let error = loop {
        match damaged.next().unwrap() {
            Ok(batch) => before.push(hash(&rows(&batch))),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains(".tokens"), "{error}");
    assert!(before.len() < expected.len());
    assert_eq!(before, expected[..before.len()]);
    let state = damaged.state();
    assert_eq!(damaged.next().unwrap().unwrap_err().to_string(), error);
    assert_eq!(damaged.state(), state);
}

#[test]
fn dropping_a_busy_mixture_ends_its_threads() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    for taken in 0..4 {
        let mut loader = loader(&corpora, &[1.0, 2.0, 1.0], |o| (o.epochs, o.num_threads) = (None, 2));
        assert_eq!(loader.by_ref().take(taken).count(), taken);
    }
    assert!(corpora.iter().all(|corpus| Arc::strong_count(corpus) == 1));
}

#[test]
fn what_is_no_mixture_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    let refused = |corpora: Weighted| {
        let message = Loader::mixture(corpora, &options()).err().unwrap().to_string();
        assert!(!message.contains('\n'));
        message.replace(dir.path().to_str().unwrap(), "DIR")
    };
    for (weight, named) in [(0.0, "0"), (-0.5, "-0.5"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        let message = refused(weighted(&corpora, &[1.0, weight, 1.0]));
        assert_eq!(message, format!("DIR/1: weight {named}: must be a number above 0"));
    }
    assert!(refused(weighted(&corpora, &[1e300, 1.0])).contains("too far apart"));
    let mut some = weighted(&corpora, &[1.0, 1.0]);
    some[1].1 = None;
    assert_eq!(refused(some), "DIR/1: has no weight; give every corpus one, or none");
    let twice = [corpora[0].clone(), corpora[1].clone(), corpora[0].clone()];
    assert!(
        refused(weighted(&twice, &[1.0; 3])).starts_with("DIR/0 and DIR/0 are the same corpus (content hash")
    );
    assert!(refused(Vec::new()).starts_with("there is no corpus"));
    let empty = dir.path().join("empty");
    write_corpus(&empty, VOCAB, &[], 500);
    let empty = [corpora[0].clone(), Arc::new(Corpus::open(&empty).unwrap())];
    assert!(refused(weighted(&empty, &[1.0; 2])).starts_with("DIR/empty: the corpus has no tokens"));
    // Equal entries can have other roles.
    let changes: [fn(&mut TokenizerEntry); 2] =
        [|tokenizer| tokenizer.special_tokens.mask = 9, |tokenizer| tokenizer.hash = format!("{:016x}", 8)];
    let differences = ["special tokens;", "vocabularies (hashes 0000000000000007 and"];
    for (change, difference) in changes.into_iter().zip(differences) {
        rewrite_manifest(&dir.path().join("2"), |manifest| change(&mut manifest.tokenizer));
        let other = [corpora[0].clone(), Arc::new(Corpus::open(&dir.path().join("2")).unwrap())];
        let message = refused(weighted(&other, &[1.0; 2]));
        assert!(message.starts_with(&format!("DIR/0 and DIR/2 have different {difference}")), "{message}");
    }
}
