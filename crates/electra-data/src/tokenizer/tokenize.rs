//! Opening tokenizers and encoding text. A `vocab.txt` means BERT's tokenizer; a `tokenizer.json` describes
//! any.
//!
//! Encoding never adds special tokens, and their names in text are ordinary text. BERT's tokenizer is
//! implemented by `wordpiece` in this crate, all others by the `tokenizers` crate.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};
use xxhash_rust::xxh3::Xxh3;

use super::tokenizer_json::{complete, content_hash};
use super::vocab_txt::{self, BYTE_ORDER_MARK, Case, Vocabulary, unusable};
use super::wordpiece::{FastWordPiece, WordPieceEncoder};
use crate::error::{Error, Result};
use crate::format::{SpecialTokens, hex128};
use crate::threads::on_all_cores;

/// Text to ids. The same file and settings give the same ids everywhere.
pub struct Tokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    /// The fast path, or why there is none.
    fast: std::result::Result<FastWordPiece, &'static str>,
    path: PathBuf,
    file_name: &'static str,
    file: Vec<u8>,
    /// The settings of a `vocab.txt`.
    case: Option<Case>,
    case_is_guessed: bool,
    special_tokens: SpecialTokens,
    vocab_size: u32,
    hash: u64,
}

impl Tokenizer {
    /// Opens a `vocab.txt` or a `tokenizer.json` (by extension), or the one in a folder.
    ///
    /// `lowercase` and `strip_accents` are for `vocab.txt` only. Without them, a file beside it decides: a
    /// `tokenizer.json` with the same entries, a `tokenizer_config.json`, or the manifest of its corpus.
    /// Without such a file, text is lowercased unless that would change an ordinary entry, and accents of
    /// lowercased text are stripped unless that would.
    ///
    /// A missing file is [`Error::NotFound`]; one that is no usable tokenizer is [`Error::Input`].
    pub fn from_file(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<Self> {
        let path = locate(path)?;
        let file = std::fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound {
                path: path.clone(),
                hint: "; `electra-fast vocab` trains a vocabulary".to_owned(),
            },
            _ => Error::io(&path, error),
        })?;
        Self::from_bytes(&path, file, lowercase, strip_accents)
    }

    /// As [`Tokenizer::from_file`], for a file in memory; `path` determines its kind and names it in errors.
    pub fn from_bytes(
        path: &Path,
        file: Vec<u8>,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
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

    /// A tokenizer from the bytes of a `vocab.txt`, which need not exist on disk.
    pub(crate) fn from_vocab(
        path: &Path,
        mut file: Vec<u8>,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
        if file.starts_with(BYTE_ORDER_MARK) {
            file.drain(..BYTE_ORDER_MARK.len());
        }
        let entries = vocab_txt::entries(path, &file)?;
        let ids: ahash::AHashMap<String, u32> =
            entries.iter().zip(0..).map(|(entry, id)| ((*entry).to_owned(), id)).collect();
        let special_tokens = find_special(path, |name| ids.get(name).copied())?;
        let unknown = entries[special_tokens.unk as usize];
        let vocabulary = Vocabulary { path, entries, ids, unknown };
        let known = match lowercase {
            Some(lowercase) => Some(vocabulary.case_with(lowercase)?),
            None => vocabulary.case_from_folder()?,
        };
        let mut case = known.map_or_else(|| vocabulary.guessed_case(), Ok)?;
        case.strip_accents = strip_accents.unwrap_or(case.strip_accents);
        let inner = vocabulary.tokenizer(case)?;
        let mut hash = Xxh3::new();
        hash.update(format!("vocab.txt {} {}", case.lowercase, case.strip_accents).as_bytes());
        for entry in &vocabulary.entries {
            hash.update(b"\n");
            hash.update(entry.as_bytes());
        }
        Ok(Self {
            fast: FastWordPiece::new(&inner),
            inner,
            path: path.to_owned(),
            file_name: "vocab.txt",
            case: Some(case),
            case_is_guessed: known.is_none(),
            special_tokens,
            vocab_size: vocabulary.entries.len() as u32,
            hash: hash.digest(),
            file,
        })
    }

    fn from_json(path: &Path, file: Vec<u8>) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(&file).map_err(|e| unusable(path, &e))?;
        // Truncation would silently drop tokens, padding would add some.
        inner.with_truncation(None).map_err(|e| unusable(path, &e))?;
        inner.with_padding(None);
        inner.set_encode_special_tokens(true);
        let special_tokens = find_special(path, |name| inner.token_to_id(name))?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |id| id + 1);
        let mut hash = Xxh3::new();
        hash.update(b"tokenizer.json\n");
        hash.update(&file);
        Ok(Self {
            fast: FastWordPiece::new(&inner),
            inner,
            path: path.to_owned(),
            file_name: "tokenizer.json",
            case: None,
            case_is_guessed: false,
            special_tokens,
            vocab_size,
            hash: hash.digest(),
            file,
        })
    }

    /// An encoder of many texts on one thread.
    pub fn encoder(&self) -> Encoder<'_> {
        match &self.fast {
            Ok(fast) => Encoder(EncoderKind::Fast(fast.encoder())),
            Err(_) => Encoder(EncoderKind::Reference(self)),
        }
    }

    /// The ids of each text, computed on all cores.
    pub fn encode_batch(&self, texts: &[impl AsRef<str> + Sync]) -> Result<Vec<Vec<u32>>> {
        let encode = |encoder: &mut Encoder<'_>, text: &_| {
            let mut ids = Vec::new();
            encoder.encode_into(AsRef::<str>::as_ref(text), &mut ids)?;
            Ok(ids)
        };
        on_all_cores(|| texts.par_iter().map_init(|| self.encoder(), encode).collect())?
    }

    /// The ids that the `tokenizers` crate gives a text, as the reference for [`Encoder`].
    pub fn encode_by_crate(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| failed_on(text, &error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text for ids, approximately the original.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|error| Error::Input(format!("cannot decode: {error}")))
    }

    /// The vocabulary entry with this id.
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

    /// A hash of the file and the settings, stored in a corpus.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// A hash of everything that decides the ids of a text, in whichever file: entries, their ids, and the
    /// rules, case included. 32 hexadecimal digits.
    pub fn content_hash(&self) -> Result<String> {
        content_hash(&self.inner).map(hex128)
    }

    /// A complete `tokenizer.json`: with marked special tokens and the template `[CLS] text [SEP]`.
    pub fn to_json(&self) -> Result<String> {
        complete(&self.inner, self.special_tokens)
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the fast path is used rather than the `tokenizers` crate.
    pub fn is_fast(&self) -> bool {
        self.fast.is_ok()
    }

    /// Why the `tokenizers` crate is used, if it is: a clause such as "its model is not WordPiece".
    pub fn why_not_fast(&self) -> Option<&'static str> {
        self.fast.as_ref().err().copied()
    }

    /// The parts of a text that become unknown tokens, as they stand in it.
    pub(crate) fn unknown_words(&self, text: &str) -> Result<Vec<String>> {
        let encoding = self.inner.encode(text, false).map_err(|error| failed_on(text, &error))?;
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let unknown = tokens.filter(|&(&id, _)| id == self.special_tokens.unk);
        Ok(unknown.filter_map(|(_, &(start, end))| text.get(start..end)).map(str::to_owned).collect())
    }

    /// The settings in effect: lowercase and strip_accents (`None` for a `tokenizer.json`).
    pub fn settings(&self) -> (Option<bool>, Option<bool>) {
        (self.case.map(|case| case.lowercase), self.case.map(|case| case.strip_accents))
    }

    /// Whether the settings of a `vocab.txt` were guessed from its entries.
    pub fn case_is_guessed(&self) -> bool {
        self.case_is_guessed
    }

    /// The name and bytes under which a corpus or a run keeps a copy of this tokenizer.
    pub fn file(&self) -> (&'static str, &[u8]) {
        (self.file_name, &self.file)
    }

    /// Whether text may be cut after whitespace without changing ids: true for BERT's rules, if no added
    /// token can span the cut.
    pub(crate) fn splits_at_whitespace(&self) -> bool {
        matches!(self.inner.get_normalizer(), Some(NormalizerWrapper::BertNormalizer(_)))
            && matches!(self.inner.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_)))
            && self.inner.get_added_tokens_decoder().values().all(|token| token.special)
    }
}

