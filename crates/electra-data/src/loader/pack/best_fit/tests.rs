//! Packing: no token is lost, counts are right, rows are full.

use proptest::prelude::*;

use super::*;

fn ends(lengths: &[u32]) -> Vec<u32> {
    (1..=lengths.len()).map(|count| lengths[..count].iter().sum()).collect()
}

fn counter(epoch: u32) -> RngCounter {
    RngCounter { epoch, block: 3 }
}

fn all(rows: &Rows) -> Vec<Span> {
    let mut spans: Vec<_> = (0..rows.len()).flat_map(|row| rows.row(row)).copied().collect();
    spans.sort_by_key(|span| span.start);
    spans
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_token_is_in_one_span_once(
        lengths in prop_oneof![
            prop::collection::vec(0_u32..400, 0..60),
            (1_u32..400, 1_usize..200).prop_map(|(len, count)| vec![len; count]),
        ],
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
        // The epoch changes cuts, but neither the lengths of spans nor the number of rows.
        let other = packer.pack(&ends, block.clone(), counter(epoch ^ 1));
        prop_assert_eq!(rows.len(), other.len());
        let sorted = |rows: &Rows| {
            let mut lengths: Vec<_> = all(rows).iter().map(|span| span.len).collect();
            lengths.sort_unstable();
            lengths
        };
        prop_assert_eq!(sorted(&rows), sorted(&other));
        let full = sequence_length as u32 - 2;
        let is_cut = |part: &Range<u32>| part.len() as u32 > full && !(part.len() as u32).is_multiple_of(full);
        prop_assert!(parts(&ends, block).filter(is_cut).count() < 20 || all(&rows) != all(&other));
    }
}

#[test]
fn rows_are_full_for_any_lengths() {
    // `tests/data/test_packing.py` has ordinary lengths. One long document wastes at most a row.
    let awkward = [70, 77, 100, 45].map(|len| (128, 0.95, vec![len; 262_144 / len as usize]));
    for (sequence_length, least, lengths) in awkward.into_iter().chain([(512, 0.998, vec![262_144])]) {
        let ends = ends(&lengths);
        let rows = BestFitPacker::new(sequence_length, 2).pack(&ends, 0..ends[ends.len() - 1], counter(0));
        let used: usize = all(&rows).iter().map(|span| span.num_positions()).sum();
        let fill = used as f64 / (rows.len() * sequence_length) as f64;
        assert!(fill >= least, "{sequence_length}: {fill}");
    }
}
