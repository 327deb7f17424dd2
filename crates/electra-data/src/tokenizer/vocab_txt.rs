//! `vocab.txt`: its entries, BERT's rules, and the case, which the file itself does not store.
//!
//! The case is read from a file beside it, written by `vocab`, Hugging Face or `prepare`, and guessed from
//! the entries only if there is none.

use std::path::Path;

use ahash::AHashMap;
use serde_json::Value;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, Tokenizer};

use super::tokenizer_json::content_hash;
use crate::error::{Error, Result};
use crate::format::Manifest;

pub(super) const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The settings of BERT's normalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub lowercase: bool,
    pub strip_accents: bool,
}

/// A WordPiece vocabulary, one entry per line.
pub(super) struct Vocabulary<'a> {
    pub path: &'a Path,
    /// In the order of their ids.
    pub entries: Vec<&'a str>,
    /// The last of equal entries counts, as in BERT's own code.
    pub ids: AHashMap<String, u32>,
    /// The entry for unknown words.
    pub unknown: &'a str,
}

/// The lines of a `vocab.txt` without trailing whitespace. The index of a line is its id.
pub(super) fn entries<'a>(path: &Path, file: &'a [u8]) -> Result<Vec<&'a str>> {
    let text = std::str::from_utf8(file).map_err(|error| {
        let (path, at) = (path.display(), error.valid_up_to());
        Error::Input(format!("{path}: invalid UTF-8 at byte {at}; a vocabulary is UTF-8 text"))
    })?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    Ok(text.split('\n').map(str::trim_end).collect())
}

impl Vocabulary<'_> {
    /// The tokenizer that follows BERT's rules.
    pub fn tokenizer(&self, case: Case) -> Result<Tokenizer> {
        let failed = |error: tokenizers::Error| unusable(self.path, &error);
        let builder = WordPiece::builder().vocab(self.ids.clone()).unk_token(self.unknown.to_owned());
        let mut tokenizer = Tokenizer::new(builder.build().map_err(failed)?);
        let normalizer = BertNormalizer::new(true, true, Some(case.strip_accents), case.lowercase);
        tokenizer.with_normalizer(Some(normalizer)).map_err(failed)?;
        tokenizer.with_pre_tokenizer(Some(BertPreTokenizer)).with_decoder(Some(WordPieceDecoder::default()));
        Ok(tokenizer)
    }

    /// The case stored in another file of the same folder, if there is one.
    pub fn case_from_folder(&self) -> Result<Option<Case>> {
        if let Some(case) = self.case_of_tokenizer_json()? {
            return Ok(Some(case));
        }
        if let Some(case) = self.case_of_tokenizer_config()? {
            return Ok(Some(case));
        }
        Ok(self.case_of_corpus())
    }

    /// The case of a `tokenizer.json` with the same entries at the same ids.
    fn case_of_tokenizer_json(&self) -> Result<Option<Case>> {
        let path = self.path.with_file_name("tokenizer.json");
        let Some(file) = read_if_there(&path)? else { return Ok(None) };
        let tokenizer = Tokenizer::from_bytes(&file).map_err(|e| unusable(&path, &e))?;
        let entries = tokenizer.get_vocab(true);
        if entries.len() != self.ids.len()
            || entries.iter().any(|(entry, id)| self.ids.get(entry) != Some(id))
        {
            return Ok(None);
        }
        if let Some(NormalizerWrapper::BertNormalizer(bert)) = tokenizer.get_normalizer() {
            let strip_accents = bert.strip_accents.unwrap_or(bert.lowercase);
            let case = Case { lowercase: bert.lowercase, strip_accents };
            if content_hash(&self.tokenizer(case)?)? == content_hash(&tokenizer)? {
                return Ok(Some(case));
            }
        }
        let (json, path) = (path.display(), self.path.display());
        Err(Error::Input(format!(
            "{json}: has the entries of {path} but rules that a vocab.txt cannot have; open {json} itself, \
             or say whether {path} is cased (--cased or --uncased)"
        )))
    }

    /// The case of the `tokenizer_config.json` in a Hugging Face folder.
    fn case_of_tokenizer_config(&self) -> Result<Option<Case>> {
        let path = self.path.with_file_name("tokenizer_config.json");
        let Some(file) = read_if_there(&path)? else { return Ok(None) };
        let config: Value = serde_json::from_slice(&file).map_err(|e| unusable(&path, &e))?;
        let strip_accents = config["strip_accents"].as_bool();
        Ok(config["do_lower_case"]
            .as_bool()
            .map(|lowercase| Case { lowercase, strip_accents: strip_accents.unwrap_or(lowercase) }))
    }

    /// The case in the manifest of the corpus that this file belongs to. Errors are ignored: other programs
    /// write a manifest.json too.
    fn case_of_corpus(&self) -> Option<Case> {
        let manifest = Manifest::read(self.path.parent()?).ok()?.tokenizer;
        let is_its_own = self.path.file_name()? == manifest.file.as_str();
        let case = Case { lowercase: manifest.lowercase?, strip_accents: manifest.strip_accents? };
        is_its_own.then_some(case)
    }

    /// Lowercased unless that would change an ordinary entry; accents are then stripped unless that would.
    pub fn guessed_case(&self) -> Result<Case> {
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

    /// The case if only `lowercase` is given: accents as the folder or the entries tell, or by BERT's rule.
    pub fn case_with(&self, lowercase: bool) -> Result<Case> {
        let known = self.case_from_folder().unwrap_or(None).filter(|case| case.lowercase == lowercase);
        let case = known.map_or_else(|| self.guessed_case(), Ok)?;
        let by_bert = Case { lowercase, strip_accents: lowercase };
        Ok(if case.lowercase == lowercase { case } else { by_bert })
    }
}

