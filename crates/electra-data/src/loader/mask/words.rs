//! Masks of whole words: `whole-word` and `span` masking.
//!
//! A word is a token that begins a word, and the tokens that continue it. Special tokens end words, and after one any
//! token begins a word, since rows may be cut inside words. Words are visited in random order; a word that no
//! longer fits into the row's budget is skipped, as BERT's whole-word masking does.
//!
//! `span` masks n words starting with the visited word, with P(n) proportional to 1/n for n up to 3, like
//! DeBERTa's n-gram masks. DeBERTa has one n-gram per window of words and goes from left to right until the budget is
//! used up; here n-grams can be anywhere, so all parts of a row are masked equally often. An n-gram ends early at a special
//! token, a masked word or the end of the budget.

use crate::philox::Stream;

/// Maximum number of words in an n-gram.
pub(super) const MAX_SPAN: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Continues,
    Begins,
    Separates,
}

/// Masks words of rows of one length. Reuses its lists from row to row.
#[derive(Clone, Debug)]
pub(super) struct WordMasker {
    mask: i32,
    max_words: usize,
    kinds: Vec<Kind>,
    /// The positions of word starts and special tokens, ascending, and the end of the row.
    starts: Vec<u16>,
    order: Vec<u16>,
}

impl WordMasker {
    /// A masker of up to `max_words` adjacent words. `specials` are never masked; the last one is `[MASK]`.
    pub fn new(word_starts: &[bool], specials: [i32; 3], max_words: usize, sequence_length: usize) -> Self {
        let kind = |begins: &bool| if *begins { Kind::Begins } else { Kind::Continues };
        let mut kinds: Vec<Kind> = word_starts.iter().map(kind).collect();
        for special in specials {
            if let Some(kind) = kinds.get_mut(special as usize) {
                *kind = Kind::Separates;
            }
        }
        let starts = vec![0; sequence_length + 1];
        Self { mask: specials[2], max_words, kinds, starts, order: vec![0; sequence_length] }
    }

    /// Masks at most `positions.len()` tokens; returns their number, 0 if no word is short enough.
    pub fn apply(
        &mut self,
        row: &mut [i32],
        stream: &mut Stream,
        positions: &mut [i32],
        originals: &mut [i32],
    ) -> usize {
        let count = self.find_starts(row);
        let mut masked = 0;
        for visit in 0..count {
            if masked == positions.len() {
                break;
            }
            self.order.swap(visit, visit + stream.below((count - visit) as u32) as usize);
            let word = usize::from(self.order[visit]);
            let start = usize::from(self.starts[word]);
            if self.kind(row[start]) == Kind::Separates {
                continue; // a special token, or masked as part of an n-gram
            }
            let num_words = if self.max_words > 1 { draw_length(stream) } else { 1 };
            let end = self.end(row, word, word + num_words, positions.len() - masked);
            for (token, position) in row[start..end].iter_mut().zip(start as i32..) {
                positions[masked] = position;
                originals[masked] = std::mem::replace(token, self.mask);
                masked += 1;
            }
        }
        masked
    }

    fn find_starts(&mut self, row: &[i32]) -> usize {
        let (mut count, mut separated) = (0, true);
        for (position, &token) in row.iter().enumerate() {
            let kind = self.kind(token);
            self.starts[count] = position as u16;
            count += usize::from((kind != Kind::Continues) | separated);
            separated = kind == Kind::Separates;
        }
        self.starts[count] = row.len() as u16;
        for (slot, index) in self.order[..count].iter_mut().zip(0..) {
            *slot = index;
        }
        count
    }

    /// The end of the longest run of words from `first` to before `last` that has at most `budget` tokens,
    /// none of them special or masked; the start of `first` if there is no such run.
    fn end(&self, row: &[i32], first: usize, last: usize, budget: usize) -> usize {
        let start = usize::from(self.starts[first]);
        let mut end = start;
        for word in first..last {
            let is_free = end < row.len() && self.kind(row[end]) != Kind::Separates;
            if !is_free || usize::from(self.starts[word + 1]) - start > budget {
                break;
            }
            end = usize::from(self.starts[word + 1]);
        }
        end
    }

    /// The kind of a token; an id outside the vocabulary is damage, which `verify` reports.
    #[inline]
    fn kind(&self, token: i32) -> Kind {
        self.kinds.get(token as usize).copied().unwrap_or(Kind::Begins)
    }
}

/// A number of words from 1 to [`MAX_SPAN`], with probabilities 6/11, 3/11 and 2/11.
fn draw_length(stream: &mut Stream) -> usize {
    match stream.below(11) {
        0..6 => 1,
        6..9 => 2,
        _ => 3,
    }
}
