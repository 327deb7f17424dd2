//! Loaders over small corpora, single and mixed: no token is lost, and threads, ranks and interruptions change nothing.

use std::path::Path;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int32Type};
use arrow_buffer::ToByteSlice;
use proptest::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::shuffle_window::Blocks;
use super::{Loader, LoaderOptions, LoaderState};
use crate::choice::Choice;
use crate::format::testing::{rewrite_manifest, write_corpus};
use crate::format::{CacheOptions, Corpus};
use crate::philox::{Purpose, Stream};

type Weighted = Vec<(Arc<Corpus>, Option<f64>)>;

pub(super) const VOCAB: u32 = 30_000;

pub(super) fn documents(count: u32) -> Vec<Vec<Vec<u32>>> {
    let mut stream = Stream::new(8, Purpose::Tie, [0; 3]);
    let mut document = |_| {
        let len = 1 + stream.below(40) * stream.below(40);
        vec![(0..len).map(|_| 5 + stream.below(VOCAB - 5)).collect()]
    };
    (0..count).map(&mut document).collect()
}

/// A corpus of several shards with about 400 tokens per document, in lines of seven tokens or in one line per document.
fn corpus(dir: &Path, count: u32, has_lines: bool) -> Arc<Corpus> {
    let mut documents = documents(count);
    if has_lines {
        let lines = |document: &Vec<Vec<u32>>| document[0].chunks(7).map(<[u32]>::to_vec).collect();
        documents = documents.iter().map(lines).collect();
    }
    write_corpus(dir, VOCAB, &documents, 20_000);
    Arc::new(Corpus::open(dir).unwrap())
}

/// Corpora of 120, 40 and 80 of the same documents, in shards of 500 tokens: several windows in the first corpus.
pub(super) fn corpora(dir: &Path) -> Vec<Arc<Corpus>> {
    let all = documents(240);
    let mut rest = &all[..];
    let mut write = |(number, count): (usize, usize)| {
        let dir = dir.join(number.to_string());
        let (first, others) = rest.split_at(count);
        rest = others;
        write_corpus(&dir, VOCAB, first, 500);
        Arc::new(Corpus::open(&dir).unwrap())
    };
    [120, 40, 80].into_iter().enumerate().map(&mut write).collect()
}

fn weighted(corpora: &[Arc<Corpus>], weights: &[f64]) -> Weighted {
    corpora.iter().cloned().zip(weights.iter().copied().map(Some)).collect()
}

pub(super) fn options() -> LoaderOptions {
    LoaderOptions {
        sequence_length: 64,
        batch_size: 37,
        seed: 9,
        epochs: Some(2),
        ..LoaderOptions::default()
    }
}

/// Options with a masking and cuts by name; ids that are not multiples of three begin a word.
fn with(masking: &str, cut_at: &str) -> LoaderOptions {
    let word_starts = Some((0..VOCAB).map(|id| id % 3 != 0).collect());
    LoaderOptions { masking: named(masking), cut_at: named(cut_at), word_starts, ..options() }
}

fn mixed(corpora: &Weighted, options: &LoaderOptions) -> Loader {
    Loader::mixture(corpora.clone(), options).unwrap()
}

pub(super) fn named<C: Choice>(name: &str) -> C {
    C::NAMES.iter().find(|(known, _)| *known == name).unwrap().1
}

pub(super) fn loader_of(dir: &Path, options: &LoaderOptions) -> Loader {
    Loader::new(Arc::new(Corpus::open(dir).unwrap()), options).unwrap()
}

pub(super) fn rows(batch: &RecordBatch) -> Vec<Vec<i32>> {
    let ints = |column: &dyn arrow_array::Array, row: usize| -> Vec<i32> {
        let list = column.as_list_opt::<i32>().map(|list| list.value(row));
        let values = list.unwrap_or_else(|| column.as_fixed_size_list().value(row));
        match values.as_primitive_opt::<Float32Type>() {
            Some(floats) => floats.values().iter().map(|f| f.to_bits() as i32).collect(),
            None => values.as_primitive::<Int32Type>().values().to_vec(),
        }
    };
    let columns = |row| batch.columns().iter().map(|column| ints(column, row)).collect::<Vec<_>>().concat();
    (0..batch.num_rows()).map(columns).collect()
}

