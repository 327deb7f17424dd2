//! The rule for names of special tokens in text: a text never yields pad, cls, sep or mask, nor unk by its name; every
//! other added token, special or not, stays whole.
//!
//! A tokenizer for text is a copy in which these five tokens have names that occur in no text. So their real names are split
//! like other words, and are unknown only if the vocabulary has no pieces for them.

use serde_json::Value;
use tokenizers::{AddedToken, AddedVocabulary, Model as _, ModelWrapper, PreTokenizerWrapper, Tokenizer};

use crate::error::{Error, Result};
use crate::format::SpecialTokens;

/// Noncharacters, which Unicode reserves for use within a program.
const HIDDEN: &str = "\u{10ffff}\u{10fffe}\u{10ffff}";

pub(super) fn five(special: SpecialTokens) -> [u32; 5] {
    [special.pad, special.unk, special.cls, special.sep, special.mask]
}

/// The copy that encodes text; `None` if `tokenizer` itself follows the rule.
pub(super) fn for_text(tokenizer: &mut Tokenizer, special: SpecialTokens) -> Result<Option<Tokenizer>> {
    let five = five(special);
    let names: Vec<String> = five.iter().filter_map(|&id| tokenizer.id_to_token(id)).collect();
    let mut added: Vec<(u32, AddedToken)> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    // BERT's splitter never leaves a punctuation character and another one in the same piece.
    let split = matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_)))
        && names.iter().all(|name| {
            name.chars().count() > 1
                && !name.starts_with("##")
                && name.contains(|c: char| c.is_ascii_punctuation())
        });
    if split && added.iter().all(|(id, token)| five.contains(id) && token.special) {
        tokenizer.set_encode_special_tokens(true);
        return Ok(None);
    }
    added.sort_unstable_by_key(|&(id, _)| id);
    let tokens = added.iter().map(|(id, token)| match five.contains(id) {
        true => AddedToken::from(hidden(&token.content), true),
        false => token.clone().special(false),
    });
    let mut text = tokenizer.clone();
    let model = without(tokenizer.get_model(), &names).map_err(|error| failed(&error))?;
    text.with_model(model).with_added_vocabulary(AddedVocabulary::new());
    text.add_tokens(tokens).map_err(|error| failed(&error))?;
    text.set_encode_special_tokens(true);
    let moved =
        added.iter().find(|(id, token)| !five.contains(id) && text.token_to_id(&token.content) != Some(*id));
    match moved {
        Some((id, token)) => Err(failed(&format!("{:?} would lose its id {id}", token.content))),
        None => Ok(Some(text)),
    }
}

/// A model that never matches these entries in text. All ids stay.
fn without(model: &ModelWrapper, names: &[String]) -> serde_json::Result<ModelWrapper> {
    if names.iter().all(|name| model.token_to_id(name).is_none()) {
        return Ok(model.clone());
    }
    let mut value = serde_json::to_value(model)?;
    let is_name = |value: &Value| value.as_str().is_some_and(|text| names.iter().any(|name| name == text));
    let hide = |value: &mut Value| {
        if is_name(value) {
            *value = hidden(value.as_str().unwrap_or_default()).into();
        }
    };
    match &mut value["vocab"] {
        Value::Object(vocab) => {
            for name in names {
                vocab.remove(name).map(|id| vocab.insert(hidden(name), id));
            }
        }
        Value::Array(pieces) => pieces.iter_mut().for_each(|piece| hide(&mut piece[0])),
        _ => {}
    }
    if let Some(unknown) = value.get_mut("unk_token") {
        hide(unknown);
    }
    let prefix = value["continuing_subword_prefix"].as_str().unwrap_or_default().to_owned();
    if let Some(merges) = value.get_mut("merges").and_then(Value::as_array_mut) {
        merges.retain(|merge| {
            let [first, second] = [0, 1].map(|at| merge[at].as_str().unwrap_or_default());
            let merged = format!("{first}{}", second.strip_prefix(prefix.as_str()).unwrap_or(second));
            !is_name(&merge[0]) && !is_name(&merge[1]) && !names.contains(&merged)
        });
    }
    serde_json::from_value(value)
}

fn hidden(name: &str) -> String {
    format!("{HIDDEN}{name}")
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("the tokenizer's added tokens cannot be separated from its special tokens: {error}"))
}
