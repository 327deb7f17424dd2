//! Packing: nothing lost, nothing counted wrong, rows full.

use proptest::prelude::*;

use super::*;

fn ends(lengths: &[u32]) -> Vec<u32> {
    lengths
        .iter()
        .scan(0, |end, len| {
            *end += len;
            Some(*end)
        })
        .collect()
}

fn counter(epoch: u32) -> RngCounter {
    RngCounter { epoch, block: 3 }
}

fn all(rows: &Rows) -> Vec<Span> {
    let mut spans: Vec<_> = (0..rows.len()).flat_map(|row| rows.row(row)).copied().collect();
    spans.sort_by_key(|span| span.start);
    spans
}

fn fill(rows: &Rows, sequence_length: usize) -> f64 {
    let used: usize = all(rows).iter().map(|s| s.num_positions()).sum();
    used as f64 / (rows.len() * sequence_length) as f64
}

/// Document lengths as in an encyclopaedia: log-normal, median about 250 tokens.
fn realistic(total: u32, seed: u64) -> Vec<u32> {
    let mut stream = Stream::new(seed, Purpose::Mask, [9, 9, 9]);
    let mut lengths = Vec::new();
    let mut sum = 0;
    while sum < total {
        let normal: f64 = (0..12).map(|_| f64::from(stream.word()) / 4_294_967_296.0).sum::<f64>() - 6.0;
        let len = ((5.5 + 1.1 * normal).exp() as u32 + 1).min(total - sum);
        lengths.push(len);
        sum += len;
    }
    lengths
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_token_is_in_one_span_once(
        lengths in prop::collection::vec(0_u32..400, 0..60),
        sequence_length in 8_usize..130, seed: u64, epoch: u32,
        edges in (0.0..1.0, 0.0..1.0),
    ) {
        let ends = ends(&lengths);
        let total = ends.last().copied().unwrap_or(0);
        let (a, b) = ((edges.0 * f64::from(total)) as u32, (edges.1 * f64::from(total)) as u32);
        let block = a.min(b)..a.max(b);
        let mut packer = BestFitPacker::new(sequence_length, seed);
        let rows = packer.pack(&ends, block.clone(), counter(epoch));
        let mut expected = block.start;
        for span in all(&rows) {
            prop_assert_eq!(span.start, expected);
            expected += u32::from(span.len);
            prop_assert!(span.len > 0);
            let inside = ends.partition_point(|&end| end <= span.start);
            prop_assert!(expected <= ends[inside], "a span crosses documents");
        }
        prop_assert_eq!(expected, block.end);
        for row in 0..rows.len() {
            let used: usize = rows.row(row).iter().map(|s| s.num_positions()).sum();
            prop_assert!((1..=sequence_length).contains(&used));
        }
        prop_assert_eq!(rows.len(), packer.count(&ends, block));
    }

    #[test]
    fn equal_documents_are_packed_alike_in_every_epoch(
        len in 1_u32..400, count in 1_u32..200, sequence_length in 8_usize..130, seed: u64,
    ) {
        let ends: Vec<u32> = (1..=count).map(|document| document * len).collect();
        let mut packer = BestFitPacker::new(sequence_length, seed);
        let rows = packer.pack(&ends, 0..count * len, counter(0));
        let total: u32 = all(&rows).iter().map(|span| u32::from(span.len)).sum();
        prop_assert_eq!(total, count * len);
        prop_assert_eq!(rows.len(), packer.count(&ends, 0..count * len));
    }

    #[test]
    fn the_epoch_changes_cuts_but_not_the_number_of_rows(
        lengths in prop::collection::vec(200_u32..900, 20..60),
        sequence_length in 8_usize..130, seed: u64, epoch in 0_u32..1000,
    ) {
        let ends = ends(&lengths);
        let block = 0..*ends.last().unwrap();
        let mut packer = BestFitPacker::new(sequence_length, seed);
        let one = packer.pack(&ends, block.clone(), counter(epoch));
        let two = packer.pack(&ends, block.clone(), counter(epoch + 1));
        prop_assert_eq!(one.len(), two.len());
        prop_assert_ne!(all(&one), all(&two));
        let sorted = |rows: &Rows| {
            let mut lengths: Vec<_> = all(rows).iter().map(|s| s.len).collect();
            lengths.sort_unstable();
            lengths
        };
        prop_assert_eq!(sorted(&one), sorted(&two));
    }
}

#[test]
fn rows_of_realistic_documents_are_full() {
    for (sequence_length, least) in [(128, 0.996), (512, 0.994)] {
        for seed in 0..5 {
            let ends = ends(&realistic(262_144, seed));
            let mut packer = BestFitPacker::new(sequence_length, seed);
            let rows = packer.pack(&ends, 0..262_144, counter(0));
            let fill = fill(&rows, sequence_length);
            assert!(fill >= least, "{sequence_length}: {fill}");
        }
    }
}

#[test]
fn awkward_lengths_still_fill_rows() {
    for len in [70_u32, 77, 100, 45] {
        let ends: Vec<u32> = (1..=262_144 / len).map(|document| document * len).collect();
        let block = 0..ends[ends.len() - 1];
        let mut packer = BestFitPacker::new(128, 2);
        let rows = packer.pack(&ends, block.clone(), counter(0));
        assert!(fill(&rows, 128) > 0.95, "{len}: {}", fill(&rows, 128));
        assert_eq!(rows.len(), packer.count(&ends, block));
    }
}

#[test]
fn one_long_document_wastes_one_row_at_most() {
    let mut packer = BestFitPacker::new(512, 1);
    let rows = packer.pack(&[1_000_000], 300_000..562_144, counter(0));
    assert_eq!(rows.len(), 262_144_usize.div_ceil(510));
}

#[test]
fn an_empty_block_has_no_rows() {
    let mut packer = BestFitPacker::new(64, 1);
    assert_eq!(packer.pack(&[], 0..0, counter(0)).len(), 0);
    assert_eq!(packer.pack(&[0, 0, 5], 2..2, counter(0)).len(), 0);
}
