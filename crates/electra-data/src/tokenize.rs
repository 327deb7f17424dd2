//! Lines to ids. `vocab.txt` means BERT's tokenizer, `tokenizer.json` whatever it describes.
//!
//! Special tokens are never added, and their names in text are text like any other. BERT's rules are
//! followed by this crate's own `wordpiece`, all others by the `tokenizers` crate.

use std::path::Path;

use rayon::prelude::*;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Error, Result};
use crate::manifest::SpecialTokens;
use crate::wordpiece::{self, FastWordPiece};

/// Turns text into ids. The same file and settings give the same ids everywhere.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The fast path, or why there is none.
    fast: std::result::Result<FastWordPiece, &'static str>,
    file_name: &'static str,
    file: Vec<u8>,
    lowercase: Option<bool>,
    strip_accents: Option<bool>,
    special_tokens: SpecialTokens,
    vocab_size: u32,
    hash: u64,
}

impl Tokenizer {
    /// Opens a `vocab.txt` or a `tokenizer.json` (by its extension).
    ///
    /// `lowercase` and `strip_accents` are for `vocab.txt` only. Left out, a vocabulary is cased if
    /// lowercasing would change an ordinary entry, and accents are stripped if text is lowercased.
    pub fn from_file(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<Self> {
        let file = std::fs::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound {
                path: path.to_owned(),
                hint: "; `electra-fast vocab` trains a vocabulary".to_owned(),
            },
            _ => Error::io(path, error),
        })?;
        if path.extension().is_some_and(|extension| extension == "json") {
            if lowercase.is_some() || strip_accents.is_some() {
                let path = path.display();
                return Err(Error::Input(format!(
                    "{path}: lowercase and strip_accents belong to vocab.txt; a tokenizer.json has its own"
                )));
            }
            return Self::from_json(path, file);
        }
        Self::from_vocab(path, file, lowercase, strip_accents)
    }

    fn from_vocab(
        path: &Path,
        file: Vec<u8>,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
        let entries = vocab_entries(path, &file)?;
        // Not `is_uppercase`: BERT's uncased vocabulary has ℝ, a capital that has no small letter.
        let has_capital = |entry: &str| entry.chars().any(|c| !c.to_lowercase().eq([c]));
        let cased = || entries.iter().any(|entry| !is_bracketed(entry) && has_capital(entry));
        let lowercase = lowercase.unwrap_or_else(|| !cased());
        let strip_accents = strip_accents.unwrap_or(lowercase);
        let ids: ahash::AHashMap<String, u32> =
            entries.iter().zip(0..).map(|(entry, id)| ((*entry).to_owned(), id)).collect();
        let special_tokens = find_special(path, |name| ids.get(name).copied())?;
        let vocab_size = entries.len() as u32;
        let mut hash = Xxh3::new();
        hash.update(format!("vocab.txt {lowercase} {strip_accents}").as_bytes());
        for entry in &entries {
            hash.update(b"\n");
            hash.update(entry.as_bytes());
        }
        let model = WordPiece::builder().vocab(ids).build().map_err(|e| unusable(path, &e))?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner
            .with_normalizer(Some(BertNormalizer::new(true, true, Some(strip_accents), lowercase)))
            .map_err(|e| unusable(path, &e))?;
        inner.with_pre_tokenizer(Some(BertPreTokenizer)).with_decoder(Some(WordPieceDecoder::default()));
        let fast = FastWordPiece::new(&inner);
        Ok(Self {
            fast,
            inner,
            file_name: "vocab.txt",
            lowercase: Some(lowercase),
            strip_accents: Some(strip_accents),
            special_tokens,
            vocab_size,
            hash: hash.digest(),
            file,
        })
    }

    fn from_json(path: &Path, file: Vec<u8>) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(&file).map_err(|e| unusable(path, &e))?;
        // Either of these would silently drop or invent tokens.
        inner.with_truncation(None).map_err(|e| unusable(path, &e))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(true);
        let special_tokens = find_special(path, |name| inner.token_to_id(name))?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |id| id + 1);
        let mut hash = Xxh3::new();
        hash.update(b"tokenizer.json\n");
        hash.update(&file);
        let fast = FastWordPiece::new(&inner);
        Ok(Self {
            fast,
            inner,
            file_name: "tokenizer.json",
            lowercase: None,
            strip_accents: None,
            special_tokens,
            vocab_size,
            hash: hash.digest(),
            file,
        })
    }

    /// Something to encode many texts with on one thread.
    pub fn encoder(&self) -> Encoder<'_> {
        match &self.fast {
            Ok(fast) => Encoder(Way::Fast(fast.encoder())),
            Err(_) => Encoder(Way::Crate(self)),
        }
    }

    /// The ids of each text, over all cores.
    pub fn encode_batch(&self, texts: &[impl AsRef<str> + Sync]) -> Result<Vec<Vec<u32>>> {
        texts
            .par_iter()
            .map_init(
                || self.encoder(),
                |encoder, text| {
                    let mut ids = Vec::new();
                    encoder.encode_into(text.as_ref(), &mut ids)?;
                    Ok(ids)
                },
            )
            .collect()
    }

    /// The ids that the `tokenizers` crate gives a text, whichever way serves: for comparison.
    pub fn encode_by_crate(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| failed_on(text, &error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text that reads like what the ids came from.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| Error::Input(format!("cannot decode: {error}")))
    }

    /// The entry of the vocabulary with this id.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Ids of the five special tokens.
    pub fn special_tokens(&self) -> SpecialTokens {
        self.special_tokens
    }

    /// Every id is below this.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Identifies the vocabulary and the settings.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether ids come from this crate's own fast path rather than the `tokenizers` crate.
    pub fn is_fast(&self) -> bool {
        self.fast.is_ok()
    }

    /// Why the `tokenizers` crate has to serve, if it does: a clause such as "its model is not WordPiece".
    pub fn why_not_fast(&self) -> Option<&'static str> {
        self.fast.as_ref().err().copied()
    }

    /// What marks tokens that go on with a word, where the model has such a mark.
    pub(crate) fn continuation_prefix(&self) -> Option<&str> {
        let prefix = match self.inner.get_model() {
            ModelWrapper::WordPiece(model) => Some(&model.continuing_subword_prefix),
            ModelWrapper::BPE(model) => model.continuing_subword_prefix.as_ref(),
            _ => None,
        };
        prefix.map(String::as_str).filter(|prefix| !prefix.is_empty())
    }

    /// The parts of a text that become unknown tokens, as they stand in it.
    pub(crate) fn unknown_words(&self, text: &str) -> Result<Vec<String>> {
        let encoding = self.inner.encode(text, false).map_err(|error| failed_on(text, &error))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let unknown = tokens.filter(|&(&id, _)| id == self.special_tokens.unk);
        Ok(unknown.filter_map(|(_, &(start, end))| text.get(start..end)).map(str::to_owned).collect())
    }

    /// Settings in force: lowercase and strip_accents (`None` for a `tokenizer.json`).
    pub fn settings(&self) -> (Option<bool>, Option<bool>) {
        (self.lowercase, self.strip_accents)
    }

    /// The name and bytes under which a corpus keeps a copy of this tokenizer.
    pub(crate) fn file(&self) -> (&'static str, &[u8]) {
        (self.file_name, &self.file)
    }

    /// Whether text may be cut after whitespace without changing ids: so it is where BERT's rules
    /// hold and no added token could span the cut.
    pub(crate) fn splits_at_whitespace(&self) -> bool {
        matches!(self.inner.get_normalizer(), Some(NormalizerWrapper::BertNormalizer(_)))
            && matches!(self.inner.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_)))
            && self.inner.get_added_tokens_decoder().values().all(|token| token.special)
    }
}

