//! Opening tokenizers: a `vocab.txt` implies BERT's tokenizer, a `tokenizer.json` describes any tokenizer.
//!
//! Corpora and other processes get a single file: a `vocab.txt` with its case, or a `tokenizer.json`.
//! `electra_fast.data.tokenizer_folder` applies the other files of a Hugging Face folder, in Python.

use std::path::Path;

use ahash::AHashMap;
use serde::de::IgnoredAny;
use serde_json::json;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Model as _, ModelWrapper, NormalizerWrapper};
use xxhash_rust::xxh3::Xxh3;

use super::names::{five, for_text};
use super::tokenize::Tokenizer;
use super::vocab_txt::{BYTE_ORDER_MARK, Case, Vocabulary, guarded, unusable};
use super::wordpiece::FastWordPiece;
use crate::error::{Error, Result};
use crate::format::{Corpus, Manifest, SpecialTokens, TokenizerEntry, hash_hex};

const JSON: &str = "tokenizer.json";
/// Sixteen times the size of the largest published vocabularies.
const MAX_VOCAB_SIZE: u32 = 1 << 24;

/// The names of pad, unk, cls, sep and mask; `None` for the usual names.
pub type SpecialNames = [Option<String>; 5];
/// Settings of a `vocab.txt`, lowercase and strip_accents; `None` to infer them from the entries.
pub type CaseOptions = (Option<bool>, Option<bool>);

