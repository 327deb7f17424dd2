//! Masks compared with their rules and documented distributions.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::words::MAX_SPAN;
use super::*;
use crate::philox::Purpose;

const TOKENS: SpecialTokens = SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 };
const VOCAB: u32 = 1000;
const CASES: u32 = 20_000;
const ALL: [Masking; 5] =
    [Masking::Tokens, Masking::WithRepeats, Masking::EightyTenTen, Masking::WholeWord, Masking::Span];

/// A masker for ids that begin words if even and continue words if odd.
fn masker(masking: Masking, prob: f64, length: usize) -> Masker {
    let starts: Vec<bool> = (0..VOCAB).map(|id| id % 2 == 0).collect();
    Masker::new(masking, prob, length, TOKENS, VOCAB, Some(&starts))
}

/// A row `[CLS] words [SEP]` of words with these numbers of tokens.
fn row(words: &[usize]) -> Vec<i32> {
    let tokens = words.iter().flat_map(|&len| (0..len).map(|piece| 10 + i32::from(piece > 0)));
    [2].into_iter().chain(tokens).chain([3]).collect()
}

fn row_of(used: usize) -> Vec<i32> {
    row(&vec![1; used - 2])
}

struct Masked {
    row: Vec<i32>,
    positions: Vec<i32>,
    originals: Vec<i32>,
    count: usize,
}

fn masked(masker: &mut Masker, row: &[i32], number: u32) -> Masked {
    let mut stream = Stream::new(42, Purpose::Mask, [0, 0, number]);
    let (mut positions, mut originals) = (vec![-1; masker.slots], vec![-1; masker.slots]);
    let mut row = row.to_vec();
    let count = masker.apply(&mut row, &mut stream, &mut positions, &mut originals);
    Masked { row, positions, originals, count }
}

fn counts(masker: &mut Masker, row: &[i32]) -> Vec<f64> {
    let mut counts = vec![0.0; row.len()];
    for number in 0..CASES {
        let Masked { positions, count, .. } = masked(masker, row, number);
        positions[..count].iter().for_each(|&position| counts[position as usize] += 1.0);
    }
    counts
}

fn near(value: f64, expected: f64, tolerance: f64) {
    assert!((value - expected).abs() < tolerance, "{value} is not {expected}");
}

/// Asserts that chi-squared of counts with equal expectations is less than four standard deviations above its mean.
fn assert_even(counts: &[f64]) {
    let mean = counts.iter().sum::<f64>() / counts.len() as f64;
    let chi2: f64 = counts.iter().map(|count| (count - mean).powi(2) / mean).sum();
    let freedom = (counts.len() - 1) as f64;
    assert!((chi2 - freedom) / (2.0 * freedom).sqrt() < 4.0, "{counts:?}");
}

/// The words of a row, computed differently from the masker: between separators, runs that begin at even ids.
fn words(row: &[i32]) -> Vec<Vec<usize>> {
    let mut words: Vec<Vec<usize>> = Vec::new();
    let mut separated = true;
    for (position, id) in row.iter().enumerate() {
        let is_special = [2, 3, 4].contains(id);
        match words.last_mut() {
            Some(word) if !is_special && !separated && id % 2 == 1 => word.push(position),
            _ if !is_special => words.push(vec![position]),
            _ => {}
        }
        separated = is_special;
    }
    words
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn ordinary_tokens_are_masked_in_whole_words_and_recorded(
        inner in prop::collection::vec(prop_oneof![1..5_i32, 5..900_i32, 5..40_i32, Just(7)], 1..100),
        prob in 0.01..0.99_f64, number: u32, masking in prop::sample::select(ALL.to_vec()),
    ) {
        let mut masker = masker(masking, prob, 100);
        let words = words(&inner);
        let Masked { row, positions, originals, count } = masked(&mut masker, &inner, number);
        let wanted = match masking {
            Masking::Tokens => (prob * inner.len() as f64).ceil() as usize,
            _ => ((prob * inner.len() as f64).round_ties_even() as usize).clamp(1, masker.slots),
        };
        let used: HashSet<usize> = positions[..count].iter().map(|&position| position as usize).collect();
        prop_assert!(masking == Masking::WithRepeats || used.len() == count);
        for (&position, &id) in positions[..count].iter().zip(&originals) {
            prop_assert!(inner[position as usize] == id && ![2, 3, 4].contains(&id));
            let may_stay = matches!(masking, Masking::WithRepeats | Masking::EightyTenTen);
            prop_assert!(may_stay || row[position as usize] == 4);
        }
        prop_assert!((0..inner.len()).all(|position| used.contains(&position) || row[position] == inner[position]));
        prop_assert!(positions[count..].iter().chain(&originals[count..]).all(|&value| value == 0));
        let of_words = matches!(masking, Masking::WholeWord | Masking::Span);
        if !of_words || words.iter().all(|word| word.len() > wanted) {
            // If no word fits, tokens are masked one by one.
            let candidates = words.concat().len();
            let all = masking == Masking::WithRepeats && candidates > 0;
            prop_assert_eq!(count, if all { wanted } else { wanted.min(candidates) });
            return Ok(());
        }
        prop_assert!((1..=wanted).contains(&count));
        for word in &words {
            let parts = word.iter().filter(|position| used.contains(position)).count();
            prop_assert!(parts == 0 || parts == word.len(), "a word is masked in part");
            prop_assert!(parts > 0 || count + word.len() > wanted, "a word would still fit");
        }
    }
}