fn is_bracketed(entry: &str) -> bool {
    entry.starts_with('[') && entry.ends_with(']')
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path, error)),
    }
}

/// The error for a file that is not a usable tokenizer.
pub(super) fn unusable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("{}: not a usable tokenizer ({error})", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    const CASED: Case = Case { lowercase: false, strip_accents: false };
    const UNCASED: Case = Case { lowercase: true, strip_accents: true };

    fn vocabulary<'a>(path: &'a Path, words: &[&'a str]) -> Vocabulary<'a> {
        let entries = [&SPECIAL, words].concat();
        let ids = entries.iter().zip(0..).map(|(entry, id)| ((*entry).to_owned(), id)).collect();
        Vocabulary { path, entries, ids, unknown: "[UNK]" }
    }

    #[test]
    fn lines_are_read_as_by_the_crate() {
        let file = "[UNK]\nthe \ncat\r\n\n\u{3000}\na\u{2028}b\nx\u{1c}\ndog\u{a0}".as_bytes();
        let lines = entries(Path::new("vocab.txt"), file).unwrap();
        assert_eq!(lines, ["[UNK]", "the", "cat", "", "", "a\u{2028}b", "x\u{1c}", "dog"]);
        let theirs = WordPiece::read_bytes(file).unwrap();
        let ours: AHashMap<String, u32> = lines.into_iter().map(str::to_owned).zip(0..).collect();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn the_case_is_guessed_from_what_the_rules_would_change() {
        let guess = |words: &[&str]| vocabulary(Path::new("vocab.txt"), words).guessed_case().unwrap();
        for word in ["A", "Ä", "##É", "İ"] {
            assert_eq!(guess(&["a", word, "b"]), CASED, "{word}");
        }
        for word in ["é", "##é", "が", "##が", "한", "\u{301}", "ที่", "हूँ"] {
            assert_eq!(guess(&["a", word, "b"]), Case { lowercase: true, strip_accents: false }, "{word}");
        }
        // ℝ is a capital without a small letter; the accents of the last ones cannot be taken off.
        assert_eq!(guess(&["a", "か", "\u{1112}", "ℝ", "ß", "ł", "##ø", "東"]), UNCASED);
    }

    #[test]
    fn another_file_of_the_folder_stores_the_case() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vocab.txt");
        let here = vocabulary(&path, &["a"]);
        let leave = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let json_of = |words: &[&str], case| vocabulary(&path, words).tokenizer(case).unwrap();
        assert_eq!(here.case_from_folder().unwrap(), None);
        leave("manifest.json", "{}");
        assert_eq!(here.case_from_folder().unwrap(), None);
        leave("tokenizer_config.json", r#"{"do_lower_case": true, "strip_accents": false}"#);
        let half = Case { lowercase: true, strip_accents: false };
        assert_eq!(here.case_from_folder().unwrap(), Some(half));
        leave("tokenizer.json", &json_of(&["b"], CASED).to_string(false).unwrap());
        assert_eq!(here.case_from_folder().unwrap(), Some(half), "entries of another vocabulary");
        for case in [CASED, UNCASED, half] {
            leave("tokenizer.json", &json_of(&["a"], case).to_string(false).unwrap());
            assert_eq!(here.case_from_folder().unwrap(), Some(case));
        }
        let mut other = json_of(&["a"], CASED);
        other.with_pre_tokenizer(None::<BertPreTokenizer>);
        leave("tokenizer.json", &other.to_string(false).unwrap());
        let error = here.case_from_folder().unwrap_err().to_string();
        assert!(error.contains("tokenizer.json: has the entries of"), "{error}");
        leave("tokenizer.json", "{");
        assert!(here.case_from_folder().unwrap_err().to_string().contains("tokenizer.json: not a usable"));
    }
}
