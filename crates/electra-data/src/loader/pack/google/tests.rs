//! The published builder's rules, one by one and on arbitrary documents.

use proptest::prelude::*;

use super::*;
use crate::format::{Corpus, testing::write_corpus};

fn builder(sequence_length: u32, seed: u64) -> Builder {
    Builder::new(sequence_length, Stream::new(seed, Purpose::Example, [0; 3]))
}

/// The two texts of a row, as ranges of tokens.
fn texts(row: &[Span]) -> [Vec<Range<u32>>; 2] {
    let second = row.iter().position(|span| span.boundary == Boundary::SecondText).unwrap_or(row.len());
    assert_eq!(row[0].boundary, Boundary::NewSegment);
    assert!(row.iter().skip(1).all(|span| span.boundary != Boundary::NewSegment));
    let runs = |spans: &[Span]| spans.iter().map(|p| p.start..p.start + u32::from(p.len)).collect();
    [runs(&row[..second]), runs(&row[second..])]
}

fn run(start: u32, end: u32) -> Vec<Range<u32>> {
    std::iter::once(start..end).collect()
}

fn len(runs: &[Range<u32>]) -> u32 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// How often each first row of one document occurs over many seeds.
fn outcomes(sequence_length: u32, lengths: &[u32]) -> std::collections::HashMap<[Vec<Range<u32>>; 2], u32> {
    let mut found = std::collections::HashMap::new();
    for seed in 0..2_000 {
        let mut builder = builder(sequence_length, seed);
        builder.add_document(0, lengths).unwrap();
        *found.entry(texts(builder.rows.row(0))).or_default() += 1;
    }
    found
}

#[test]
fn lines_are_divided_as_published() {
    let share = |lengths: &[u32], rows: &[[Vec<Range<u32>>; 2]], one_text: f64| {
        let found = outcomes(20, lengths);
        rows.iter().for_each(|row| assert!(found.contains_key(row), "{lengths:?}: {found:?}"));
        let expected = 2_000.0 * one_text;
        let deviation = (expected * (1.0 - one_text)).sqrt();
        assert!((f64::from(found[&rows[0]]) - expected).abs() <= 5.0 * deviation, "{lengths:?}: {found:?}");
        found
    };
    // Target (20 - 3) / 2 = 8: 4 + 3 stay below it, so the first two lines are together; then 10 % one text, else a coin.
    let found = share(&[4, 3, 13], &[[run(0, 18), vec![]], [run(0, 7), run(7, 17)]], 0.55);
    assert_eq!(found.len(), 2);
    // 4 + 4 reach the target: the coin is thrown for the second line.
    assert!(outcomes(20, &[4, 4, 12]).contains_key(&[run(0, 4), run(4, 17)]));
    // A short line joins the first text after the second has begun.
    assert!(outcomes(20, &[4, 9, 2, 5]).contains_key(&[vec![0..4, 13..15], vec![4..13, 15..17]]));
    // A first line over the target needs no coin.
    assert_eq!(share(&[9, 11], &[[run(0, 18), vec![]]], 0.1).len(), 2);
    // Overflow is truncated: 16 tokens leave a second text one position, 17 none.
    assert_eq!(share(&[1_000], &[[run(0, 18), vec![]]], 1.0).len(), 1);
    assert!(outcomes(20, &[16, 9]).contains_key(&[run(0, 16), run(16, 17)]));
    assert!(outcomes(20, &[17, 9]).contains_key(&[run(0, 17), vec![]]));
}

#[test]
fn blank_lines_end_an_example_and_never_make_one() {
    let mut builder = builder(64, 1);
    builder.add_document(10, &[3, 0, 0, 4, 2, 0]).unwrap();
    builder.add_document(40, &[0, 5]).unwrap();
    let rows = &builder.rows;
    let runs: Vec<u32> =
        (0..rows.len()).map(|row| rows.row(row).iter().map(|p| u32::from(p.len)).sum()).collect();
    assert_eq!(runs, [3, 6, 5]);
}

#[test]
fn lines_beyond_the_shard_are_refused() {
    assert_eq!(builder(64, 1).add_document(u32::MAX - 3, &[2, 2]), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn blocks_hold_each_document_once_and_no_example_spans_two(
        documents in prop::collection::vec(prop::collection::vec(0_usize..40, 1..9), 1..40),
        edges in prop::collection::vec(0.0..1.0, 0..6),
        sequence_length in 8_usize..130, seed: u64, epoch: u32,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let lines = |document: &Vec<usize>| document.iter().map(|&len| vec![9; len]).collect();
        let corpus_texts: Vec<Vec<Vec<u32>>> = documents.iter().map(lines).collect();
        prop_assume!(!corpus_texts.concat().concat().is_empty());
        write_corpus(dir.path(), 100, &corpus_texts, u64::MAX);
        let corpus = Corpus::open(dir.path()).unwrap();
        let shard = &*corpus.shard(0);
        let ends = shard.document_ends().unwrap();
        let total = ends[ends.len() - 1];
        let mut edges: Vec<u32> = edges.iter().map(|edge| (edge * f64::from(total)) as u32).collect();
        edges.extend([0, total]);
        edges.sort_unstable();
        let mut packer = GooglePacker::new(sequence_length, seed);
        let mut seen = 0;
        for (block, pair) in (0..).zip(edges.windows(2)) {
            prop_assert_eq!(beginning_in(ends, pair[0]..pair[1]).start, seen);
            seen = beginning_in(ends, pair[0]..pair[1]).end;
            let rows = packer.pack(shard, pair[0]..pair[1], RngCounter { epoch, block }).unwrap();
            let mut end = 0;
            for row in 0..rows.len() {
                let spans = rows.row(row);
                prop_assert!(spans.iter().map(Span::num_positions).sum::<usize>() <= sequence_length);
                let [first, second] = texts(spans);
                prop_assert!(len(&first) > 0 && spans.iter().all(|span| span.len > 0));
                let (from, to) = (first[0].start, first.iter().chain(&second).map(|run| run.end).max().unwrap());
                prop_assert!(from >= end, "examples overlap");
                end = to;
                let document = ends.partition_point(|&end| end <= from);
                prop_assert!(to <= ends[document], "an example spans documents");
                let start = if document == 0 { 0 } else { ends[document - 1] };
                prop_assert!((pair[0]..pair[1]).contains(&start));
            }
        }
        prop_assert_eq!(seen, ends.len());
    }
}
