//! Encoding with the offsets of each piece in its text, by the `tokenizers` crate. Slower than
//! `Tokenizer::encode_batch`, and meant for texts whose pieces are labeled or shown to a reader.

use rayon::prelude::*;

use super::tokenize::{Tokenizer, failed_on};
use super::vocab_txt::guarded;
use crate::error::Result;
use crate::threads::on_all_cores;

/// The pieces of a text in order, and their positions in it. All fields have one entry per piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    /// The ids that [`Tokenizer::encode_batch`] gives.
    pub ids: Vec<u32>,
    /// The first character of each piece and the one after its last, as code points of the original text.
    pub offsets: Vec<[u32; 2]>,
    /// The word (pre-token) that each piece is part of. Ascending from 0; a word without pieces leaves a gap.
    pub words: Vec<u32>,
}

impl Tokenizer {
    /// The pieces of each text with their offsets, computed on all cores.
    ///
    /// Offsets are of the text as given, before it is normalized: the piece `cafe` of `Café` has 0 and 4.
    pub fn encode_batch_with_offsets(&self, texts: &[impl AsRef<str> + Sync]) -> Result<Vec<Pieces>> {
        on_all_cores(|| texts.par_iter().map(|text| self.pieces(text.as_ref())).collect())?
    }

    fn pieces(&self, text: &str) -> Result<Pieces> {
        let encode = || self.for_text().encode_char_offsets(text, false).map_err(|e| failed_on(text, &e));
        let encoding = guarded(&self.path, encode)?;
        let words = encoding.get_word_ids().iter();
        Ok(Pieces {
            ids: encoding.get_ids().to_vec(),
            offsets: encoding.get_offsets().iter().map(|&(start, end)| [start as u32, end as u32]).collect(),
            // Only special tokens have no word, and none are added.
            words: words.map(|word| word.unwrap_or_default()).collect(),
        })
    }
}