pub(super) fn hash(rows: &[Vec<i32>]) -> u64 {
    let mut hash = Xxh3::new();
    rows.iter().for_each(|row| hash.update(row.to_byte_slice()));
    hash.digest()
}

fn all_rows(loader: Loader) -> Vec<Vec<i32>> {
    loader.flat_map(|batch| rows(&batch.unwrap())).collect()
}

pub(super) fn hashes(loader: Loader) -> Vec<u64> {
    loader.map(|batch| hash(&rows(&batch.unwrap()))).collect()
}

fn column<'a>(batch: &'a RecordBatch, name: &str) -> &'a [i32] {
    let column = batch.column_by_name(name).unwrap().as_fixed_size_list();
    column.values().as_primitive::<Int32Type>().values()
}

#[test]
fn rows_do_not_depend_on_ranks_threads_batch_sizes_or_interruptions() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, lines) =
        (corpus(&dir.path().join("plain"), 150, false), corpus(&dir.path().join("lines"), 100, true));
    let examples = LoaderOptions { packing: named("examples"), ..options() };
    for (corpora, options) in [
        (vec![(plain, None)], options()),
        (vec![(lines.clone(), None)], with("with-repeats", "word")),
        (vec![(lines.clone(), None)], with("with-repeats", "line")),
        (vec![(lines, None)], examples),
        (weighted(&corpora(dir.path()), &[0.45, 0.35, 0.2]), options()),
    ] {
        let changed = |change: &dyn Fn(&mut LoaderOptions)| {
            let mut options = options.clone();
            change(&mut options);
            mixed(&corpora, &options)
        };
        let mut whole = changed(&|_| {});
        let (mut batches, mut states) = (Vec::new(), vec![(whole.state(), whole.passes())]);
        while let Some(batch) = whole.next() {
            batches.push(rows(&batch.unwrap()));
            states.push((whole.state(), whole.passes()));
        }
        let expected = batches.concat();
        for batch_size in [1, 5, 4096] {
            assert!(all_rows(changed(&|o| o.batch_size = batch_size)) == expected);
        }
        assert!(all_rows(changed(&|o| (o.num_threads, o.prefetch) = (3, 9))) == expected);
        for world_size in [2, 3, 50] {
            let rank = |rank| changed(&|o| (o.rank, o.world_size, o.prefetch) = (rank, world_size, 1));
            let mut ranks: Vec<_> = (0..world_size).map(rank).collect();
            for batch in &batches {
                let parts = ranks.iter_mut().flat_map(|rank| rows(&rank.next().unwrap().unwrap()));
                assert!(&parts.collect::<Vec<_>>() == batch);
            }
            assert!(ranks.iter_mut().all(|rank| rank.next().is_none()));
        }
        let mut resumed = changed(&|o| (o.num_threads, o.batch_size) = (2, 11));
        for (number, (state, passes)) in states.iter().enumerate().rev() {
            let state = LoaderState::from_json(&state.to_json().unwrap()).unwrap();
            resumed.restore(&state).unwrap();
            assert_eq!((resumed.state(), &resumed.passes()), (state, passes));
            let rest: Vec<_> = resumed.by_ref().flat_map(|batch| rows(&batch.unwrap())).collect();
            assert!(rest == batches[number..].concat(), "after {number} batches");
        }
    }
}

