//! Writing a complete `tokenizer.json`, and hashing a tokenizer's rules.

use ahash::AHashMap;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, NormalizerWrapper, Tokenizer};

use super::names::five;
use crate::error::{Error, Result};
use crate::format::{SpecialTokens, hash_hex};

/// A `tokenizer.json` that any library can load, with marked special tokens. Has the template `[CLS] text
/// [SEP]` unless the tokenizer has one of its own.
pub(super) fn complete(tokenizer: &Tokenizer, special: SpecialTokens) -> Result<String> {
    let mut tokenizer = tokenizer.clone();
    let known = tokenizer.get_added_tokens_decoder();
    let name_of = |id| tokenizer.id_to_token(id).ok_or_else(|| failed(&format!("id {id} has no name")));
    let (cls, sep) = (name_of(special.cls)?, name_of(special.sep)?);
    let mut tokens = Vec::new();
    for id in five(special) {
        tokens.push(match known.get(&id) {
            Some(token) => token.clone().special(true),
            None => AddedToken::from(name_of(id)?, true),
        });
    }
    tokenizer.add_special_tokens(tokens).map_err(|e| failed(&e))?;
    if tokenizer.get_post_processor().is_none() {
        let template = TemplateProcessing::builder()
            .try_single(format!("{cls} $A {sep}"))
            .and_then(|builder| builder.try_pair(format!("{cls} $A {sep} $B:1 {sep}:1")))
            .map_err(|e| failed(&e))?
            .special_tokens(vec![(cls, special.cls), (sep, special.sep)])
            .build()
            .map_err(|e| failed(&e))?;
        tokenizer.with_post_processor(Some(template));
    }
    let mut text = tokenizer.to_string(true).map_err(|e| failed(&e))?;
    text.push('\n');
    Ok(text)
}

/// A hash of everything that determines the ids of a text: entries, their ids, added tokens that stay whole, and the
/// rules, case included.
///
/// A `vocab.txt` with its settings and every `tokenizer.json` made from it have the same hash.
pub(super) fn content_hash(tokenizer: &Tokenizer, special: SpecialTokens) -> Result<String> {
    let normalizer = match tokenizer.get_normalizer() {
        Some(&NormalizerWrapper::BertNormalizer(mut bert)) => {
            bert.strip_accents.get_or_insert(bert.lowercase);
            Some(bert.into())
        }
        other => other.cloned(),
    };
    let mut entries: Vec<(u32, String)> =
        tokenizer.get_vocab(true).into_iter().map(|(entry, id)| (id, entry)).collect();
    entries.sort_unstable();
    let added: AHashMap<u32, AddedToken> = tokenizer.get_added_tokens_decoder();
    let whole = added.into_iter().filter(|(id, _)| !five(special).contains(id));
    let mut added: Vec<(u32, AddedToken)> = whole.map(|(id, token)| (id, token.special(false))).collect();
    added.sort_unstable_by_key(|&(id, _)| id);
    let model = tokenizer.get_model();
    let rules = (normalizer, tokenizer.get_pre_tokenizer(), model, entries, added);
    let text = serde_json::to_string(&rules).map_err(|e| failed(&e))?;
    Ok(hash_hex(text.as_bytes()))
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("the tokenizer cannot be written as a tokenizer.json: {error}"))
}
