//! Masking the tokens of a row: `tokens`, `with-repeats` and `80-10-10` here, masks of words in `words`.
//!
//! Works on a finished row, with special tokens and padding. The number of masked tokens is exact, and
//! positions come from a partial shuffle of the candidates, so the cost is one pass over the row plus a few
//! random words per masked token.

mod words;

use self::words::WordMasker;
use super::options::{LoaderOptions, Masking};
use crate::format::{Corpus, SpecialTokens};
use crate::philox::{Stream, probability};

/// The published code's probability that a drawn position becomes `[MASK]`.
const REPEATS_MASKED: u32 = probability(0.85);
const BERT_MASKED: u32 = probability(0.8);
const BERT_MASKED_OR_RANDOM: u32 = probability(0.9);

/// Tokens checked together when candidates are listed.
const CHUNK: usize = 8;

impl Masking {
    fn max_words(self) -> Option<usize> {
        match self {
            Self::Tokens | Self::WithRepeats | Self::EightyTenTen => None,
            Self::WholeWord => Some(1),
            Self::Span => Some(words::MAX_SPAN),
        }
    }

    /// Mask slots of a row of `sequence_length` tokens: the maximum number of masked tokens.
    pub fn slots(self, sequence_length: usize, mask_prob: f64) -> usize {
        let length = sequence_length as f64;
        match self {
            Self::Tokens => (mask_prob * length).ceil() as usize,
            // The arithmetic of the published code (19 at 128 tokens and 15 %), but at least one.
            _ => (((mask_prob + 0.005) * length) as usize).max(1),
        }
        .min(sequence_length)
    }

    fn wanted(self, used: usize, mask_prob: f64, slots: usize) -> usize {
        let expected = used as f64 * mask_prob;
        match self {
            Self::Tokens => (expected.ceil() as usize).min(slots),
            _ => (expected.round_ties_even() as usize).clamp(1, slots),
        }
    }
}

/// Masks rows of one length. Reuses the list of candidates from row to row.
#[derive(Clone, Debug)]
pub(super) struct Masker {
    masking: Masking,
    mask_prob: f64,
    pub slots: usize,
    specials: [i32; 3],
    mask: i32,
    vocab_size: u32,
    candidates: Vec<u16>,
    words: Option<WordMasker>,
}

impl Masker {
    /// A masker of rows of `sequence_length` tokens (at most 65,535). `word_starts` has a flag for each id that begins
    /// a word, for the maskings that need it.
    pub fn new(
        masking: Masking,
        mask_prob: f64,
        sequence_length: usize,
        tokens: SpecialTokens,
        vocab_size: u32,
        word_starts: Option<&[bool]>,
    ) -> Self {
        let specials = [tokens.cls as i32, tokens.sep as i32, tokens.mask as i32];
        let words = masking.max_words().zip(word_starts);
        Self {
            masking,
            mask_prob,
            slots: masking.slots(sequence_length, mask_prob),
            specials,
            mask: tokens.mask as i32,
            vocab_size,
            candidates: vec![0; sequence_length],
            words: words.map(|(max, starts)| WordMasker::new(starts, specials, max, sequence_length)),
        }
    }

    pub fn for_corpus(options: &LoaderOptions, corpus: &Corpus) -> Self {
        let (tokens, vocab_size) = (corpus.special_tokens(), corpus.vocab_size());
        let (length, word_starts) = (options.sequence_length as usize, options.word_starts.as_deref());
        Self::new(options.masking, options.mask_prob, length, tokens, vocab_size, word_starts)
    }

    /// Masks a row whose tokens without padding are `row`. Fills the first slots of `positions` and
    /// `originals` (the replaced tokens), zeroes the others, and returns the number of slots in use.
    pub fn apply(
        &mut self,
        row: &mut [i32],
        stream: &mut Stream,
        positions: &mut [i32],
        originals: &mut [i32],
    ) -> usize {
        let wanted = self.masking.wanted(row.len(), self.mask_prob, self.slots);
        let mut masked = match &mut self.words {
            Some(words) => words.apply(row, stream, &mut positions[..wanted], originals),
            None => 0,
        };
        if masked == 0 {
            masked = self.apply_to_tokens(row, wanted, stream, positions, originals);
        }
        positions[masked..].fill(0);
        originals[masked..].fill(0);
        masked
    }

    fn apply_to_tokens(
        &mut self,
        row: &mut [i32],
        wanted: usize,
        stream: &mut Stream,
        positions: &mut [i32],
        originals: &mut [i32],
    ) -> usize {
        let candidates = self.find_candidates(row);
        let masked = match self.masking {
            Masking::WithRepeats if candidates > 0 => wanted,
            _ => wanted.min(candidates),
        };
        self.draw(candidates, stream, &mut positions[..masked]);
        for (original, &position) in originals.iter_mut().zip(&positions[..masked]) {
            *original = row[position as usize];
        }
        self.replace(row, &positions[..masked], stream);
        masked
    }

    /// Lists the positions that may be masked: all but `[CLS]`, `[SEP]` and `[MASK]`. Most chunks of eight
    /// tokens have none of these and are listed at once, in vector registers.
    fn find_candidates(&mut self, row: &[i32]) -> usize {
        let (chunks, rest) = row.as_chunks::<CHUNK>();
        let mut count = 0;
        for (number, chunk) in chunks.iter().enumerate() {
            let start = number * CHUNK;
            if chunk.iter().fold(false, |any, &token| any | self.is_special(token)) {
                count = self.list_one_by_one(chunk, start, count);
            } else {
                let list = &mut self.candidates[count..count + CHUNK];
                for (slot, position) in list.iter_mut().zip(start as u16..) {
                    *slot = position;
                }
                count += CHUNK;
            }
        }
        self.list_one_by_one(rest, row.len() - rest.len(), count)
    }

    fn list_one_by_one(&mut self, tokens: &[i32], start: usize, mut count: usize) -> usize {
        for (position, &token) in (start..).zip(tokens) {
            self.candidates[count] = position as u16;
            count += usize::from(!self.is_special(token));
        }
        count
    }

    #[inline]
    fn is_special(&self, token: i32) -> bool {
        let [cls, sep, mask] = self.specials;
        (token == cls) | (token == sep) | (token == mask)
    }

    /// Fills `positions` with draws from the first `candidates` candidates.
    fn draw(&mut self, candidates: usize, stream: &mut Stream, positions: &mut [i32]) {
        let list = &mut self.candidates[..candidates];
        for (drawn, position) in positions.iter_mut().enumerate() {
            let index = if self.masking == Masking::WithRepeats {
                stream.below(candidates as u32) as usize
            } else {
                let index = drawn + stream.below((candidates - drawn) as u32) as usize;
                list.swap(drawn, index);
                drawn
            };
            *position = i32::from(list[index]);
        }
    }

    fn replace(&self, row: &mut [i32], positions: &[i32], stream: &mut Stream) {
        for &position in positions {
            let token = &mut row[position as usize];
            match self.masking {
                Masking::Tokens | Masking::WholeWord | Masking::Span => *token = self.mask,
                Masking::WithRepeats => {
                    if stream.happens(REPEATS_MASKED) {
                        *token = self.mask;
                    }
                }
                Masking::EightyTenTen => match stream.word() {
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