/// Encodes texts on one thread; see [`Tokenizer::encoder`].
pub struct Encoder<'a>(EncoderKind<'a>);

enum EncoderKind<'a> {
    Fast(WordPieceEncoder<'a>),
    Reference(&'a Tokenizer),
}

impl Encoder<'_> {
    /// Appends the ids of a text.
    pub fn encode_into(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &mut self.0 {
            EncoderKind::Fast(encoder) => encoder.encode_into(text, ids)?,
            EncoderKind::Reference(tokenizer) => ids.extend(tokenizer.encode_by_crate(text)?),
        }
        Ok(())
    }
}

/// The tokenizer's file: the path itself, or the one in a folder (in a run or an export, one level down).
fn locate(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let folders = ["", "tokenizer", "discriminator", "generator"].map(|name| path.join(name));
    let mut files = folders.iter().flat_map(|dir| ["tokenizer.json", "vocab.txt"].map(|name| dir.join(name)));
    files.find(|file| file.is_file()).ok_or_else(|| Error::NotFound {
        path: path.join("tokenizer.json"),
        hint: ", nor vocab.txt, nor either of them in tokenizer/, discriminator/ or generator/ there; \
               name a tokenizer's file or its folder"
            .to_owned(),
    })
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

pub(super) fn failed_on(text: &str, error: &dyn std::fmt::Display) -> Error {
    let start: String = text.chars().take(40).collect();
    Error::Input(format!("the tokenizer fails on text beginning {start:?}: {error}"))
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
    fn case_is_detected() {
        assert_eq!(open(VOCAB).unwrap().settings(), (Some(true), Some(true)));
        assert_eq!(open(&VOCAB.replace("cafe", "Cafe")).unwrap().settings(), (Some(false), Some(false)));
    }

    #[test]
    fn line_ends_and_a_byte_order_mark_do_not_change_the_hash_but_settings_do() {
        for same in [VOCAB.replace('\n', "\r\n"), format!("\u{feff}{VOCAB}")] {
            let (same, plain) = (open(&same).unwrap(), open(VOCAB).unwrap());
            assert_eq!((same.hash(), same.special_tokens()), (plain.hash(), plain.special_tokens()));
            assert_eq!(same.content_hash().unwrap(), plain.content_hash().unwrap());
        }
        assert_ne!(open(VOCAB).unwrap().hash(), open(&VOCAB.replace("cafe", "Cafe")).unwrap().hash());
    }

    #[test]
    fn of_several_special_names_the_first_is_used() {
        let names = "<pad>\n<unk>\n<s>\n</s>\n<cls>\n<sep>\n<mask>\na\n";
        let tokenizer = open(names).unwrap();
        assert_eq!(tokenizer.special_tokens(), SpecialTokens { pad: 0, unk: 1, cls: 4, sep: 5, mask: 6 });
        assert_eq!(tokenizer.encode_batch(&["a x"]).unwrap(), [[7, 1]]);
        assert!(tokenizer.is_fast());
    }

    #[test]
    fn a_folder_is_searched() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Tokenizer::from_file(dir.path(), None, None);
        let error = open().err().unwrap().to_string();
        assert!(error.contains("tokenizer.json: not found, nor vocab.txt, nor either of them in"), "{error}");
        for place in ["generator", "discriminator", "tokenizer", "."] {
            std::fs::create_dir_all(dir.path().join(place)).unwrap();
            std::fs::write(dir.path().join(place).join("vocab.txt"), VOCAB).unwrap();
            let json = open().unwrap().to_json().unwrap();
            let expected = dir.path().join(place).join("vocab.txt").canonicalize().unwrap();
            assert_eq!(open().unwrap().path().canonicalize().unwrap(), expected);
            std::fs::write(dir.path().join(place).join("tokenizer.json"), json).unwrap();
            assert!(open().unwrap().path().ends_with("tokenizer.json"), "{place}");
        }
    }

    #[test]
    fn a_missing_special_token_is_named() {
        let error = open(&VOCAB.replace("[MASK]", "x")).err().unwrap().to_string();
        assert!(error.contains("no [MASK] in the vocabulary"), "{error}");
    }
}
