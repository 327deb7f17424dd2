//! The options of a loader.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;

use crate::choice::{Choice, choice};
use crate::error::{Error, Result};
use crate::format::{CacheOptions, Corpus};

/// Upper bound on the tokens of one rank's slice of a batch (16 bytes each).
const MAX_TOKENS: u64 = 1 << 28;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masking {
    /// As in the paper: `ceil(p n)` distinct positions, all replaced by `[MASK]`.
    Tokens,
    /// As in the published code: `round(p n)` draws with replacement, each replaced by `[MASK]` with
    /// probability 0.85 and otherwise unchanged.
    WithRepeats,
    /// `round(p n)` distinct positions: 80 % `[MASK]`, 10 % a random token, 10 % unchanged.
    EightyTenTen,
    /// Whole words in random order, all replaced by `[MASK]`, up to `round(p n)` tokens.
    WholeWord,
    /// The same with runs of one to three words.
    Span,
}

choice!(Masking {
    "tokens" => Tokens,
    "with-repeats" => WithRepeats,
    "80-10-10" => EightyTenTen,
    "whole-word" => WholeWord,
    "span" => Span
});

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Keeps every token and fills rows with as many documents as fit.
    BestFit,
    /// Like the published code: one or two texts from the lines of one document; truncates the overflow.
    Examples,
}

choice!(Packing { "best-fit" => BestFit, "examples" => Examples });

/// Positions at which rows may begin, in addition to the starts of documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutAt {
    Token,
    Word,
    Line,
}

choice!(CutAt { "token" => Token, "word" => Word, "line" => Line });

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoaderOptions {
    /// Tokens per row, including special tokens (8 to 32,768).
    pub sequence_length: i64,
    pub batch_size: i64,
    pub seed: i64,
    pub masking: Masking,
    /// Fraction of a row's tokens that are masked: above 0 and below 1.
    pub mask_prob: f64,
    pub packing: Packing,
    /// Positions at which documents are cut into rows; words and lines need best-fit packing.
    pub cut_at: CutAt,
    /// For each id, whether it begins a word; required if [`LoaderOptions::needs_word_starts`].
    #[serde(skip)]
    pub word_starts: Option<Arc<[bool]>>,
    /// The slice of each batch to load, from 0 to `world_size` - 1.
    pub rank: i64,
    pub world_size: i64,
    /// Number of lanes: equal parts of each batch whose rows come from different blocks of the corpus.
    pub lanes: i64,
    pub num_threads: i64,
    pub prefetch: i64,
    pub epochs: Option<i64>,
    pub cache_dir: Option<PathBuf>,
    pub cache_bytes: i64,
}

impl Default for LoaderOptions {
    fn default() -> Self {
        Self {
            sequence_length: 128,
            batch_size: 128,
            seed: 0,
            masking: Masking::WithRepeats,
            mask_prob: 0.15,
            packing: Packing::BestFit,
            cut_at: CutAt::Token,
            word_starts: None,
            rank: 0,
            world_size: 1,
            lanes: 1,
            num_threads: 1,
            prefetch: 4,
            epochs: None,
            cache_dir: None,
            cache_bytes: 1 << 34,
        }
    }
}

impl LoaderOptions {
    pub fn check(&self) -> Result<()> {
        for (name, value, min, max) in [
            ("world_size", self.world_size, 1, 1 << 20),
            ("rank", self.rank, 0, self.world_size.saturating_sub(1)),
            ("sequence_length", self.sequence_length, 8, 32_768),
            ("batch_size", self.batch_size, 1, 1 << 24),
            ("seed", self.seed, 0, i64::MAX),
            ("lanes", self.lanes, 1, self.batch_size),
            ("num_threads", self.num_threads, 1, 256),
            ("prefetch", self.prefetch, 1, 1024),
            ("epochs", self.epochs.unwrap_or(1), 1, u32::MAX.into()),
            ("cache_bytes", self.cache_bytes, 0, i64::MAX),
        ] {
            if !(min..=max).contains(&value) {
                return Err(Error::Input(format!("{name} = {value}: must be from {min} to {max}")));
            }
        }
        let (prob, rows, lanes) = (self.mask_prob, self.batch_size, self.lanes);
        let tokens = (rows as u64).div_ceil(self.world_size as u64) * self.sequence_length as u64;
        let (cut_at, packing) = (self.cut_at.name(), self.packing.name());
        Err(Error::Input(if !(prob > 0.0 && prob < 1.0) {
            format!("mask_prob = {prob}: must be above 0 and below 1")
        } else if self.cut_at != CutAt::Token && self.packing != Packing::BestFit {
            format!(
                "cut_at = {cut_at:?}: needs packing = \"best-fit\"; {packing:?} already packs whole lines"
            )
        } else if rows % lanes != 0 {
            let divisor = largest_divisor(rows as u64, lanes as u64);
            format!("lanes = {lanes}: must divide batch_size = {rows}; the next smaller divisor is {divisor}")
        } else if let (Some(epochs), 2..) = (self.epochs, lanes) {
            format!(
                "epochs = {epochs}: needs lanes = 1, not {lanes}; lanes have different numbers of rows per epoch"
            )
        } else if tokens > MAX_TOKENS {
            format!("batch_size = {rows}: must have at most {MAX_TOKENS} tokens per rank, not {tokens}")
        } else {
            return Ok(());
        }))
    }

