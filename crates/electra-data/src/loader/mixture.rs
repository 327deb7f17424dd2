//! Several corpora as one stream of rows: proportions, seeds, and turns.
//!
//! Each corpus has its own stream of rows, exactly as if it were alone under its seed. A mixture decides row by
//! row which corpus supplies the next row, so proportions do not depend on batches, ranks or interruptions.

use std::sync::Arc;

use super::shuffle_window::{Blocks, CorpusPosition};
use crate::error::{Error, Result};
use crate::format::Corpus;
use crate::philox::philox4x32;

/// The sum of a mixture's weights is below this, so that products with numbers of rows fit into 128 bits.
const MAX_WEIGHT: u64 = 1 << 63;

type Weighted = (Arc<Corpus>, Option<f64>);

#[derive(Debug)]
pub(super) struct Mixture {
    pub corpora: Vec<Blocks>,
    pub weights: Vec<u64>,
}

impl Mixture {
    /// Corpora with their weights or, without weights, in proportion to their numbers of tokens. They must differ and have
    /// the same tokenizer. A single corpus is read with `seed` itself.
    pub fn new(corpora: Vec<Weighted>, seed: u64, num_lanes: u32) -> Result<Self> {
        if corpora.is_empty() {
            return Err(Error::Input("no corpus; pass at least one".into()));
        }
        let weights = weights_of(&corpora)?;
        check_corpora(&corpora)?;
        let is_alone = corpora.len() == 1;
        let blocks = |(corpus, _): Weighted| {
            let seed = if is_alone { seed } else { derived_seed(seed, corpus.content_hash()) };
            Blocks::new(corpus, seed, num_lanes)
        };
        Ok(Self { corpora: corpora.into_iter().map(blocks).collect::<Result<_>>()?, weights })
    }

    /// The turns, in a lane, of corpora at `positions`, each read `epochs` times.
    pub fn turns(&self, positions: &[CorpusPosition], epochs: u32) -> Turns {
        let weights = self.weights.iter().zip(positions);
        let weights = weights.map(|(&weight, position)| if position.at.epoch < epochs { weight } else { 0 });
        Turns::new(weights.collect(), positions.iter().map(|position| position.turns).collect())
    }
}

/// Decides which corpus supplies the next row.
///
/// Row number k (from 0) of a corpus that supplies a fraction w of the rows may become row N of all rows once N w > k,
/// and is due when N w = k + 1. Of the corpora whose next row may come, the corpus whose row is due first supplies it.
/// This is earliest-deadline-first scheduling of fluid shares (Baruah et al., "Proportionate progress", 1996), so
/// after any N rows the corpus has supplied more than N w - 1 and less than N w + 1 rows. Choosing the corpus that lags
/// most would not always guarantee this for more than two corpora.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    /// 0 for a finished corpus.
    weights: Vec<u64>,
    /// Rows that each corpus has supplied since the weights last changed.
    pub rows: Vec<u64>,
    total_weight: u128,
    total_rows: u128,
    pub is_decided: bool,
}

impl Turns {
    fn new(weights: Vec<u64>, rows: Vec<u64>) -> Self {
        let total = |numbers: &[u64]| numbers.iter().copied().map(u128::from).sum();
        let is_decided = weights.iter().filter(|&&weight| weight > 0).count() <= 1;
        Self { total_weight: total(&weights), total_rows: total(&rows), is_decided, weights, rows }
    }

    #[inline]
    pub fn next(&self) -> Option<usize> {
        let wide = u128::from;
        let may_come = |&corpus: &usize| {
            wide(self.rows[corpus]) * self.total_weight < (self.total_rows + 1) * wide(self.weights[corpus])
        };
        let due = |a: usize, b: usize| (wide(self.rows[a]) + 1) * wide(self.weights[b]);
        (0..self.weights.len()).filter(may_come).min_by(|&a, &b| due(a, b).cmp(&due(b, a)))
    }

    #[inline]
    pub fn give(&mut self, corpus: usize, rows: u64) {
        self.rows[corpus] += rows;
        self.total_rows += u128::from(rows);
    }

    /// Removes a finished corpus from the mixture and restarts the turns of the others.
    pub fn finish(&mut self, corpus: usize) {
        self.weights[corpus] = 0;
        *self = Self::new(std::mem::take(&mut self.weights), vec![0; self.rows.len()]);
    }
}

/// A corpus's seed in a mixture: equal block numbers of two corpora must not get equal masks, and the order
/// of a corpus must not depend on the others. Not negative as an `i64`, so that it can be passed as an option.
fn derived_seed(seed: u64, content_hash: &str) -> u64 {
    let hash = u128::from_str_radix(content_hash, 16).unwrap_or_default(); // 32 hexadecimal digits
    let counter = [hash as u32, (hash >> 32) as u32, (hash >> 64) as u32, (hash >> 96) as u32];
    let [low, high, ..] = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    (u64::from(high) << 32 | u64::from(low)) >> 1
}

