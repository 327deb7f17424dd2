//! Masks against their stated distributions.

use proptest::prelude::*;

use super::*;
use crate::philox::Purpose;

const TOKENS: SpecialTokens = SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 };
const VOCAB: u32 = 1000;
pub(super) const CASES: u32 = 20_000;

/// A row `[CLS] 100 101 … [SEP]` of `used` tokens.
fn row(used: usize) -> Vec<i32> {
    let mut row: Vec<i32> = (99..99 + used as i32).collect();
    (row[0], row[used - 1]) = (2, 3);
    row
}

pub(super) struct Masked {
    pub row: Vec<i32>,
    pub positions: Vec<i32>,
    pub originals: Vec<i32>,
    pub count: usize,
}

pub(super) fn masked(masker: &mut Masker, row: &[i32], number: u32) -> Masked {
    let mut stream = Stream::new(42, Purpose::Mask, [0, 0, number]);
    let (mut positions, mut originals) = (vec![-1; masker.slots()], vec![-1; masker.slots()]);
    let mut row = row.to_vec();
    let count = masker.apply(&mut row, &mut stream, &mut positions, &mut originals);
    Masked { row, positions, originals, count }
}

fn masker(masking: Masking, prob: f64, length: usize) -> Masker {
    Masker::new(masking, prob, length, TOKENS, VOCAB, None)
}

pub(super) fn near(value: f64, expected: f64, tolerance: f64) {
    assert!((value - expected).abs() < tolerance, "{value} is not {expected}");
}

/// Chi-squared of counts that should be equal, in standard deviations above its mean.
pub(super) fn unevenness(counts: &[f64]) -> f64 {
    let mean = counts.iter().sum::<f64>() / counts.len() as f64;
    let chi2: f64 = counts.iter().map(|count| (count - mean).powi(2) / mean).sum();
    let freedom = (counts.len() - 1) as f64;
    (chi2 - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn slots_and_counts_are_the_published_ones() {
    for masking in [Masking::Google, Masking::Bert, Masking::WholeWord, Masking::Span] {
        let slots = [(128, 0.15), (512, 0.15), (512, 0.25), (8, 0.01)].map(|(n, p)| masking.slots(n, p));
        assert_eq!(slots, [19, 79, 130, 1]);
    }
    assert_eq!([128, 512].map(|length| Masking::Paper.slots(length, 0.15)), [20, 77]);
    let count = |masking, used: usize| masked(&mut masker(masking, 0.15, 128), &row(used), 0).count;
    assert_eq!([100, 101].map(|used| count(Masking::Paper, used)), [15, 16]);
    assert_eq!([30, 50, 3].map(|used| count(Masking::Google, used)), [4, 8, 1]); // 4.5 and 7.5 round to even
    assert_eq!([128, 3].map(|used| count(Masking::Bert, used)), [19, 1]);
}

#[test]
fn google_draws_with_replacement() {
    let mut masker = masker(Masking::Google, 0.15, 128);
    let original = row(128);
    let (mut distinct, mut kept) = (0, 0);
    let mut counts = vec![0.0; 128];
    for number in 0..CASES {
        let result = masked(&mut masker, &original, number);
        let mut times = [0; 128];
        result.positions.iter().for_each(|&position| times[position as usize] += 1);
        distinct += times.iter().filter(|&&n| n > 0).count();
        for position in 0..128 {
            counts[position] += f64::from(times[position]);
            kept += usize::from(times[position] == 1 && result.row[position] == original[position]);
        }
    }
    let cases = f64::from(CASES);
    near(distinct as f64 / cases, 17.69, 0.04); // 126 (1 - (125/126)^19)
    let singles = 19.0 * (125.0_f64 / 126.0).powi(18) * cases;
    near(kept as f64 / singles, 0.15, 0.003);
    assert_eq!((counts[0], counts[127]), (0.0, 0.0));
    assert!(unevenness(&counts[1..127]) < 4.0);
}

#[test]
fn bert_replaces_eight_one_one() {
    let mut masker = masker(Masking::Bert, 0.15, 128);
    let original = row(128);
    let (mut mask, mut random, mut counts) = (0.0, 0.0, vec![0.0; 128]);
    let mut random_ids = vec![0.0; 10];
    for number in 0..CASES {
        let result = masked(&mut masker, &original, number);
        for &position in &result.positions[..result.count] {
            counts[position as usize] += 1.0;
            match result.row[position as usize] {
                4 => mask += 1.0,
                id if id != original[position as usize] => {
                    random += 1.0;
                    random_ids[id as usize / 100] += 1.0;
                }
                _ => {}
            }
        }
    }
    let all = f64::from(CASES) * 19.0;
    near(mask / all, 0.8 + 0.1 / 1000.0, 0.004);
    near(random / all, 0.1 * 0.998, 0.004);
    assert!(unevenness(&counts[1..127]) < 4.0);
    assert!(unevenness(&random_ids) < 4.0);
}

#[test]
fn paper_masks_every_pair_of_positions_alike() {
    let mut masker = masker(Masking::Paper, 0.3, 8);
    let mut pairs = std::collections::HashMap::new();
    for number in 0..CASES {
        let mut chosen = masked(&mut masker, &row(6), number).positions[..2].to_vec();
        chosen.sort_unstable();
        *pairs.entry(chosen).or_insert(0.0) += 1.0;
    }
    assert_eq!(pairs.len(), 6);
    assert!(unevenness(&pairs.into_values().collect::<Vec<_>>()) < 4.0);
}

proptest! {
    #[test]
    fn only_candidates_are_masked_and_all_is_recorded(
        inner in prop::collection::vec(prop_oneof![Just(1), Just(2), Just(3), Just(4), 5..900_i32], 1..100),
        prob in 0.01..0.99_f64, number: u32, which in 0..3_usize,
    ) {
        let masking = [Masking::Paper, Masking::Google, Masking::Bert][which];
        let mut masker = masker(masking, prob, 100);
        let candidates = inner.iter().filter(|&&id| ![2, 3, 4].contains(&id)).count();
        let result = masked(&mut masker, &inner, number);
        let wanted = match masking {
            Masking::Paper => (prob * inner.len() as f64).ceil() as usize,
            _ => ((prob * inner.len() as f64).round_ties_even() as usize).clamp(1, masker.slots()),
        };
        let capped = if masking == Masking::Google && candidates > 0 { wanted } else { wanted.min(candidates) };
        prop_assert_eq!(result.count, capped);
        let used = &result.positions[..result.count];
        for (&position, &id) in used.iter().zip(&result.originals) {
            prop_assert_eq!(inner[position as usize], id);
            prop_assert!(![2, 3, 4].contains(&id));
            if masking == Masking::Paper {
                prop_assert_eq!(result.row[position as usize], 4);
            }
        }
        let distinct: std::collections::HashSet<_> = used.iter().collect();
        prop_assert!(masking == Masking::Google || distinct.len() == used.len());
        for (position, (now, before)) in (0..).zip(result.row.iter().zip(&inner)) {
            prop_assert!(now == before || distinct.contains(&position));
        }
        prop_assert!(result.positions[result.count..].iter().all(|&position| position == 0));
        prop_assert!(result.originals[result.count..].iter().all(|&id| id == 0));
    }
}