    pub(super) fn rank_rows(&self, batch_rows: u64) -> Range<u64> {
        let (rank, world) = (self.rank as u64, self.world_size as u64);
        rank * batch_rows / world..(rank + 1) * batch_rows / world
    }

    pub(super) fn lane_rows(&self) -> u64 {
        (self.batch_size / self.lanes) as u64
    }

    pub(super) fn lanes_of_rank(&self) -> Range<u32> {
        let (rows, size) = (self.rank_rows(self.batch_size as u64), self.lane_rows());
        let first = rows.start / size;
        first as u32..rows.end.div_ceil(size).max(first + 1) as u32
    }

    pub fn needs_word_starts(&self) -> bool {
        self.masks_words() || self.cut_at == CutAt::Word
    }

    fn masks_words(&self) -> bool {
        matches!(self.masking, Masking::WholeWord | Masking::Span)
    }

    /// The cache of each of `num_corpora` corpora in object stores; `None` for private caches.
    pub fn cache(&self, num_corpora: usize) -> Option<CacheOptions> {
        let bytes = self.cache_bytes.max(0) as u64 / num_corpora.max(1) as u64;
        self.cache_dir.clone().map(|dir| CacheOptions { dir, bytes })
    }

    pub(super) fn last_epoch(&self) -> u32 {
        self.epochs.map_or(u32::MAX, |epochs| epochs as u32)
    }

    /// Rejects a corpus whose tokenizer does not mark words, if these options depend on words.
    pub(super) fn check_words(&self, corpus: &Corpus) -> Result<()> {
        let (option, others) = if self.masks_words() {
            (format!("masking = {:?}", self.masking.name()), "\"tokens\", \"with-repeats\" or \"80-10-10\"")
        } else if self.cut_at == CutAt::Word {
            ("cut_at = \"word\"".to_owned(), "\"token\" or \"line\"")
        } else {
            return Ok(());
        };
        let (path, size) = (corpus.tokenizer_name(), corpus.vocab_size());
        let path = path.display();
        let reason = match self.word_starts.as_deref().map(<[bool]>::len) {
            None => format!(
                "{path} does not mark where words begin; choose {others}, or prepare the text with \
                 a WordPiece, byte-level BPE or SentencePiece vocabulary"
            ),
            Some(len) if len == size as usize => return Ok(()),
            Some(len) => {
                format!("{path} has {len} entries, but the corpus has {size}; run `electra-fast verify`")
            }
        };
        Err(Error::Input(format!("{option}: {reason}")))
    }

    /// The options that determine the content of rows, together with corpus and seed. Batch size, ranks and threads
    /// do not, so they may change when a run is resumed.
    pub(super) fn content(&self) -> String {
        let (length, prob) = (self.sequence_length, self.mask_prob);
        let (masking, packing) = (self.masking.name(), self.packing.name());
        let cut_at = match self.cut_at {
            CutAt::Token => String::new(), // as in states saved before this option existed
            cut_at => format!(" cut_at={}", cut_at.name()),
        };
        let lanes = if self.lanes == 1 { String::new() } else { format!(" lanes={}", self.lanes) };
        format!(
            "sequence_length={length} masking={masking} mask_prob={prob} packing={packing}{cut_at}{lanes}"
        )
    }
}

/// The largest divisor of `number` up to `limit`, which must be at least 1.
pub(super) fn largest_divisor(number: u64, limit: u64) -> u64 {
    (1..=limit.min(number)).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}
