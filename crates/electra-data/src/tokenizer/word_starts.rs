//! Which vocabulary entries begin a word, for masks of whole words, cuts between words and tokens per word.
//!
//! Vocabularies mark it in two ways. WordPiece, and BPE with such a setting, put a prefix (`##`) before what
//! continues a word; byte-level BPE and SentencePiece put one (`Ġ`, `▁`) before what begins one.

use tokenizers::ModelWrapper;

use super::tokenize::Tokenizer;

impl Tokenizer {
    /// For each id, whether it begins a word; `None` if the vocabulary does not mark words.
    ///
    /// Added tokens, [UNK] among them, and ids without an entry are words of their own. Where starts are
    /// marked, what follows a word without a space (punctuation) belongs to it; with byte-level BPE that adds no
    /// space before a text, so does the first word of the next line, which has no mark.
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

    /// The mark into which the rules turn a space before a word, if they keep it.
    fn word_start_mark(&self) -> Option<&'static str> {
        let rules = (self.inner.get_normalizer(), self.inner.get_pre_tokenizer());
        let rules = serde_json::to_string(&rules).unwrap_or_default();
        [("\"ByteLevel\"", "Ġ"), ("▁", "▁")]
            .into_iter()
            .find_map(|(rule, mark)| rules.contains(rule).then_some(mark))
    }
}
