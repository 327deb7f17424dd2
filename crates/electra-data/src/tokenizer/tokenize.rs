//! Encoding text.
//!
//! Encoding never adds special tokens, and their names in text are ordinary text; other added tokens stay whole.
//! `wordpiece` implements BERT's tokenizer, the `tokenizers` crate all others.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};

use super::names::five;
use super::vocab_txt::{Case, guarded};
use super::wordpiece::{FastWordPiece, WordPieceEncoder};
use crate::error::{Error, Result};
use crate::format::SpecialTokens;
use crate::threads::on_all_cores;

/// Text to ids. The same file and settings give the same ids everywhere.
pub struct Tokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    /// Encodes text instead of `inner`, if `inner` would turn names of special tokens into these tokens.
    pub(super) text: Option<tokenizers::Tokenizer>,
    /// The fast path, or the reason for having none.
    pub(super) fast: std::result::Result<FastWordPiece, &'static str>,
    pub(super) path: PathBuf,
    pub(super) file_name: &'static str,
    pub(super) file: Vec<u8>,
    pub(super) case: Option<Case>,
    pub(super) special_tokens: SpecialTokens,
    pub(super) vocab_size: u32,
    pub(super) hash: u64,
}

/// The pieces of a text in order, and their positions in it. All fields have one entry per piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    /// The ids that [`Tokenizer::encode_batch`] gives.
    pub ids: Vec<u32>,
    /// The first character of each piece and the character after its last, as code points of the original text.
    pub offsets: Vec<[u32; 2]>,
    /// The number of each piece's word (pre-token). Ascending from 0; a word without pieces leaves a gap.
    pub words: Vec<u32>,
}

impl Tokenizer {
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, fast: self.fast.as_ref().ok().map(FastWordPiece::encoder) }
    }

    pub fn encode_batch(&self, texts: &[impl AsRef<str> + Sync]) -> Result<Vec<Vec<u32>>> {
        let encode = |encoder: &mut Encoder<'_>, text: &_| {
            let mut ids = Vec::new();
            encoder.encode_into(AsRef::<str>::as_ref(text), &mut ids)?;
            Ok(ids)
        };
        on_all_cores(|| texts.par_iter().map_init(|| self.encoder(), encode).collect())?
    }

    /// The pieces of each text with their offsets, computed on all cores.
    ///
    /// Offsets refer to the original text, before normalization: the piece `cafe` of `Café` has 0 and 4. The `tokenizers`
    /// crate computes them, so this is slower than [`Tokenizer::encode_batch`].
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
            // Only special tokens have no word, and encoding adds none.
            words: words.map(|word| word.unwrap_or_default()).collect(),
        })
    }

    /// The ids that the `tokenizers` crate gives a text, as the reference for [`Encoder`].
    pub fn encode_by_crate(&self, text: &str) -> Result<Vec<u32>> {
        let encode = || self.for_text().encode_fast(text, false).map_err(|error| failed_on(text, &error));
        Ok(guarded(&self.path, encode)?.get_ids().to_vec())
    }

    /// Text for ids, approximately the original.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let failed = |error| Error::Input(format!("cannot decode: {error}"));
        guarded(&self.path, || self.inner.decode(ids, false).map_err(failed))
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    pub fn special_tokens(&self) -> SpecialTokens {
        self.special_tokens
    }

    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// A hash of the file and the settings, stored in a corpus.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_fast(&self) -> bool {
        self.fast.is_ok()
    }

    /// The reason for using the `tokenizers` crate, if it is used: a clause such as "its model is not WordPiece".
    pub fn fallback_reason(&self) -> Option<&'static str> {
        self.fast.as_ref().err().copied()
    }

    /// The parts of a text that become unknown tokens, as they are written in it.
    pub(crate) fn unknown_words(&self, text: &str) -> Result<Vec<String>> {
        let encode = || self.for_text().encode(text, false).map_err(|error| failed_on(text, &error));
        let encoding = guarded(&self.path, encode)?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let unknown = tokens.filter(|&(&id, _)| id == self.special_tokens.unk);
        Ok(unknown.filter_map(|(_, &(start, end))| text.get(start..end)).map(str::to_owned).collect())
    }

    /// The settings in effect: lowercase and strip_accents (`None` for a `tokenizer.json`).
    pub fn settings(&self) -> (Option<bool>, Option<bool>) {
        (self.case.map(|case| case.lowercase), self.case.map(|case| case.strip_accents))
    }

    /// The name and bytes under which a corpus or a run keeps a copy of this tokenizer.
    pub fn file(&self) -> (&'static str, &[u8]) {
        (self.file_name, &self.file)
    }

    /// Whether text may be cut after whitespace without changing ids: with BERT's rules, if no added token has whitespace.
    pub(crate) fn splits_at_whitespace(&self) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        matches!(self.inner.get_normalizer(), Some(NormalizerWrapper::BertNormalizer(_)))
            && matches!(self.inner.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_)))
            && added.iter().all(|(id, token)| {
                // Normalization puts spaces around some characters outside ASCII.
                five(self.special_tokens).contains(id)
                    || !token.content.contains(char::is_whitespace)
                        && (!token.normalized || token.content.is_ascii())
            })
    }

    pub(super) fn for_text(&self) -> &tokenizers::Tokenizer {
        self.text.as_ref().unwrap_or(&self.inner)
    }
}

pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    fast: Option<WordPieceEncoder<'a>>,
}

impl Encoder<'_> {
    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &mut self.fast {
            Some(fast) if !fast.has_added_tokens(text) => fast.encode_into(text, ids)?,
            _ => ids.extend(self.tokenizer.encode_by_crate(text)?),
        }
        Ok(())
    }
}

fn failed_on(text: &str, error: &dyn std::fmt::Display) -> Error {
    let start: String = text.chars().take(40).collect();
    Error::Input(format!("the tokenizer fails on the text that begins {start:?}: {error}"))
}

impl Tokenizer {
    /// For each id, whether it begins a word; `None` if the vocabulary does not mark words.
    ///
    /// Added tokens, including [UNK], and ids without an entry are separate words. If the vocabulary marks
    /// starts, tokens that follow a word without a space (punctuation) belong to it; with byte-level BPE that adds no
    /// space before a text, the first word of the next line does too, because it has no mark.
    pub fn word_starts(&self) -> Option<Vec<bool>> {
        let (mark, begins) = match self.continuation_prefix() {
            Some(prefix) => (prefix, false),
            None => (self.word_start_mark()?, true),
        };
        let added = self.inner.get_added_tokens_decoder();
        let unknown = self.special_tokens().unk;
        let begins_word = |id| match self.id_to_token(id) {
            Some(token) if id != unknown && !added.contains_key(&id) => token.starts_with(mark) == begins,
            _ => true,
        };
        Some((0..self.vocab_size()).map(begins_word).collect())
    }

    /// The prefix of tokens that continue a word, if the model has one.
    fn continuation_prefix(&self) -> Option<&str> {
        let prefix = match self.inner.get_model() {
            ModelWrapper::WordPiece(model) => Some(&model.continuing_subword_prefix),
            ModelWrapper::BPE(model) => model.continuing_subword_prefix.as_ref(),
            _ => None,
        };
        prefix.map(String::as_str).filter(|prefix| !prefix.is_empty())
    }

    /// The mark that replaces a space before a word, if the rules keep the space.
    fn word_start_mark(&self) -> Option<&'static str> {
        let rules = (self.inner.get_normalizer(), self.inner.get_pre_tokenizer());
        let rules = serde_json::to_string(&rules).unwrap_or_default();
        [("\"ByteLevel\"", "Ġ"), ("▁", "▁")]
            .into_iter()
            .find_map(|(rule, mark)| rules.contains(rule).then_some(mark))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(vocab: &str) -> Tokenizer {
        let names = Default::default();
        Tokenizer::from_vocab(Path::new("vocab.txt"), vocab.into(), (None, None), &names).unwrap()
    }

    #[test]
    fn line_ends_and_byte_order_marks_are_ignored() {
        let vocab = "<pad>\n<unk>\n<s>\n</s>\n<cls>\n<sep>\n<mask>\na\n";
        for same in [vocab.to_owned(), vocab.replace('\n', "\r\n"), format!("\u{feff}{vocab}")] {
            let (same, plain) = (open(&same), open(vocab));
            assert_eq!(same.special_tokens(), SpecialTokens { pad: 0, unk: 1, cls: 4, sep: 5, mask: 6 });
            assert_eq!((same.hash(), same.content_hash().ok()), (plain.hash(), plain.content_hash().ok()));
            assert_eq!(same.encode_batch(&["a x"]).unwrap(), [[7, 1]]);
            assert!(same.is_fast());
        }
        assert_ne!(open(vocab).hash(), open(&vocab.replace("\na", "\nA")).hash());
    }
}