impl Tokenizer {
    /// Opens a `vocab.txt` or a `tokenizer.json` (by extension), ignoring other files in the folder.
    ///
    /// `lowercase` and `strip_accents` apply to `vocab.txt` only. By default, text is lowercased unless that would change
    /// an ordinary entry, and accents of lowercased text are stripped unless that would.
    ///
    /// A missing file is [`Error::NotFound`]; an unusable tokenizer is [`Error::Input`].
    pub fn from_file(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<Self> {
        Self::with_names(path, (lowercase, strip_accents), &SpecialNames::default())
    }

    pub fn with_names(path: &Path, case: CaseOptions, names: &SpecialNames) -> Result<Self> {
        guarded(path, || {
            let file = read(path)?;
            if !is_json(path) {
                return Self::from_vocab(path, file, case, names);
            }
            refuse_case(path, case)?;
            let inner = parse(path, &file)?;
            let special = find_special(path, &|name| inner.token_to_id(name), names)?;
            Self::of_json(path, file, inner, special)
        })
    }

    /// The tokenizer of a corpus, opened by its file next to the manifest; `None` for any other file.
    pub fn beside_manifest(path: &Path, case: CaseOptions) -> Result<Option<Self>> {
        // Errors are ignored: other programs write a manifest.json too.
        let manifest = path.parent().and_then(|dir| Manifest::read(dir).ok());
        let entry = manifest.map(|manifest| manifest.tokenizer);
        let is_own = |entry: &TokenizerEntry| path.file_name() == Some(entry.file.as_ref());
        let Some(entry) = entry.filter(is_own) else { return Ok(None) };
        let file = read(path)?;
        entry.check(path, &file)?;
        if is_json(path) {
            refuse_case(path, case)?;
        }
        let (lowercase, strip_accents) = case;
        let strip_accents = strip_accents.or(entry.strip_accents.filter(|_| lowercase.is_none()));
        let case = (lowercase.or(entry.lowercase), strip_accents);
        Self::restored(path, (&entry.file, file), case, entry.special_tokens).map(Some)
    }

    /// Restores a tokenizer from its [`Tokenizer::file`], [`Tokenizer::settings`], special tokens and path.
    pub fn restored(
        path: &Path,
        (name, file): (&str, Vec<u8>),
        case: CaseOptions,
        special: SpecialTokens,
    ) -> Result<Self> {
        if name != JSON {
            return Self::from_vocab(path, file, case, &SpecialNames::default());
        }
        guarded(path, || Self::of_json(path, file.clone(), parse(path, &file)?, special))
    }

    pub fn of_corpus(corpus: &Corpus) -> Result<Self> {
        let path = corpus.tokenizer_path()?;
        let file = crate::regular_file::read(&path).map_err(|error| Error::io(&path, error))?;
        corpus.verify_tokenizer(&file)?;
        let name = if is_json(&path) { JSON } else { "vocab.txt" };
        Self::restored(&path, (name, file), corpus.tokenizer_settings(), corpus.special_tokens())
    }

    /// A tokenizer from the bytes of a `vocab.txt`, which need not exist on disk.
    pub(crate) fn from_vocab(
        path: &Path,
        mut file: Vec<u8>,
        (lowercase, strip_accents): CaseOptions,
        names: &SpecialNames,
    ) -> Result<Self> {
        if file.starts_with(BYTE_ORDER_MARK) {
            file.drain(..BYTE_ORDER_MARK.len());
        }
        let vocabulary = Vocabulary::new(path, &file)?;
        let special = find_special(path, &|name| vocabulary.ids.get(name).copied(), names)?;
        let mut case = match lowercase {
            Some(lowercase) => Case { lowercase, strip_accents: vocabulary.strips_accents(lowercase)? },
            None => vocabulary.inferred_case()?,
        };
        case.strip_accents = strip_accents.unwrap_or(case.strip_accents);
        let inner = vocabulary.tokenizer(case, special.unk)?;
        let mut hash = Xxh3::new();
        hash.update(format!("vocab.txt {} {}", case.lowercase, case.strip_accents).as_bytes());
        for entry in &vocabulary.entries {
            hash.update(b"\n");
            hash.update(entry.as_bytes());
        }
        let vocab_size = vocabulary.entries.len() as u32;
        Self::new(path, ("vocab.txt", file), Some(case), (inner, special, vocab_size), hash.digest())
    }

    fn of_json(
        path: &Path,
        file: Vec<u8>,
        inner: tokenizers::Tokenizer,
        special: SpecialTokens,
    ) -> Result<Self> {
        let vocab_size = vocab_size(path, &inner)?;
        let mut hash = Xxh3::new();
        hash.update(b"tokenizer.json\n");
        hash.update(&file);
        let by_name = find_special(path, &|name| inner.token_to_id(name), &SpecialNames::default());
        if by_name.ok() != Some(special) {
            five(special).iter().for_each(|id| hash.update(&id.to_le_bytes()));
        }
        let added = inner.get_added_tokens_decoder();
        if added.iter().any(|(id, token)| token.special && !five(special).contains(id)) {
            // Earlier releases split these tokens.
            hash.update(b"whole");
        }
        Self::new(path, (JSON, file), None, (inner, special, vocab_size), hash.digest())
    }

    fn new(
        path: &Path,
        (file_name, file): (&'static str, Vec<u8>),
        case: Option<Case>,
        (mut inner, special_tokens, vocab_size): (tokenizers::Tokenizer, SpecialTokens, u32),
        hash: u64,
    ) -> Result<Self> {
        let text = for_text(&mut inner, special_tokens)?;
        let fast = FastWordPiece::new(text.as_ref().unwrap_or(&inner));
        let path = path.to_owned();
        Ok(Self { inner, text, fast, path, file_name, file, case, special_tokens, vocab_size, hash })
    }

    /// Describes a difference between the entries of a `vocab.txt` and a `tokenizer.json`, with the remedy.
    pub fn disagreement(vocab_txt: &Path, json: &Path) -> Result<Option<String>> {
        guarded(json, || {
            let (tokenizer, file) = (parse(json, &read(json)?)?, read(vocab_txt)?);
            let file = file.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&file);
            Ok(Vocabulary::new(vocab_txt, file)?.disagreement(json, &tokenizer))
        })
    }

    /// A hash of everything that determines the ids of a text, whatever the file format: entries, their ids, and the
    /// rules, including the case. 32 hexadecimal digits.
    pub fn content_hash(&self) -> Result<String> {
        guarded(&self.path, || content_hash(&self.inner, self.special_tokens))
    }

    /// A complete `tokenizer.json`: with marked special tokens and the template `[CLS] text [SEP]`.
    pub fn to_json(&self) -> Result<String> {
        guarded(&self.path, || complete(&self.inner, self.special_tokens))
    }

    /// Everything but the entries, as JSON: normalizer, pre-tokenizer, added tokens and model type.
    pub fn rules(&self) -> String {
        let model = self.inner.get_model();
        let (kind, unknown) = match model {
            ModelWrapper::WordPiece(model) => ("WordPiece", Some(&model.unk_token)),
            ModelWrapper::WordLevel(model) => ("WordLevel", Some(&model.unk_token)),
            ModelWrapper::BPE(model) => ("BPE", model.unk_token.as_ref()),
            ModelWrapper::Unigram(_) => ("Unigram", None),
        };
        let is_usual = matches!(model, ModelWrapper::WordPiece(model)
            if model.continuing_subword_prefix == "##" && model.max_input_chars_per_word == 100);
        json!({
            "normalizer": self.inner.get_normalizer(),
            "pre_tokenizer": self.inner.get_pre_tokenizer(),
            "added_tokens": self.inner.get_added_vocabulary(),
            "model": kind,
            "num_entries": model.get_vocab_size(),
            "unknown": unknown.and_then(|name| model.token_to_id(name)),
            "has_usual_pieces": is_usual,
        })
        .to_string()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound {
            path: path.to_owned(),
            hint: "; `electra-fast vocab` trains a vocabulary".to_owned(),
        },
        _ => Error::io(path, error),
    })
}