#[test]
fn streams_are_fixed() {
    // If this fails, the stream of rows has changed, and saved states of training runs are invalid.
    // Change the golden hashes only together with the options in a state.
    let dir = tempfile::tempdir().unwrap();
    let (plain, lines) =
        (corpus(&dir.path().join("plain"), 60, false), corpus(&dir.path().join("lines"), 60, true));
    let digest_of = |hashes: &[u64]| {
        let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        format!("{:016x}\n", xxh3_64(&bytes))
    };
    let digest = |loader: Loader| digest_of(&hashes(loader));
    let of = |corpus: &Arc<Corpus>, masking, cut_at| {
        digest(Loader::new(corpus.clone(), &with(masking, cut_at)).unwrap())
    };
    let streams =
        ["tokens", "with-repeats", "80-10-10"].map(|name| format!("{name} {}", of(&plain, name, "token")));
    assert_eq!(streams.concat(), include_str!("../../../../tests/golden/loader.txt"));
    let of_words =
        [("whole-word", "token"), ("span", "token"), ("with-repeats", "word"), ("with-repeats", "line")];
    let streams =
        of_words.map(|(masking, cut_at)| format!("{masking} {cut_at} {}", of(&lines, masking, cut_at)));
    assert_eq!(streams.concat(), include_str!("../../../../tests/golden/words.txt"));
    let corpora = corpora(dir.path());
    let mixture = weighted(&corpora, &[0.6, 0.1, 0.3]);
    assert_eq!(digest(mixed(&mixture, &options())), "e3c1866bef6ced19\n");
    let of_lanes = next(&mut ranks(&corpora, 1), 60);
    assert_eq!(digest_of(&of_lanes), "30babd32aa00189c\n");
}

#[test]
fn epoch_has_every_token_once() {
    let dir = tempfile::tempdir().unwrap();
    // Shards of 500 tokens: more than 64 blocks, so more than one window.
    write_corpus(dir.path(), VOCAB, &documents(150), 500);
    let mut loader = loader_of(dir.path(), &LoaderOptions { epochs: Some(1), ..options() });
    let num_rows = loader.num_rows().unwrap();
    let (mut tokens, mut seen, mut windows) = (Vec::new(), 0, 0);
    while let Some(batch) = loader.next() {
        let batch = batch.unwrap();
        seen += batch.num_rows() as u64;
        tokens.extend(unmasked(&batch).into_iter().filter(|&id| id > 4));
        windows = windows.max(loader.positions[0][0].at.window);
    }
    assert_eq!(seen, num_rows);
    assert!(windows > 0);
    let mut expected: Vec<_> = documents(150).concat().concat().into_iter().map(|id| id as i32).collect();
    tokens.sort_unstable();
    expected.sort_unstable();
    assert_eq!(tokens, expected);
}

fn unmasked(batch: &RecordBatch) -> Vec<i32> {
    let mut ids = column(batch, "input_ids").to_vec();
    let (places, originals) = (column(batch, "masked_positions"), column(batch, "masked_ids"));
    let slots = places.len() / batch.num_rows();
    let weights = batch.column_by_name("masked_weights").unwrap().as_fixed_size_list();
    for (slot, weight) in weights.values().as_primitive::<Float32Type>().values().iter().enumerate() {
        if *weight == 1.0 {
            ids[slot / slots * 64 + places[slot] as usize] = originals[slot];
        }
    }
    ids
}

#[test]
fn mixture_interleaves_corpora_in_proportion() {
    let dir = tempfile::tempdir().unwrap();
    let (corpora, weights) = (corpora(dir.path()), [0.2, 0.3, 0.5]);
    let mixture = mixed(&weighted(&corpora, &weights), &options());
    let alone = |blocks: &Blocks| {
        let options = LoaderOptions { seed: blocks.seed as i64, ..options() };
        all_rows(Loader::new(blocks.corpus.clone(), &options).unwrap())
    };
    let alone: Vec<_> = mixture.shared.mixture.corpora.iter().map(alone).collect();
    let (mut taken, mut finished) = ([0; 3], Vec::new());
    for (row, values) in (1..).zip(all_rows(mixture)) {
        // The next row of one corpus, in that corpus's order.
        let corpus = (0..3).find(|&corpus| alone[corpus].get(taken[corpus]) == Some(&values)).unwrap();
        taken[corpus] += 1;
        let is_due = |(&taken, weight): (&usize, f64)| (taken as f64 - f64::from(row) * weight).abs() < 1.0;
        assert!(!finished.is_empty() || taken.iter().zip(weights).all(is_due));
        if taken[corpus] == alone[corpus].len() {
            finished.push(corpus);
        }
    }
    // All corpora have been read twice, and ended at different times.
    assert_eq!((finished, taken.to_vec()), (vec![1, 2, 0], alone.iter().map(Vec::len).collect()));
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
    let num_tokens = corpora.iter().map(|corpus| corpus.num_tokens()).sum::<u64>();
    assert_eq!(loader.contents().unwrap().tokens, num_tokens);
}

