//! `vocab.txt`: its entries, BERT's rules, and the case, which the file itself does not store.
//!
//! The caller sets the case, or it is inferred from the entries.

use std::path::Path;

use ahash::AHashMap;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use crate::error::{Error, Result};
use crate::threads::caught;

pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub lowercase: bool,
    pub strip_accents: bool,
}

pub(super) struct Vocabulary<'a> {
    pub path: &'a Path,
    pub entries: Vec<&'a str>,
    /// The last of equal entries counts, as in BERT's code.
    pub ids: AHashMap<String, u32>,
}

impl<'a> Vocabulary<'a> {
    /// The lines of a `vocab.txt` without trailing whitespace. The index of a line is its id.
    pub fn new(path: &'a Path, file: &'a [u8]) -> Result<Self> {
        let text = std::str::from_utf8(file).map_err(|error| {
            let at = error.valid_up_to();
            Error::at(path, format!("invalid UTF-8 at byte {at}; a vocabulary is UTF-8 text"))
        })?;
        let text = text.strip_suffix('\n').unwrap_or(text);
        let entries: Vec<&str> = text.split('\n').map(str::trim_end).collect();
        let ids = entries.iter().zip(0..).map(|(entry, id)| ((*entry).to_owned(), id)).collect();
        Ok(Self { path, entries, ids })
    }

    pub fn tokenizer(&self, case: Case, unknown: u32) -> Result<Tokenizer> {
        let failed = |error: tokenizers::Error| unusable(self.path, &error);
        let builder =
            WordPiece::builder().vocab(self.ids.clone()).unk_token(self.entries[unknown as usize].to_owned());
        let mut tokenizer = Tokenizer::new(builder.build().map_err(failed)?);
        let normalizer = BertNormalizer::new(true, true, Some(case.strip_accents), case.lowercase);
        tokenizer.with_normalizer(Some(normalizer)).map_err(failed)?;
        tokenizer.with_pre_tokenizer(Some(BertPreTokenizer)).with_decoder(Some(WordPieceDecoder::default()));
        Ok(tokenizer)
    }

    /// Describes the difference if a `tokenizer.json` has other entries, or the same entries with other ids.
    pub fn disagreement(&self, json: &Path, tokenizer: &Tokenizer) -> Option<String> {
        let added = tokenizer.get_added_tokens_decoder();
        let mut here: Vec<(&String, u32)> = self.ids.iter().map(|(entry, &id)| (entry, id)).collect();
        here.sort_unstable_by_key(|&(_, id)| id);
        let moved = here
            .into_iter()
            .find(|(entry, id)| !entry.is_empty() && tokenizer.token_to_id(entry) != Some(*id));
        let there = tokenizer.get_vocab(false).into_iter();
        let extra = there.filter(|(entry, id)| {
            !entry.trim_end().is_empty()
                && !added.contains_key(id)
                && !self.ids.contains_key(entry.trim_end())
        });
        let difference = match (moved, extra.min_by_key(|&(_, id)| id)) {
            (Some((entry, id)), _) => {
                let other = tokenizer.token_to_id(entry).map_or("none".to_owned(), |id| id.to_string());
                format!("{entry:?} has id {id} in the first, {other} in the second")
            }
            (None, Some((entry, id))) => {
                format!("the first lacks {entry:?}, which has id {id} in the second")
            }
            (None, None) => return None,
        };
        Some(format!(
            "{} and {} disagree: {difference}; keep the file that the model was trained with and move the other out of the folder",
            self.path.display(),
            json.display()
        ))
    }

    /// Lowercased unless that would change an ordinary entry; accents are then stripped unless that would.
    pub fn inferred_case(&self) -> Result<Case> {
        let ordinary: Vec<&str> = self.entries.iter().copied().filter(|entry| !is_bracketed(entry)).collect();
        let text = ordinary.join("\n");
        let leaves_alone = |strip_accents, lowercase| {
            let mut changed = NormalizedString::from(text.as_str());
            let normalizer = BertNormalizer::new(false, false, Some(strip_accents), lowercase);
            normalizer.normalize(&mut changed).map_err(|error| unusable(self.path, &error))?;
            Ok(changed.get() == text)
        };
        let lowercase = leaves_alone(false, true)?;
        Ok(Case { lowercase, strip_accents: lowercase && leaves_alone(true, false)? })
    }

    /// Whether accents are stripped if only `lowercase` is set: inferred from the entries, or by BERT's rule.
    pub fn strips_accents(&self, lowercase: bool) -> Result<bool> {
        let guess = self.inferred_case()?;
        Ok(if guess.lowercase == lowercase { guess.strip_accents } else { lowercase })
    }
}

fn is_bracketed(entry: &str) -> bool {
    entry.starts_with('[') && entry.ends_with(']')
}

/// Turns a panic into an error: the `tokenizers` crate panics on some files, when it opens them or at the first text.
pub(super) fn guarded<T>(path: &Path, run: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(run)
        .unwrap_or_else(|panic| Err(unusable(path, &format!("the tokenizers library failed: {panic}"))))
}

pub(super) fn unusable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::at(path, format!("not a usable tokenizer ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_like_the_crate() {
        let file = "[UNK]\nthe \ncat\r\n\n\u{3000}\na\u{2028}b\nx\u{1c}\ndog\u{a0}".as_bytes();
        let vocabulary = Vocabulary::new(Path::new("vocab.txt"), file).unwrap();
        assert_eq!(vocabulary.entries, ["[UNK]", "the", "cat", "", "", "a\u{2028}b", "x\u{1c}", "dog"]);
        assert_eq!(vocabulary.ids, WordPiece::read_bytes(file).unwrap());
    }

    #[test]
    fn case_is_inferred_from_entries() {
        let guess = |words: &[&str]| {
            let file = words.join("\n");
            let case =
                Vocabulary::new(Path::new("vocab.txt"), file.as_bytes()).unwrap().inferred_case().unwrap();
            (case.lowercase, case.strip_accents)
        };
        for word in ["A", "Ä", "##É", "İ"] {
            assert_eq!(guess(&["a", word, "[CLS]"]), (false, false), "{word}");
        }
        for word in ["é", "##é", "が", "##が", "한", "\u{301}", "ที่", "हूँ"] {
            assert_eq!(guess(&["a", word, "[CLS]"]), (true, false), "{word}");
        }
        // ℝ is a capital without a small letter; the accents of the last letters cannot be stripped.
        assert_eq!(guess(&["a", "か", "\u{1112}", "ℝ", "ß", "ł", "##ø", "東"]), (true, true));
    }
}
