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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

    /// The entries that begin a word under these rules, special tokens left out, which all must.
    fn starts(model: &str, rules: &str, entries: &[&str]) -> Option<Vec<bool>> {
        let ids = SPECIAL.iter().chain(entries).zip(0..).map(|(entry, id)| format!("{entry:?}: {id}"));
        let ids = ids.collect::<Vec<_>>().join(", ");
        let vocab = match model {
            "Unigram" => {
                let scores = SPECIAL.iter().chain(entries).map(|entry| format!("[{entry:?}, -1.0]"));
                format!("\"unk_id\": 1, \"vocab\": [{}]", scores.collect::<Vec<_>>().join(", "))
            }
            "BPE" => format!("\"merges\": [], \"vocab\": {{{ids}}}"),
            _ => {
                let pieces = r###""continuing_subword_prefix": "##", "max_input_chars_per_word": 100"###;
                format!("\"unk_token\": \"[UNK]\", {pieces}, \"vocab\": {{{ids}}}")
            }
        };
        let json = format!("{{\"model\": {{\"type\": {model:?}, {vocab}}}{rules}}}");
        let special = crate::format::SpecialTokens { pad: 0, unk: 1, cls: 2, sep: 3, mask: 4 };
        let file = ("tokenizer.json", json.into_bytes());
        let tokenizer =
            Tokenizer::restored(Path::new("tokenizer.json"), file, (None, None), special).unwrap();
        let starts = tokenizer.word_starts()?;
        assert!(starts[1], "[UNK] is a word");
        Some(starts[SPECIAL.len()..].to_vec())
    }

    #[test]
    fn each_kind_of_vocabulary_marks_words_in_its_way() {
        let byte_level = r#", "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}"#;
        let found = starts("BPE", byte_level, &["Ġcat", "s", "cat", "Ġ", ",", "▁x"]);
        assert_eq!(found, Some(vec![true, false, false, true, false, false]));
        let metaspace = r#", "pre_tokenizer":
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#;
        let found = starts("Unigram", metaspace, &["▁cat", "s", "▁", "Ġx"]);
        assert_eq!(found, Some(vec![true, false, true, false]));
        let replace = r#", "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}"#;
        assert_eq!(starts("BPE", replace, &["▁cat", "s"]), Some(vec![true, false]));
        assert_eq!(
            starts("WordPiece", "", &["un", "##able", "#", "Ġx"]),
            Some(vec![true, false, true, true])
        );
        assert_eq!(starts("WordLevel", r#", "pre_tokenizer": {"type": "Whitespace"}"#, &["cat"]), None);
    }
}