#[test]
fn damage_is_reported_after_earlier_batches() {
    let dir = tempfile::tempdir().unwrap();
    let options = LoaderOptions { batch_size: 4, num_threads: 2, ..options() };
    // The first row of the first corpus, which is damaged, comes after rows of the others.
    let weights = [1.0, 20.0, 20.0];
    let expected = hashes(mixed(&weighted(&corpora(dir.path()), &weights), &options));
    for file in std::fs::read_dir(dir.path().join("0")).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_some_and(|kind| kind == "tokens") {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[100] ^= 4;
            std::fs::write(&file, bytes).unwrap();
        }
    }
    let open = |number: u32| Arc::new(Corpus::open(&dir.path().join(number.to_string())).unwrap());
    let mut damaged = mixed(&weighted(&[0, 1, 2].map(open), &weights), &options);
    let mut before = Vec::new();
    let error = loop {
        match damaged.next().unwrap() {
            Ok(batch) => before.push(hash(&rows(&batch))),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("/0/shard-") && error.contains(".tokens: block 0 of "), "{error}");
    assert!(!before.is_empty() && before == expected[..before.len()]);
    let state = damaged.state();
    assert_eq!(damaged.next().unwrap().unwrap_err().to_string(), error);
    assert_eq!(damaged.state(), state);
}

#[test]
fn dropped_loader_ends_its_threads() {
    let dir = tempfile::tempdir().unwrap();
    let corpora = corpora(dir.path());
    for taken in 0..4 {
        let options = LoaderOptions { epochs: None, num_threads: 2, ..options() };
        assert_eq!(mixed(&weighted(&corpora, &[1.0, 2.0, 1.0]), &options).take(taken).count(), taken);
    }
    assert!(corpora.iter().all(|corpus| Arc::strong_count(corpus) == 1));
}

#[test]
fn incompatible_corpora_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = corpora(dir.path()).remove(0);
    rewrite_manifest(&dir.path().join("2"), |manifest| manifest.tokenizer.special_tokens.mask = 9);
    write_corpus(&dir.path().join("3"), VOCAB, &[], 500);
    let of_another = LoaderOptions { word_starts: Some(Arc::new([true; 7])), ..with("with-repeats", "word") };
    for (name, options, message) in [
        ("1", of_another, "vocab.txt has 7 entries, but the corpus has 30000"),
        ("2", options(), "/2 have different special tokens; "),
        ("3", options(), "/3: the corpus has no tokens; "),
    ] {
        let other = Arc::new(Corpus::open(&dir.path().join(name)).unwrap());
        let refused = Loader::mixture(weighted(&[first.clone(), other], &[1.0; 2]), &options);
        assert!(refused.err().unwrap().to_string().contains(message), "{message}");
    }
}

fn laned() -> LoaderOptions {
    LoaderOptions { lanes: 8, batch_size: 24, epochs: None, ..options() }
}

fn ranks(corpora: &[Arc<Corpus>], world_size: i64) -> Vec<Loader> {
    let weighted = || corpora.iter().map(|corpus| (corpus.clone(), None)).collect();
    let loader = |rank| Loader::mixture(weighted(), &LoaderOptions { rank, world_size, ..laned() }).unwrap();
    (0..world_size).map(loader).collect()
}

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn run_resumes_on_any_number_of_ranks(
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
fn nodes_fetch_only_their_lanes() {
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
    let parts = loader.by_ref().take(300).map(|batch| rows(&batch.unwrap()));
    assert!(parts.zip(&expected).all(|(part, batch)| part == batch[16..32]));
    assert!((0.5..0.75).contains(&loader.passes()[0]), "{:?}", loader.passes());
    // The rank's part of the first epoch, and of the second one, which is being fetched.
    let (bytes, share) = (server.bytes_served(".tokens"), all / world_size as u64);
    assert!(bytes >= share && bytes < share * 22 / 10, "{bytes} of {all}");
}