/// One more than the highest id; an error if the id is absurdly large, because tables have a row per id.
fn vocab_size(path: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<u32> {
    match tokenizer.get_vocab(true).into_iter().max_by_key(|&(_, id)| id) {
        Some((token, id)) if id >= MAX_VOCAB_SIZE => {
            let limit = format!("ids must be below {MAX_VOCAB_SIZE}; correct it");
            Err(Error::at(path, format!("{token:?} has id {id}; {limit}")))
        }
        last => Ok(last.map_or(0, |(_, id)| id + 1)),
    }
}

fn parse(path: &Path, file: &[u8]) -> Result<tokenizers::Tokenizer> {
    // The crate panics on some mistakes, and does not locate them.
    serde_json::from_slice::<IgnoredAny>(file).map_err(|e| unusable(path, &e))?;
    let mut inner = tokenizers::Tokenizer::from_bytes(file).map_err(|e| unusable(path, &e))?;
    // Truncation would silently drop tokens, and padding would add some.
    inner.with_truncation(None).map_err(|e| unusable(path, &e))?;
    inner.with_padding(None);
    if let ModelWrapper::BPE(model) = inner.get_model()
        && model.dropout.is_some_and(|dropout| dropout > 0.0)
    {
        return Err(Error::at(path, "model.dropout makes ids random; set it to null"));
    }
    Ok(inner)
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn refuse_case(path: &Path, case: CaseOptions) -> Result<()> {
    if case == (None, None) {
        return Ok(());
    }
    Err(Error::at(
        path,
        "cased and strip_accents apply to a vocab.txt only; a tokenizer.json has its own settings",
    ))
}

fn find_special(
    path: &Path,
    id_of: &dyn Fn(&str) -> Option<u32>,
    names: &SpecialNames,
) -> Result<SpecialTokens> {
    const ROLES: [(&str, &[&str]); 5] = [
        ("pad_token", &["[PAD]", "<pad>"]),
        ("unk_token", &["[UNK]", "<unk>"]),
        ("cls_token", &["[CLS]", "<cls>", "<s>"]),
        ("sep_token", &["[SEP]", "<sep>", "</s>"]),
        ("mask_token", &["[MASK]", "<mask>"]),
    ];
    let find = |number: usize| {
        let (role, usual) = ROLES[number];
        let Some(name) = &names[number] else {
            let reason = || format!("no {} in the vocabulary; add it, training needs it", usual[0]);
            return usual.iter().find_map(|name| id_of(name)).ok_or_else(|| Error::at(path, reason()));
        };
        let reason = || format!("{role} = {name:?}: not in {}; add it there", path.display());
        let config = || path.with_file_name("tokenizer_config.json");
        id_of(name).ok_or_else(|| Error::at(config(), reason()))
    };
    Ok(SpecialTokens { pad: find(0)?, unk: find(1)?, cls: find(2)?, sep: find(3)?, mask: find(4)? })
}

/// A `tokenizer.json` for any library: with marked special tokens, and the template `[CLS] text [SEP]` if it has none.
fn complete(tokenizer: &tokenizers::Tokenizer, special: SpecialTokens) -> Result<String> {
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
/// rules, including the case.
///
/// A `vocab.txt` with its settings and every `tokenizer.json` made from it have the same hash.
fn content_hash(tokenizer: &tokenizers::Tokenizer, special: SpecialTokens) -> Result<String> {
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
