//! Masks of words against their rules and distributions.

use proptest::prelude::*;

use super::*;
use crate::format::SpecialTokens;
use crate::loader::mask::tests::{CASES, Masked, masked, near, unevenness};
use crate::loader::mask::{Masker, Masking};

const TOKENS: SpecialTokens = SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 };
const VOCAB: u32 = 1000;

/// Even ids begin words, odd ones continue them.
fn masker(masking: Masking, prob: f64, length: usize) -> Masker {
    let starts: Vec<bool> = (0..VOCAB).map(|id| id % 2 == 0).collect();
    Masker::new(masking, prob, length, TOKENS, VOCAB, Some(&starts))
}

/// A row `[CLS] words [SEP]` of words with these numbers of tokens.
fn row(words: &[usize]) -> Vec<i32> {
    let tokens = words.iter().flat_map(|&len| (0..len).map(|piece| 10 + i32::from(piece > 0)));
    [2].into_iter().chain(tokens).chain([3]).collect()
}

/// The words of a row, by another way than the masker's: between separators, runs that begin at even ids.
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

/// How often each word of a row is masked.
fn counts(masker: &mut Masker, original: &[i32]) -> Vec<f64> {
    let words = words(original);
    let mut counts = vec![0.0; words.len()];
    for number in 0..CASES {
        let result = masked(masker, original, number);
        for (count, word) in counts.iter_mut().zip(&words) {
            *count += f64::from(u8::from(result.row[word[0]] == 4));
        }
    }
    counts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whole_words_are_masked_up_to_the_budget(
        inner in prop::collection::vec(prop_oneof![Just(2), Just(3), Just(4), Just(1), 5..40_i32, 5..40_i32, Just(7)], 1..100),
        prob in 0.01..0.99_f64, number: u32, spans: bool,
    ) {
        let masking = if spans { Masking::Span } else { Masking::WholeWord };
        let mut masker = masker(masking, prob, 100);
        let budget = ((prob * inner.len() as f64).round_ties_even() as usize).clamp(1, masker.slots());
        let words = words(&inner);
        let Masked { row, positions, originals, count } = masked(&mut masker, &inner, number);
        let used = &positions[..count];
        let mut distinct = used.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        prop_assert_eq!(distinct.len(), count);
        for (&position, &id) in used.iter().zip(&originals) {
            prop_assert_eq!((inner[position as usize], row[position as usize]), (id, 4));
        }
        let is_masked = |position: &usize| used.contains(&(*position as i32));
        for position in 0..inner.len() {
            prop_assert!(is_masked(&position) || row[position] == inner[position]);
            prop_assert!(!is_masked(&position) || ![2, 3, 4].contains(&inner[position]));
        }
        if words.iter().all(|word| word.len() > budget) {
            // No word fits, so tokens are masked one by one.
            prop_assert_eq!(count, budget.min(words.concat().len()));
            return Ok(());
        }
        prop_assert!((1..=budget).contains(&count));
        for word in &words {
            let parts = word.iter().filter(|position| is_masked(position)).count();
            prop_assert!(parts == 0 || parts == word.len(), "a word is masked in part");
            prop_assert!(parts > 0 || count + word.len() > budget, "a word would still fit");
        }
    }
}

#[test]
fn words_of_equal_length_are_equally_likely() {
    let lengths: Vec<usize> = (0..40).map(|word| 1 + word % 2 * 2).collect();
    let found = counts(&mut masker(Masking::WholeWord, 0.15, 128), &row(&lengths));
    let of =
        |len| found.iter().zip(&lengths).filter(|&(_, &l)| l == len).map(|(n, _)| *n).collect::<Vec<_>>();
    assert!(unevenness(&of(1)) < 4.0 && unevenness(&of(3)) < 4.0);
}

#[test]
fn spans_mask_all_but_the_first_words_of_a_segment_alike() {
    let found = counts(&mut masker(Masking::Span, 0.15, 128), &row(&[1; 120]));
    assert!(unevenness(&found[2..118]) < 4.0);
    // The first word is masked only if an n-gram begins with it: 11/18 as often, but for overlaps and the budget.
    let middle = found[2..118].iter().sum::<f64>() / 116.0;
    near(found[0] / middle, 11.0 / 18.0, 0.08);
}

#[test]
fn lengths_of_spans_are_proportional_to_their_inverse() {
    let mut begun = [0.0; MAX_SPAN];
    let mut masker = masker(Masking::Span, 0.003, 1002);
    for number in 0..CASES {
        // Three tokens, so that the budget cuts off no first n-gram.
        let result = masked(&mut masker, &row(&[1; 1000]), number);
        assert_eq!(result.count, 3);
        let run = (1..3).take_while(|&n| result.positions[n] == result.positions[0] + n as i32).count();
        begun[run] += 1.0;
    }
    for (n, share) in [6.0, 3.0, 2.0].into_iter().enumerate() {
        near(begun[n] / f64::from(CASES), share / 11.0, 0.014);
    }
}

#[test]
fn spans_do_not_cross_separators() {
    let mut masker = masker(Masking::Span, 0.17, 13);
    let mut pairs = std::collections::HashMap::new();
    for number in 0..CASES {
        let row = [2, 10, 3, 2, 10, 3, 2, 10, 3, 2, 10, 3];
        let mut chosen = masked(&mut masker, &row, number).positions[..2].to_vec();
        chosen.sort_unstable();
        *pairs.entry(chosen).or_insert(0.0) += 1.0;
    }
    assert_eq!(pairs.len(), 6);
    assert!(unevenness(&pairs.into_values().collect::<Vec<_>>()) < 4.0);
}
