//! The options of a loader, checked.

use std::ops::RangeInclusive;

use super::mask::Masking;
use super::pack::{Packer, Packing};
use crate::error::{Error, Result};

/// Upper bound on the tokens of one rank's part of a batch (16 bytes each).
const MAX_TOKENS: u64 = 1 << 28;

/// Options of a loader, not yet checked.
#[derive(Clone, Debug)]
pub struct LoaderOptions {
    /// Tokens in a row, special tokens included (8 to 32,768).
    pub sequence_length: i64,
    /// Rows in a batch, over all ranks.
    pub batch_size: i64,
    /// Seed of order, cuts and masks.
    pub seed: i64,
    /// `paper`, `google` or `bert`.
    pub masking: String,
    /// Fraction of a row's tokens that are masked, between 0 and 1, both excluded.
    pub mask_prob: f64,
    /// How documents become rows: `best-fit` or `google`.
    pub packing: String,
    /// Which of the `world_size` parts of each batch to load, from 0.
    pub rank: i64,
    /// Number of ranks.
    pub world_size: i64,
    /// Number of threads that write batches.
    pub num_threads: i64,
    /// Number of batches prepared in advance.
    pub prefetch: i64,
    /// Number of passes over the corpus; `None` for no end.
    pub epochs: Option<i64>,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            sequence_length: 128,
            batch_size: 128,
            seed: 0,
            masking: "google".into(),
            mask_prob: 0.15,
            packing: "best-fit".into(),
            rank: 0,
            world_size: 1,
            num_threads: 1,
            prefetch: 4,
            epochs: None,
        }
    }
}

/// Options that have been checked.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub sequence_length: usize,
    pub batch_size: u64,
    pub seed: u64,
    pub masking: Masking,
    pub mask_prob: f64,
    pub packing: Packing,
    pub rank: u64,
    pub world_size: u64,
    pub num_threads: usize,
    pub prefetch: usize,
    pub epochs: Option<u32>,
}

impl LoaderOptions {
    /// The checked settings. The first option out of range is an error with its name, value and range.
    pub(super) fn check(&self) -> Result<Settings> {
        let world_size = in_range("world_size", self.world_size, 1..=1 << 20)?;
        if !(self.mask_prob > 0.0 && self.mask_prob < 1.0) {
            let prob = self.mask_prob;
            return Err(Error::Input(format!("mask_prob = {prob}: must lie between 0 and 1, both excluded")));
        }
        let max_epochs = i64::from(u32::MAX);
        let settings = Settings {
            sequence_length: in_range("sequence_length", self.sequence_length, 8..=32_768)? as usize,
            batch_size: in_range("batch_size", self.batch_size, 1..=1 << 24)?,
            seed: in_range("seed", self.seed, 0..=i64::MAX)?,
            masking: Masking::from_name(&self.masking)?,
            mask_prob: self.mask_prob,
            packing: Packing::from_name(&self.packing)?,
            rank: in_range("rank", self.rank, 0..=world_size as i64 - 1)?,
            world_size,
            num_threads: in_range("num_threads", self.num_threads, 1..=256)? as usize,
            prefetch: in_range("prefetch", self.prefetch, 1..=1024)? as usize,
            epochs: self.epochs.map(|n| in_range("epochs", n, 1..=max_epochs)).transpose()?.map(|n| n as u32),
        };
        settings.check_size()?;
        Ok(settings)
    }
}

fn in_range(name: &str, value: i64, range: RangeInclusive<i64>) -> Result<u64> {
    if range.contains(&value) {
        return Ok(value as u64);
    }
    let (min, max) = range.into_inner();
    Err(Error::Input(format!("{name} = {value}: must be from {min} to {max}")))
}

impl Settings {
    /// A packer for these settings, with the seed of a corpus.
    pub fn packer(&self, seed: u64) -> Packer {
        Packer::new(self.packing, self.sequence_length, seed)
    }

    /// The number of epochs after which a corpus is finished.
    pub fn last_epoch(&self) -> u32 {
        self.epochs.unwrap_or(u32::MAX)
    }

    /// Rejects a batch too large for any memory.
    fn check_size(&self) -> Result<()> {
        let tokens = self.batch_size.div_ceil(self.world_size) * self.sequence_length as u64;
        if tokens <= MAX_TOKENS {
            return Ok(());
        }
        let rows = self.batch_size;
        Err(Error::Input(format!(
            "batch_size = {rows}: {tokens} tokens per rank; at most {MAX_TOKENS} are possible"
        )))
    }

    /// The settings that decide the content of rows, besides corpus and seed. Batch size, ranks and threads
    /// do not, so they may change when a run is resumed.
    pub fn content(&self) -> String {
        let (length, prob) = (self.sequence_length, self.mask_prob);
        let (masking, packing) = (self.masking.name(), self.packing.name());
        format!("sequence_length={length} masking={masking} mask_prob={prob} packing={packing}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(change: impl FnOnce(&mut LoaderOptions)) -> String {
        let mut options = LoaderOptions::default();
        change(&mut options);
        options.check().unwrap_err().to_string()
    }

    #[test]
    fn each_wrong_option_is_named_with_value_and_range() {
        assert_eq!(complaint(|o| o.sequence_length = 7), "sequence_length = 7: must be from 8 to 32768");
        assert_eq!(complaint(|o| o.rank = 1), "rank = 1: must be from 0 to 0");
        assert!(complaint(|o| o.rank = -1).starts_with("rank = -1: must be from 0"));
        assert!(complaint(|o| o.batch_size = 0).starts_with("batch_size = 0: must be from 1"));
        assert!(complaint(|o| o.world_size = 0).starts_with("world_size = 0: must be from 1"));
        assert!(complaint(|o| o.seed = -4).starts_with("seed = -4: must be from 0"));
        assert!(complaint(|o| o.num_threads = 0).starts_with("num_threads = 0"));
        assert!(complaint(|o| o.prefetch = 0).starts_with("prefetch = 0"));
        assert!(complaint(|o| o.epochs = Some(0)).starts_with("epochs = 0: must be from 1"));
        for prob in [0.0, 1.0, -0.5, f64::NAN] {
            assert!(complaint(|o| o.mask_prob = prob).starts_with("mask_prob = "));
        }
        assert!(complaint(|o| o.masking = "roberta".into()).contains("\"paper\", \"google\" or \"bert\""));
        assert!(complaint(|o| o.packing = "none".into()).contains("\"best-fit\" or \"google\""));
    }
}