/// Encodes text after text on one thread; see [`Tokenizer::encoder`].
pub struct Encoder<'a>(Way<'a>);

enum Way<'a> {
    Fast(wordpiece::Encoder<'a>),
    Crate(&'a Tokenizer),
}

impl Encoder<'_> {
    /// Appends the ids of a piece of text.
    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &mut self.0 {
            Way::Fast(encoder) => encoder.encode_into(text, ids)?,
            Way::Crate(tokenizer) => ids.extend(tokenizer.encode_by_crate(text)?),
        }
        Ok(())
    }
}

/// The entries of a vocab.txt, one a line, the line's number being the id.
fn vocab_entries<'a>(path: &Path, file: &'a [u8]) -> Result<Vec<&'a str>> {
    let text = std::str::from_utf8(file).map_err(|error| {
        let (path, at) = (path.display(), error.valid_up_to());
        Error::Input(format!("{path}: invalid UTF-8 at byte {at}; a vocabulary is UTF-8 text"))
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let text = text.strip_suffix('\n').unwrap_or(text);
    Ok(text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)).collect())
}

fn is_bracketed(entry: &str) -> bool {
    entry.starts_with('[') && entry.ends_with(']')
}

fn find_special(path: &Path, id_of: impl Fn(&str) -> Option<u32>) -> Result<SpecialTokens> {
    let find = |names: &[&str]| {
        names.iter().find_map(|name| id_of(name)).ok_or_else(|| {
            let (path, name) = (path.display(), names[0]);
            Error::Input(format!("{path}: no {name} in the vocabulary; training needs it: add it"))
        })
    };
    Ok(SpecialTokens {
        pad: find(&["[PAD]", "<pad>"])?,
        unk: find(&["[UNK]", "<unk>"])?,
        cls: find(&["[CLS]", "<cls>", "<s>"])?,
        sep: find(&["[SEP]", "<sep>", "</s>"])?,
        mask: find(&["[MASK]", "<mask>"])?,
    })
}

