//! Cuts at words and lines: no token is lost, rows begin at cut points, blocks agree about their edges.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::format::Corpus;
use crate::format::testing::write_corpus;

const FIRST_ID: u32 = 5;
const VOCAB: u32 = 100_000;

/// Documents of lines with these lengths; every id occurs once, in order.
fn corpus(dir: &std::path::Path, documents: &[Vec<u32>]) -> Corpus {
    let mut ids = FIRST_ID..;
    let mut line = |&len: &u32| ids.by_ref().take(len as usize).collect::<Vec<_>>();
    let documents: Vec<Vec<Vec<u32>>> =
        documents.iter().map(|lines| lines.iter().map(&mut line).collect()).collect();
    write_corpus(dir, VOCAB, &documents, 1 << 30);
    Corpus::open(dir).unwrap()
}

fn starts(documents: &[Vec<u32>]) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut lines, mut firsts, mut at) = (BTreeSet::new(), BTreeSet::new(), 0);
    for document in documents {
        firsts.insert(at);
        for len in document {
            lines.insert(at);
            at += len;
        }
    }
    (lines, firsts)
}

/// The spans of consecutive blocks in order of their tokens, after checking that rows are not overfull.
fn spans(packer: &mut SnappedPacker, shard: &Shard, edges: &[u32], epoch: u32, length: usize) -> Vec<Span> {
    let mut all = Vec::new();
    for (pair, block) in edges.windows(2).zip(0..) {
        let rows = packer.pack(shard, pair[0]..pair[1], RngCounter { epoch, block }).unwrap();
        for row in 0..rows.len() {
            let used: usize = rows.row(row).iter().map(Span::num_positions).sum();
            assert!((3..=length).contains(&used));
        }
        all.extend_from_slice(&rows.spans);
    }
    all.sort_by_key(|span| span.start);
    all
}

/// Checks that the spans have each token once and begin at `points`, unless a row's length has no cut point.
fn check(spans: &[Span], total: u32, points: &BTreeSet<u32>, firsts: &BTreeSet<u32>, full: u32) {
    let mut expected = 0;
    for span in spans {
        assert_eq!(span.start, expected, "lost or doubled");
        expected += u32::from(span.len);
        let crossed = firsts.range(span.start + 1..expected).next();
        assert_eq!(crossed, None, "a span crosses documents");
        let near = span.start.saturating_sub(full - 1)..=span.start;
        let is_point = points.contains(&span.start) || firsts.contains(&span.start);
        assert!(is_point || points.range(near).next().is_none(), "{} is no cut point", span.start);
    }
    assert_eq!(expected, total);
}

fn document() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![4 => 0_u32..30, 1 => 100_u32..400, 1 => Just(0)], 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_begin_at_cut_points_and_no_token_is_lost(
        documents in prop::collection::vec(document(), 1..12), length in 8_usize..80,
        edges in prop::collection::vec(0.0..1.0_f64, 0..6), seed: u64, epoch: u32,
        stride in prop_oneof![Just(1_u32), Just(3), Just(1000)],
    ) {
        let documents: Vec<_> = documents.into_iter().filter(|lines| lines.iter().any(|&n| n > 0)).collect();
        let total: u32 = documents.iter().flatten().sum();
        prop_assume!(total > 0);
        let dir = tempfile::tempdir().unwrap();
        let corpus = corpus(dir.path(), &documents);
        let shard = &corpus.shard(0);
        let mut edges: Vec<u32> = edges.iter().map(|share| (share * f64::from(total)) as u32).collect();
        edges.extend([0, total]);
        edges.sort_unstable();
        let (lines, firsts) = starts(&documents);
        let full = length as u32 - 2;
        let mut packer = SnappedPacker::new(length, seed, CutPoints::lines());
        check(&spans(&mut packer, shard, &edges, epoch, length), total, &lines, &firsts, full);
        // Words of 1, 1 to 5 or 1,000 tokens.
        let begins = |at: u32| at.is_multiple_of(stride) && (stride != 3 || !at.is_multiple_of(5));
        let table: Vec<bool> = (0..VOCAB).map(|id| begins(id.wrapping_sub(FIRST_ID))).collect();
        let words = (0..total).filter(|&at| begins(at)).collect();
        let mut packer = SnappedPacker::new(length, seed, CutPoints::Words(table.into()));
        check(&spans(&mut packer, shard, &edges, epoch, length), total, &words, &firsts, full);
    }
}
