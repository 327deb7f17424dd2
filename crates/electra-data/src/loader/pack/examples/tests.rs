//! Invariants for any documents. `tests/data/test_packing.py` compares the rules with a separate implementation.

use proptest::prelude::*;

use super::*;
use crate::format::{Corpus, testing::write_corpus};

fn texts(row: &[Span]) -> [Vec<Range<u32>>; 2] {
    let second = row.iter().position(|span| span.boundary == Boundary::SecondText).unwrap_or(row.len());
    assert_eq!(row[0].boundary, Boundary::NewSegment);
    assert!(row.iter().skip(1).all(|span| span.boundary != Boundary::NewSegment));
    let runs = |spans: &[Span]| spans.iter().map(|p| p.start..p.start + u32::from(p.len)).collect();
    [runs(&row[..second]), runs(&row[second..])]
}

fn len(runs: &[Range<u32>]) -> u32 {
    runs.iter().map(|run| run.end - run.start).sum()
}

#[test]
fn lines_beyond_the_shard_are_refused() {
    let mut builder = Builder::new(64, Stream::new(1, Purpose::Example, [0; 3]));
    assert_eq!(builder.add_document(u32::MAX - 3, &[2, 2]), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn each_document_is_in_one_block_and_no_example_spans_two(
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
        let mut packer = ExamplePacker::new(sequence_length, seed);
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