fn failed_on(text: &str, error: &dyn std::fmt::Display) -> Error {
    let start: String = text.chars().take(40).collect();
    Error::Input(format!("the tokenizer fails on text beginning {start:?}: {error}"))
}

fn unusable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("{}: not a usable tokenizer ({error})", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nun\n##able\n##s\nmask\n[\n]\ncafe\n";

    fn open(vocab: &str) -> Result<Tokenizer> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vocab.txt");
        std::fs::write(&path, vocab).unwrap();
        Tokenizer::from_file(&path, None, None)
    }

    #[test]
    fn words_are_split_and_names_of_special_tokens_are_text() {
        let tokenizer = open(VOCAB).unwrap();
        let ids = tokenizer.encode_batch(&["Unables [MASK] Café", "xyz", ""]).unwrap();
        assert_eq!(ids, [vec![5, 6, 7, 9, 8, 10, 11], vec![1], vec![]]);
        assert_eq!((tokenizer.vocab_size(), tokenizer.special_tokens().mask), (12, 4));
    }

    #[test]
    fn case_is_found_out() {
        assert_eq!(open(VOCAB).unwrap().settings(), (Some(true), Some(true)));
        assert_eq!(open(&VOCAB.replace("cafe", "Cafe")).unwrap().settings(), (Some(false), Some(false)));
    }

    #[test]
    fn line_ends_do_not_change_the_hash_but_settings_do() {
        let crlf = open(&VOCAB.replace('\n', "\r\n")).unwrap();
        assert_eq!(crlf.hash(), open(VOCAB).unwrap().hash());
        assert_ne!(crlf.hash(), open(&VOCAB.replace("cafe", "Cafe")).unwrap().hash());
    }

    #[test]
    fn a_missing_special_token_is_named() {
        let error = open(&VOCAB.replace("[MASK]", "x")).err().unwrap().to_string();
        assert!(error.contains("no [MASK] in the vocabulary"), "{error}");
    }
}