#[test]
fn slots_and_counts_match_the_published_code() {
    for masking in &ALL[1..] {
        let slots = [(128, 0.15), (512, 0.15), (512, 0.25), (8, 0.01)].map(|(n, p)| masking.slots(n, p));
        assert_eq!(slots, [19, 79, 130, 1]);
    }
    assert_eq!([128, 512].map(|length| Masking::Tokens.slots(length, 0.15)), [20, 77]);
    let count = |masking, used: usize| masked(&mut masker(masking, 0.15, 128), &row_of(used), 0).count;
    assert_eq!([100, 101].map(|used| count(Masking::Tokens, used)), [15, 16]);
    assert_eq!([30, 50, 3].map(|used| count(Masking::WithRepeats, used)), [4, 8, 1]); // 4.5 and 7.5 round to even
    assert_eq!([128, 3].map(|used| count(Masking::EightyTenTen, used)), [19, 1]);
}

#[test]
fn repeats_are_drawn_with_replacement() {
    let mut masker = masker(Masking::WithRepeats, 0.15, 128);
    let (mut distinct, mut unchanged) = (0, 0);
    for number in 0..CASES {
        let result = masked(&mut masker, &row_of(128), number);
        let mut times = [0; 128];
        result.positions.iter().for_each(|&position| times[position as usize] += 1);
        distinct += times.iter().filter(|&&n| n > 0).count();
        unchanged += (0..128).filter(|&position| times[position] == 1 && result.row[position] == 10).count();
    }
    let cases = f64::from(CASES);
    near(distinct as f64 / cases, 17.69, 0.04); // 126 (1 - (125/126)^19)
    let singles = 19.0 * (125.0_f64 / 126.0).powi(18) * cases;
    near(unchanged as f64 / singles, 0.15, 0.003);
    assert_even(&counts(&mut masker, &row_of(128))[1..127]);
}

#[test]
fn eighty_ten_ten_masks_replaces_and_keeps() {
    let mut masker = masker(Masking::EightyTenTen, 0.15, 128);
    let (mut mask, mut random_ids) = (0.0, vec![0.0; 10]);
    for number in 0..CASES {
        let result = masked(&mut masker, &row_of(128), number);
        for &position in &result.positions[..result.count] {
            match result.row[position as usize] {
                4 => mask += 1.0,
                10 => {}
                id => random_ids[id as usize / 100] += 1.0,
            }
        }
    }
    let all = f64::from(CASES) * 19.0;
    near(mask / all, 0.8 + 0.1 / 1000.0, 0.004);
    near(random_ids.iter().sum::<f64>() / all, 0.1 * 0.998, 0.004);
    assert_even(&random_ids);
    assert_even(&counts(&mut masker, &row_of(128))[1..127]);
}

#[test]
fn pairs_of_positions_are_masked_equally_often_and_spans_do_not_cross_separators() {
    let separated = vec![2, 10, 3, 2, 10, 3, 2, 10, 3, 2, 10, 3];
    for (masking, prob, row) in [(Masking::Tokens, 0.3, row_of(6)), (Masking::Span, 0.17, separated)] {
        let mut masker = masker(masking, prob, row.len() + 1);
        let mut pairs = HashMap::new();
        for number in 0..CASES {
            let mut chosen = masked(&mut masker, &row, number).positions[..2].to_vec();
            chosen.sort_unstable();
            *pairs.entry(chosen).or_insert(0.0) += 1.0;
        }
        assert_eq!(pairs.len(), 6);
        assert_even(&pairs.into_values().collect::<Vec<_>>());
    }
}

#[test]
fn words_of_equal_length_are_equally_likely() {
    let lengths: Vec<usize> = (0..40).map(|word| 1 + word % 2 * 2).collect();
    let row = row(&lengths);
    let frequencies = counts(&mut masker(Masking::WholeWord, 0.15, 128), &row);
    for length in [1, 3] {
        let of_length = words(&row).into_iter().filter(|word| word.len() == length);
        assert_even(&of_length.map(|word| frequencies[word[0]]).collect::<Vec<_>>());
    }
    // A single very long word is masked token by token.
    assert_even(&counts(&mut masker(Masking::Span, 0.15, 128), &self::row(&[126]))[1..127]);
}

#[test]
fn spans_mask_all_words_equally_often_except_at_segment_starts() {
    let frequencies = counts(&mut masker(Masking::Span, 0.15, 128), &row_of(122));
    assert_even(&frequencies[3..119]);
    // The first word is masked only if an n-gram begins with it: 11/18 as often, apart from overlaps and the budget.
    let middle = frequencies[3..119].iter().sum::<f64>() / 116.0;
    near(frequencies[1] / middle, 11.0 / 18.0, 0.08);
}

#[test]
fn span_lengths_are_inversely_proportional_to_their_frequency() {
    let mut begun = [0.0; MAX_SPAN];
    let mut masker = masker(Masking::Span, 0.003, 1002);
    for number in 0..CASES {
        // Three tokens, so that the budget does not truncate a first n-gram.
        let result = masked(&mut masker, &row_of(1002), number);
        assert_eq!(result.count, 3);
        let run = (1..3).take_while(|&n| result.positions[n] == result.positions[0] + n as i32).count();
        begun[run] += 1.0;
    }
    for (frequency, share) in begun.into_iter().zip([6.0, 3.0, 2.0]) {
        near(frequency / f64::from(CASES), share / 11.0, 0.014);
    }
}
