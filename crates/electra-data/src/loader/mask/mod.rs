//! Which tokens of a row the generator has to guess: `paper`, `google` and `bert` masking.
//!
//! Runs on a finished row (special tokens and padding in place). The number of masked tokens is
//! exact and positions come from a partial shuffle of the candidates, so the cost is one pass over
//! the row plus a few random words per masked token.

use crate::error::{Error, Result};
use crate::format::SpecialTokens;
use crate::philox::{Stream, probability};

/// The published code's share of drawn positions that become `[MASK]`.
const GOOGLE_MASKED: u32 = probability(0.85);
/// BERT's shares: 80 % `[MASK]`, half of the rest a random token.
const BERT_MASKED: u32 = probability(0.8);
const BERT_MASKED_OR_RANDOM: u32 = probability(0.9);

/// Tokens looked at together when candidates are listed.
const CHUNK: usize = 8;

/// How positions are chosen and what is put there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Masking {
    /// As the paper says: `ceil(p n)` distinct positions, all `[MASK]`.
    Paper,
    /// As the published code does: `round(p n)` draws with replacement, each `[MASK]` with
    /// probability 0.85 and otherwise left alone.
    Google,
    /// `round(p n)` distinct positions: 80 % `[MASK]`, 10 % a random token, 10 % left alone.
    Bert,
}

impl Masking {
    /// The masking of that name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "paper" => Ok(Self::Paper),
            "google" => Ok(Self::Google),
            "bert" => Ok(Self::Bert),
            _ => Err(Error::Input(format!(
                "masking = {name:?}: unknown; choose \"paper\", \"google\" or \"bert\""
            ))),
        }
    }

    /// The name it has in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paper => "paper",
            Self::Google => "google",
            Self::Bert => "bert",
        }
    }

    /// Mask slots of a row of `sequence_length` tokens: the most that can be masked in it.
    pub fn slots(self, sequence_length: usize, mask_prob: f64) -> usize {
        let length = sequence_length as f64;
        match self {
            Self::Paper => (mask_prob * length).ceil() as usize,
            // The published code's own arithmetic (19 at 128 tokens and 15 %), but never none.
            Self::Google | Self::Bert => (((mask_prob + 0.005) * length) as usize).max(1),
        }
        .min(sequence_length)
    }

    /// How many of a row's `used` tokens are to be masked.
    fn wanted(self, used: usize, mask_prob: f64, slots: usize) -> usize {
        let expected = used as f64 * mask_prob;
        match self {
            Self::Paper => (expected.ceil() as usize).min(slots),
            Self::Google | Self::Bert => (expected.round_ties_even() as usize).clamp(1, slots),
        }
    }
}

/// Masks rows of one shape; keeps the list of candidates from row to row.
#[derive(Clone, Debug)]
pub(super) struct Masker {
    masking: Masking,
    mask_prob: f64,
    slots: usize,
    specials: [i32; 3],
    mask: i32,
    vocab_size: u32,
    candidates: Vec<u16>,
}

impl Masker {
    /// A masker of rows of `sequence_length` tokens (at most 65,536).
    pub fn new(
        masking: Masking,
        mask_prob: f64,
        sequence_length: usize,
        tokens: SpecialTokens,
        vocab_size: u32,
    ) -> Self {
        Self {
            masking,
            mask_prob,
            slots: masking.slots(sequence_length, mask_prob),
            specials: [tokens.cls as i32, tokens.sep as i32, tokens.mask as i32],
            mask: tokens.mask as i32,
            vocab_size,
            candidates: vec![0; sequence_length],
        }
    }

    /// Mask slots per row.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Masks a row whose non-padding tokens are `row`. Fills the first slots of `positions` and
    /// `originals` (the tokens that stood there), zeroes the others, and says how many are in use.
    pub fn apply(
        &mut self,
        row: &mut [i32],
        stream: &mut Stream,
        positions: &mut [i32],
        originals: &mut [i32],
    ) -> usize {
        let candidates = self.find_candidates(row);
        let wanted = match candidates {
            0 => 0,
            _ => self.masking.wanted(row.len(), self.mask_prob, self.slots),
        };
        let masked = match self.masking {
            Masking::Google => wanted,
            Masking::Paper | Masking::Bert => wanted.min(candidates),
        };
        self.draw(candidates, stream, &mut positions[..masked]);
        for (original, &position) in originals.iter_mut().zip(&positions[..masked]) {
            *original = row[position as usize];
        }
        self.replace(row, &positions[..masked], stream);
        positions[masked..].fill(0);
        originals[masked..].fill(0);
        masked
    }

    /// Lists the positions that may be masked: all but `[CLS]`, `[SEP]` and `[MASK]`. Most groups of
    /// eight tokens have none of these and are listed at once, in vector registers.
    fn find_candidates(&mut self, row: &[i32]) -> usize {
        let (groups, rest) = row.as_chunks::<CHUNK>();
        let mut found = 0;
        for (number, group) in groups.iter().enumerate() {
            let start = number * CHUNK;
            if group.iter().fold(false, |any, &token| any | self.is_special(token)) {
                found = self.list_one_by_one(group, start, found);
            } else {
                let list = &mut self.candidates[found..found + CHUNK];
                for (slot, position) in list.iter_mut().zip(start as u16..) {
                    *slot = position;
                }
                found += CHUNK;
            }
        }
        self.list_one_by_one(rest, row.len() - rest.len(), found)
    }

    fn list_one_by_one(&mut self, tokens: &[i32], start: usize, mut found: usize) -> usize {
        for (position, &token) in (start..).zip(tokens) {
            self.candidates[found] = position as u16;
            found += usize::from(!self.is_special(token));
        }
        found
    }

    #[inline]
    fn is_special(&self, token: i32) -> bool {
        let [cls, sep, mask] = self.specials;
        (token == cls) | (token == sep) | (token == mask)
    }

    /// Draws as many of the first `candidates` candidates as there are `positions`.
    fn draw(&mut self, candidates: usize, stream: &mut Stream, positions: &mut [i32]) {
        let list = &mut self.candidates[..candidates];
        for (drawn, position) in positions.iter_mut().enumerate() {
            let place = if self.masking == Masking::Google {
                stream.below(candidates as u32) as usize
            } else {
                let place = drawn + stream.below((candidates - drawn) as u32) as usize;
                list.swap(drawn, place);
                drawn
            };
            *position = i32::from(list[place]);
        }
    }

    fn replace(&self, row: &mut [i32], positions: &[i32], stream: &mut Stream) {
        for &position in positions {
            let token = &mut row[position as usize];
            match self.masking {
                Masking::Paper => *token = self.mask,
                Masking::Google => {
                    if stream.happens(GOOGLE_MASKED) {
                        *token = self.mask;
                    }
                }
                Masking::Bert => match stream.word() {
                    word if word < BERT_MASKED => *token = self.mask,
                    word if word < BERT_MASKED_OR_RANDOM => {
                        *token = stream.below(self.vocab_size) as i32;
                    }
                    _ => {}
                },
            }
        }
    }
}

#[cfg(test)]
mod tests;
