//! Loaders whose rows are cut at words or lines: blocks of large shards, ranks, interruptions, fixed bytes.

use super::*;
use crate::loader::CutAt;

/// Ids that are no multiple of three begin a word.
fn word_starts(vocab_size: u32) -> Option<Arc<[bool]>> {
    Some((0..vocab_size).map(|id| id % 3 != 0).collect())
}

/// The documents of the other tests, in lines of seven tokens.
fn corpus_of_lines(dir: &Path, count: u32) -> Arc<Corpus> {
    let lines = |document: &Vec<Vec<u32>>| document[0].chunks(7).map(<[u32]>::to_vec).collect();
    let documents: Vec<Vec<Vec<u32>>> = documents(count).iter().map(lines).collect();
    write_corpus(dir, VOCAB, &documents, 20_000);
    Arc::new(Corpus::open(dir).unwrap())
}

fn loader_with(corpus: &Arc<Corpus>, cut_at: &str, change: impl FnOnce(&mut LoaderOptions)) -> Loader {
    loader(corpus, |options| {
        options.cut_at = named(cut_at);
        options.word_starts = word_starts(corpus.vocab_size());
        change(options);
    })
}

#[test]
fn the_bytes_of_batches_are_fixed_for_words_and_lines() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = corpus_of_lines(dir.path(), 60);
    let golden = include_str!("../../../../../tests/golden/words.txt");
    let mut lines = Vec::new();
    for (masking, cut_at) in
        [("whole-word", "token"), ("span", "token"), ("google", "word"), ("google", "line")]
    {
        let all = hashes(loader_with(&corpus, cut_at, |options| options.masking = named(masking)));
        let bytes: Vec<u8> = all.iter().flat_map(|hash| hash.to_le_bytes()).collect();
        lines.push(format!("{masking} {cut_at} {:016x}\n", xxh3_64(&bytes)));
    }
    assert_eq!(lines.concat(), golden);
}

#[test]
fn blocks_of_a_large_shard_agree_about_their_edges() {
    let dir = tempfile::tempdir().unwrap();
    // Three blocks. All ids differ, so a token tells its place; lines are 1 to 120 tokens long.
    let (mut stream, mut ids) = (Stream::new(4, Purpose::Tie, [0; 3]), 5..700_005_u32);
    let mut documents = Vec::new();
    while !ids.is_empty() {
        let mut line = |_| ids.by_ref().take(1 + stream.below(120) as usize).collect::<Vec<_>>();
        documents.push((0..50).map(&mut line).collect::<Vec<_>>());
    }
    write_corpus(dir.path(), 1 << 20, &documents, 1 << 30);
    let corpus = Arc::new(Corpus::open(dir.path()).unwrap());
    let lines: Vec<i32> =
        documents.iter().flatten().filter_map(|line| line.first()).map(|&id| id as i32).collect();
    for cut_at in ["word", "line"] {
        let mut loader = loader_with(&corpus, cut_at, |o| (o.batch_size, o.epochs) = (512, Some(1)));
        let num_rows = loader.num_rows().unwrap();
        let batches: Vec<_> = loader.by_ref().map(Result::unwrap).collect();
        assert_eq!(batches.iter().map(|batch| batch.num_rows() as u64).sum::<u64>(), num_rows);
        let mut spans: Vec<Vec<i32>> = batches.iter().flat_map(segments).collect();
        spans.sort_unstable();
        assert!(spans.concat().into_iter().eq(5..700_005));
        for span in &spans {
            let is_line = |id: i32| lines.binary_search(&id).is_ok();
            let is_start = |id: i32| if cut_at == "word" { id % 3 != 0 || is_line(id) } else { is_line(id) };
            let first = span[0];
            // A line longer than a row is cut anywhere.
            assert!(is_start(first) || (first - 61..first).all(|id| !is_start(id)), "{cut_at}: {first}");
        }
    }
}

#[test]
fn ranks_and_resumed_loaders_agree() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = corpus_of_lines(dir.path(), 100);
    for cut_at in ["word", "line"] {
        let with = |change: fn(&mut LoaderOptions)| loader_with(&corpus, cut_at, change);
        let mut whole = with(|_| {});
        let (mut expected, mut states) = (Vec::new(), vec![whole.state()]);
        while let Some(batch) = whole.next() {
            expected.push(rows(&batch.unwrap()));
            states.push(whole.state());
        }
        let mut ranks = [with(|o| o.world_size = 2), with(|o| (o.world_size, o.rank) = (2, 1))];
        for batch in &expected {
            let parts = ranks.iter_mut().flat_map(|rank| rows(&rank.next().unwrap().unwrap()));
            assert_eq!(&parts.collect::<Vec<_>>(), batch);
        }
        let mut resumed = with(|o| o.num_threads = 2);
        for (step, state) in states.iter().enumerate() {
            resumed.restore(state).unwrap();
            let rest: Vec<_> = resumed.by_ref().map(|batch| rows(&batch.unwrap())).collect();
            assert_eq!(rest, expected[step..]);
        }
        assert!(loader(&corpus, |_| {}).restore(&states[1]).is_err());
    }
}

#[test]
fn options_about_words_need_their_starts() {
    let dir = tempfile::tempdir().unwrap();
    let corpus = corpus(dir.path(), 3);
    for (masking, cut_at, what) in [
        ("whole-word", "token", "masking = \"whole-word\": the entries of "),
        ("span", "word", "masking = \"span\": the entries of "),
        ("google", "word", "cut_at = \"word\": the entries of "),
    ] {
        let mut options =
            LoaderOptions { masking: named(masking), cut_at: named(cut_at), ..LoaderOptions::default() };
        assert!(options.needs_word_starts());
        let error = |options: &LoaderOptions| Loader::new(corpus.clone(), options).err().unwrap().to_string();
        let message = error(&options);
        assert!(
            message.starts_with(what) && message.contains("vocab.txt do not mark where words begin"),
            "{message}"
        );
        options.word_starts = word_starts(7);
        assert!(error(&options).contains("vocab.txt has 7 entries, not 30000"), "{}", error(&options));
    }
    assert!(!LoaderOptions { cut_at: CutAt::Line, ..LoaderOptions::default() }.needs_word_starts());
}