fn check_corpora(corpora: &[Weighted]) -> Result<()> {
    for (number, (corpus, _)) in corpora.iter().enumerate() {
        if corpus.num_tokens() == 0 {
            let reason = "the corpus has no tokens; prepare it from other input";
            let is_alone = corpora.len() == 1;
            return Err(if is_alone { Error::Input(reason.into()) } else { Error::at(corpus.dir(), reason) });
        }
        for (other, _) in &corpora[..number] {
            check_pair(other, corpus)?;
        }
    }
    Ok(())
}

/// Rejects two corpora with different ids, or the same corpus twice.
fn check_pair(first: &Corpus, second: &Corpus) -> Result<()> {
    let (hash, other, content) = (first.tokenizer_hash(), second.tokenizer_hash(), first.content_hash());
    let again = "prepare one again with the other's vocabulary";
    let reason = if hash != other {
        format!("have different vocabularies (hashes {hash} and {other}); {again}")
    } else if first.special_tokens() != second.special_tokens() {
        format!("have different special tokens; {again}")
    } else if content == second.content_hash() {
        format!("are the same corpus (content hash {content}); pass it once, with the sum of the weights")
    } else {
        return Ok(());
    };
    let (first, second) = (first.dir().display(), second.dir().display());
    Err(Error::Input(format!("{first} and {second} {reason}")))
}

/// The weights, or else the numbers of tokens, as integers in lowest terms.
fn weights_of(corpora: &[Weighted]) -> Result<Vec<u64>> {
    let weights: Vec<f64> = corpora.iter().filter_map(|&(_, weight)| weight).collect();
    if weights.is_empty() {
        let tokens = corpora.iter().map(|(corpus, _)| u128::from(corpus.num_tokens()));
        return lowest_terms(tokens.collect()).ok_or_else(|| Error::Input("too many tokens".into()));
    }
    for (corpus, weight) in corpora {
        let Some(weight) = *weight else {
            return Err(Error::at(corpus.dir(), "has no weight; pass weights for all corpora or for none"));
        };
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(Error::at(corpus.dir(), format!("weight = {weight}: must be a number above 0")));
        }
    }
    decimals(&weights).and_then(lowest_terms).ok_or_else(|| {
        Error::Input(format!("weights = {weights:?}: too far apart, or with too many digits; round them"))
    })
}

/// Numbers as whole multiples of a power of ten, by their shortest decimal form: 0.7 and 0.25 are 70 and 25.
fn decimals(numbers: &[f64]) -> Option<Vec<u128>> {
    let texts: Vec<String> = numbers.iter().map(f64::to_string).collect();
    let parts: Vec<_> = texts.iter().map(|text| text.split_once('.').unwrap_or((text, ""))).collect();
    let digits = parts.iter().map(|(_, fraction)| fraction.len()).max()?;
    parts.iter().map(|(whole, fraction)| format!("{whole}{fraction:0<digits$}").parse().ok()).collect()
}

/// Divides by the greatest common divisor; `None` if the sum is too large even then.
fn lowest_terms(numbers: Vec<u128>) -> Option<Vec<u64>> {
    let divisor = numbers.iter().copied().fold(0, gcd).max(1);
    let terms = numbers.into_iter().map(|number| u64::try_from(number / divisor).ok());
    let terms: Vec<u64> = terms.collect::<Option<_>>()?;
    let sum = terms.iter().try_fold(0_u64, |sum, &term| sum.checked_add(term))?;
    (sum < MAX_WEIGHT).then_some(terms)
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_exact_and_in_lowest_terms() {
        let terms = |weights: &[f64]| decimals(weights).and_then(lowest_terms);
        assert_eq!(terms(&[0.7, 0.3]), Some(vec![7, 3]));
        assert_eq!(terms(&[70.0, 30.0]), Some(vec![7, 3]));
        assert_eq!(terms(&[1.0, 0.25, 1e-3]), Some(vec![1000, 250, 1]));
        assert_eq!(terms(&[1.0 / 3.0, 1.0]), Some(vec![3_333_333_333_333_333, 10_000_000_000_000_000]));
        assert_eq!(terms(&[1e300, 1.0]), None);
        assert_eq!(terms(&[1e-300, 1.0]), None);
        assert_eq!(terms(&[1e19, 1.0]), None);
    }

    #[test]
    fn proportions_are_exact_at_every_row() {
        // With the last weights, choosing the corpus that lags most would leave another one more than a row behind.
        for weights in [&[7, 3][..], &[1, 999], &[5], &[1, 1, 1, 1, 1], &[52, 1, 39, 1, 6, 23, 1, 23, 4]] {
            let total: u64 = weights.iter().sum();
            let mut turns = Turns::new(weights.to_vec(), vec![0; weights.len()]);
            for rows in 1..=3 * total {
                turns.give(turns.next().unwrap(), 1);
                for (&supplied, &weight) in turns.rows.iter().zip(weights) {
                    assert!((supplied * total).abs_diff(rows * weight) < total, "{weights:?}: row {rows}");
                }
            }
            assert!(turns.rows.iter().zip(weights).all(|(&supplied, &weight)| supplied == 3 * weight));
        }
    }
}
