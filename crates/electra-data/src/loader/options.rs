//! The options of a loader, checked.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::mask::{Masker, Masking};
use super::pack::{CutAt, Packer, Packing};
use crate::error::{Error, Result};
use crate::format::Corpus;

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
    /// `paper`, `google`, `bert`, `whole-word` or `span`.
    pub masking: String,
    /// Fraction of a row's tokens that are masked, between 0 and 1, both excluded.
    pub mask_prob: f64,
    /// How documents become rows: `best-fit` or `google`.
    pub packing: String,
    /// Where documents are cut into rows: `token` (anywhere), `word` or `line`; the latter two with
    /// `best-fit` packing only.
    pub cut_at: String,
    /// For each id, whether it begins a word (`Tokenizer::word_starts`, of the corpus's tokenizer). Required
    /// if [`LoaderOptions::needs_word_starts`].
    pub word_starts: Option<Arc<[bool]>>,
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
            cut_at: "token".into(),
            word_starts: None,
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
    pub cut_at: CutAt,
    pub word_starts: Option<Arc<[bool]>>,
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
            cut_at: CutAt::from_name(&self.cut_at)?,
            word_starts: self.word_starts.clone(),
            rank: in_range("rank", self.rank, 0..=world_size as i64 - 1)?,
            world_size,
            num_threads: in_range("num_threads", self.num_threads, 1..=256)? as usize,
            prefetch: in_range("prefetch", self.prefetch, 1..=1024)? as usize,
            epochs: self.epochs.map(|n| in_range("epochs", n, 1..=max_epochs)).transpose()?.map(|n| n as u32),
        };
        settings.check_size()?;
        settings.check_cuts()?;
        Ok(settings)
    }

    /// Whether a loader with these options needs `word_starts`.
    pub fn needs_word_starts(&self) -> bool {
        Masking::from_name(&self.masking).is_ok_and(Masking::needs_word_starts)
            || CutAt::from_name(&self.cut_at).is_ok_and(|cut_at| cut_at == CutAt::Word)
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
        Packer::new(self.packing, self.cut_at, self.word_starts.clone(), self.sequence_length, seed)
    }

    /// The number of epochs after which a corpus is finished.
    pub fn last_epoch(&self) -> u32 {
        self.epochs.unwrap_or(u32::MAX)
    }

    /// A masker of the corpus's rows for these settings.
    pub fn masker(&self, corpus: &Corpus) -> Masker {
        let (tokens, vocab_size) = (corpus.special_tokens(), corpus.vocab_size());
        let word_starts = self.word_starts.as_deref();
        Masker::new(self.masking, self.mask_prob, self.sequence_length, tokens, vocab_size, word_starts)
    }

    /// Rejects a corpus whose tokenizer does not mark words, if these settings are about words.
    pub fn check_words(&self, corpus: &Corpus) -> Result<()> {
        let (what, others) = if self.masking.needs_word_starts() {
            (format!("masking = {:?}", self.masking.name()), "\"paper\", \"google\" or \"bert\"")
        } else if self.cut_at == CutAt::Word {
            ("cut_at = \"word\"".to_owned(), "\"token\" or \"line\"")
        } else {
            return Ok(());
        };
        let path = corpus.tokenizer_name();
        let path = path.display();
        match self.word_starts.as_deref().map(<[bool]>::len) {
            None => Err(Error::Input(format!(
                "{what}: the entries of {path} do not mark where words begin; choose {others}, or prepare the \
                 text with a WordPiece, byte-level BPE or SentencePiece vocabulary"
            ))),
            Some(found) if found != corpus.vocab_size() as usize => Err(Error::Input(format!(
                "{what}: {path} has {found} entries, not {} as the corpus; run `electra-fast verify`",
                corpus.vocab_size()
            ))),
            Some(_) => Ok(()),
        }
    }

    /// Rejects cuts that the packing does not have.
    fn check_cuts(&self) -> Result<()> {
        let (cut_at, packing) = (self.cut_at.name(), self.packing.name());
        if self.cut_at == CutAt::Token || self.packing == Packing::BestFit {
            return Ok(());
        }
        Err(Error::Input(format!(
            "cut_at = {cut_at:?} needs packing = \"best-fit\"; packing {packing:?} is made of lines already"
        )))
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
        let cut_at = match self.cut_at {
            CutAt::Token => String::new(), // as states were before there were others
            cut_at => format!(" cut_at={}", cut_at.name()),
        };
        format!("sequence_length={length} masking={masking} mask_prob={prob} packing={packing}{cut_at}")
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
        assert!(complaint(|o| o.masking = "roberta".into()).contains("\"bert\", \"whole-word\" or \"span\""));
        assert!(complaint(|o| o.packing = "none".into()).contains("\"best-fit\" or \"google\""));
        assert!(complaint(|o| o.cut_at = "page".into()).contains("\"token\", \"word\" or \"line\""));
        for cut_at in ["word", "line"] {
            let message = complaint(|o| (o.cut_at, o.packing) = (cut_at.into(), "google".into()));
            assert!(message.contains("needs packing = \"best-fit\""), "{message}");
        }
    }
}
