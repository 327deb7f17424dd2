//! Opening tokenizers: a `vocab.txt` implies BERT's tokenizer, a `tokenizer.json` describes any, and the other files of
//! their folder may modify both.
//!
//! A corpus keeps, and other processes get, a single file with all of this: a `vocab.txt` with its case, or a
//! `tokenizer.json` into which everything else has been written.

use std::path::{Path, PathBuf};

use serde::de::IgnoredAny;
use tokenizers::ModelWrapper;
use xxhash_rust::xxh3::Xxh3;

use super::folder::{Folder, ROLES, bert_case};
use super::names::{five, for_text};
use super::tokenize::Tokenizer;
use super::tokenizer_json::complete;
use super::vocab_txt::{self, BYTE_ORDER_MARK, Case, Vocabulary, guarded, read_if_there, unusable};
use super::wordpiece::FastWordPiece;
use crate::error::{Error, Result};
use crate::format::{Corpus, Manifest, SpecialTokens, TokenizerEntry};

const JSON: &str = "tokenizer.json";
/// Sixteen times as many as the largest published vocabularies have.
const MAX_VOCAB_SIZE: u32 = 1 << 24;

impl Tokenizer {
    /// Opens a `vocab.txt` or a `tokenizer.json` (by extension), or the one in a folder.
    ///
    /// Settings in other files of the folder are honored as in `transformers`, or rejected by name. `lowercase` and
    /// `strip_accents` are for `vocab.txt` only. Without them, a file beside it decides: a `tokenizer.json`, a
    /// `tokenizer_config.json`, or the manifest of its corpus. Without such a file, text is lowercased unless that
    /// would change an ordinary entry, and accents of lowercased text are stripped unless that would.
    ///
    /// A missing file is [`Error::NotFound`]; one that is no usable tokenizer is [`Error::Input`].
    pub fn from_file(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<Self> {
        let path = locate(path)?;
        guarded(&path, || Self::from_located(&path, lowercase, strip_accents))
    }

    fn from_located(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<Self> {
        let file = std::fs::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::NotFound {
                path: path.to_owned(),
                hint: "; `electra-fast vocab` trains a vocabulary".to_owned(),
            },
            _ => Error::io(path, error),
        })?;
        if is_json(path) {
            refuse_case(path, lowercase, strip_accents)?;
            return Self::from_json_folder(path, file);
        }
        Self::from_vocab_folder(path, file, lowercase, strip_accents)
    }

    /// As [`Tokenizer::from_file`], for a file in memory, beside which there are no others; `path` determines its
    /// kind and names it in errors.
    pub fn from_bytes(
        path: &Path,
        file: Vec<u8>,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
        if !is_json(path) {
            return Self::from_vocab(path, file, lowercase, strip_accents);
        }
        refuse_case(path, lowercase, strip_accents)?;
        guarded(path, || {
            let inner = parse(path, &file)?;
            let special = find_special(path, &|name| inner.token_to_id(name))?;
            Self::of_json(path, file, inner, special)
        })
    }

    /// Restores a tokenizer from its [`Tokenizer::file`], [`Tokenizer::settings`], special tokens and path.
    pub fn restored(
        path: &Path,
        (name, file): (&str, Vec<u8>),
        (lowercase, strip_accents): (Option<bool>, Option<bool>),
        special: SpecialTokens,
    ) -> Result<Self> {
        if name != JSON {
            return Self::from_vocab(path, file, lowercase, strip_accents);
        }
        guarded(path, || Self::of_json(path, file.clone(), parse(path, &file)?, special))
    }

    /// The tokenizer that a corpus was prepared with, from the corpus's own copy.
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
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
        drop_byte_order_mark(&mut file);
        let (vocabulary, special) = vocabulary(path, &file, |id_of| find_special(path, id_of))?;
        let mut case = match lowercase {
            Some(lowercase) => {
                Case { lowercase, strip_accents: vocabulary.strips_accents(lowercase)?, chinese: true }
            }
            None => vocabulary.inferred_case()?,
        };
        case.strip_accents = strip_accents.unwrap_or(case.strip_accents);
        let inner = vocabulary.tokenizer(case)?;
        let mut hash = Xxh3::new();
        hash.update(format!("vocab.txt {} {}", case.lowercase, case.strip_accents).as_bytes());
        for entry in &vocabulary.entries {
            hash.update(b"\n");
            hash.update(entry.as_bytes());
        }
        let vocab_size = vocabulary.entries.len() as u32;
        let tokenizer = Self::new(path, "vocab.txt", inner, special, vocab_size, hash.digest())?;
        Ok(Self { file, case: Some(case), casing_inferred: lowercase.is_none(), ..tokenizer })
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
        if find_special(path, &|name| inner.token_to_id(name)).ok() != Some(special) {
            five(special).iter().for_each(|id| hash.update(&id.to_le_bytes()));
        }
        let added = inner.get_added_tokens_decoder();
        if added.iter().any(|(id, token)| token.special && !five(special).contains(id)) {
            // Earlier releases split these.
            hash.update(b"whole");
        }
        let tokenizer = Self::new(path, JSON, inner, special, vocab_size, hash.digest())?;
        Ok(Self { file, ..tokenizer })
    }

    fn new(
        path: &Path,
        file_name: &'static str,
        mut inner: tokenizers::Tokenizer,
        special_tokens: SpecialTokens,
        vocab_size: u32,
        hash: u64,
    ) -> Result<Self> {
        let text = for_text(&mut inner, special_tokens)?;
        let fast = FastWordPiece::new(text.as_ref().unwrap_or(&inner));
        let (path, file, case, casing_inferred) = (path.to_owned(), Vec::new(), None, false);
        Ok(Self {
            inner,
            text,
            fast,
            path,
            file_name,
            file,
            case,
            casing_inferred,
            special_tokens,
            vocab_size,
            hash,
        })
    }

    /// A `tokenizer.json` with the settings in the other files of its folder.
    fn from_json_folder(path: &Path, file: Vec<u8>) -> Result<Self> {
        if let Some(entry) = own_entry(path) {
            return Self::of_json(path, file.clone(), parse(path, &file)?, entry.special_tokens);
        }
        let configured = ConfiguredTokenizer::open(path, &file)?;
        let file = if configured.changed {
            complete(&configured.inner, configured.special)?.into_bytes()
        } else {
            file
        };
        Self::of_json(path, file, configured.inner, configured.special)
    }

    /// A `vocab.txt` with the settings in the other files of its folder.
    fn from_vocab_folder(
        path: &Path,
        mut file: Vec<u8>,
        lowercase: Option<bool>,
        strip_accents: Option<bool>,
    ) -> Result<Self> {
        drop_byte_order_mark(&mut file);
        if let Some(entry) = own_entry(path) {
            let strip_accents = strip_accents.or(entry.strip_accents.filter(|_| lowercase.is_none()));
            return Self::from_vocab(path, file, lowercase.or(entry.lowercase), strip_accents);
        }
        let folder = Folder::beside(path)?;
        let find = |id_of: &dyn Fn(&str) -> Option<u32>| special_of_folder(path, &folder, id_of);
        let (vocabulary, special) = vocabulary(path, &file, find)?;
        let json = json_beside(&vocabulary)?;
        let given = match (lowercase, strip_accents) {
            (Some(lowercase), None) => {
                Some((lowercase, strips_accents(&vocabulary, json.as_ref(), &folder, lowercase)?))
            }
            (lowercase, strip_accents) => lowercase.zip(strip_accents),
        };
        let known = match &json {
            Some(json) => case_of_json(&vocabulary, json, given)?,
            None => case_of_folder(&vocabulary, &folder, given)?,
        };
        let mut case = known.map_or_else(|| vocabulary.inferred_case(), Ok)?;
        case.strip_accents = strip_accents.unwrap_or(case.strip_accents);
        let mut inner = vocabulary.tokenizer(case)?;
        let added = match json {
            Some(json) => add_tokens_of(&json.inner, &mut inner, special)?,
            None => folder.add_tokens(&mut inner, five(special))?,
        };
        let by_name = find_special(path, &|name| vocabulary.ids.get(name).copied()).ok() == Some(special);
        let tokenizer = if case.chinese && !added && by_name {
            Self::from_vocab(path, file, Some(case.lowercase), Some(case.strip_accents))?
        } else {
            let file = complete(&inner, special)?.into_bytes();
            let inner = parse(path, &file)?;
            Self::of_json(path, file, inner, special)?
        };
        Ok(Self { casing_inferred: known.is_none(), ..tokenizer })
    }
}

/// A `tokenizer.json` under the settings of its folder.
struct ConfiguredTokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    special: SpecialTokens,
    /// Whether the folder changes it.
    changed: bool,
}

impl ConfiguredTokenizer {
    fn open(path: &Path, file: &[u8]) -> Result<Self> {
        let mut inner = parse(path, file)?;
        let folder = Folder::beside(path)?;
        let special = special_of_folder(path, &folder, &|name| inner.token_to_id(name))?;
        let txt = path.with_file_name("vocab.txt");
        if let Some(mut other) = read_if_there(&txt)? {
            drop_byte_order_mark(&mut other);
            vocabulary(&txt, &other, |_| Ok(special))?.0.check_agrees(path, &inner)?;
        }
        let mut changed = folder.change_rules(&mut inner, special)?;
        changed |= folder.add_tokens(&mut inner, five(special))?;
        Ok(Self { path: path.to_owned(), inner, special, changed })
    }
}

/// The `tokenizer.json` beside a vocabulary with the same entries.
fn json_beside(vocabulary: &Vocabulary) -> Result<Option<ConfiguredTokenizer>> {
    let path = vocabulary.path.with_file_name(JSON);
    let Some(file) = read_if_there(&path)? else { return Ok(None) };
    // A vocabulary by another name may have nothing to do with it.
    let is_pair = vocabulary.path.file_name().is_some_and(|name| name == "vocab.txt");
    if !is_pair && vocabulary.check_agrees(&path, &parse(&path, &file)?).is_err() {
        return Ok(None);
    }
    ConfiguredTokenizer::open(&path, &file).map(Some)
}

/// Whether accents are stripped if only `lowercase` is given: as the folder's files say if they have the same case, or
/// else inferred from the entries.
fn strips_accents(
    vocabulary: &Vocabulary,
    json: Option<&ConfiguredTokenizer>,
    folder: &Folder,
    lowercase: bool,
) -> Result<bool> {
    let stored = match json {
        Some(json) => bert_case(&json.inner).map(|case| (case.lowercase, case.strip_accents)),
        None => {
            let (stored, strip_accents, _) = folder.case();
            stored.map(|stored| (stored, strip_accents.flatten().unwrap_or(stored)))
        }
    };
    match stored {
        Some((stored, strip_accents)) if stored == lowercase => Ok(strip_accents),
        _ => vocabulary.strips_accents(lowercase),
    }
}

/// The given case, or else the one that a `tokenizer.json` stores.
fn case_of_json(
    vocabulary: &Vocabulary,
    json: &ConfiguredTokenizer,
    given: Option<(bool, bool)>,
) -> Result<Option<Case>> {
    let (case, json, path) = (bert_case(&json.inner), json.path.display(), vocabulary.path.display());
    match (case, given) {
        (None, None) => Err(Error::Input(format!(
            "{json}: has the entries of {path} but rules that a vocab.txt cannot have; open {json} itself, \
             or say whether {path} is cased (--cased or --uncased)"
        ))),
        (case, Some((lowercase, strip_accents))) => {
            Ok(Some(Case { lowercase, strip_accents, chinese: case.is_none_or(|case| case.chinese) }))
        }
        (case, None) => Ok(case),
    }
}

/// The given case, or else the one that a Hugging Face folder without `tokenizer.json` stores.
fn case_of_folder(
    vocabulary: &Vocabulary,
    folder: &Folder,
    given: Option<(bool, bool)>,
) -> Result<Option<Case>> {
    folder.check_vocab_txt()?;
    let (lowercase, strip_accents, chinese) = folder.case();
    let guess = vocabulary.inferred_case()?;
    if given.is_none() && lowercase.is_none() && folder.is_bert() && !guess.strip_accents {
        return Err(folder.refused(&format!(
            "no do_lower_case, so transformers lowercases and strips accents, but {} has entries with capitals or accents; add \"do_lower_case\": false, or \
             say which is right (--cased or --uncased)",
            vocabulary.path.display()
        )));
    }
    let is_stored = lowercase.is_some() || folder.is_bert();
    let is_known = given.is_some() || is_stored || chinese.is_some();
    let lowercase = given.map(|(lowercase, _)| lowercase).or(lowercase).unwrap_or(guess.lowercase);
    let by_rule = if is_stored { lowercase } else { guess.strip_accents };
    let strip_accents = given.map(|(_, strip)| strip).or(strip_accents.flatten()).unwrap_or(by_rule);
    Ok(is_known.then_some(Case { lowercase, strip_accents, chinese: chinese.unwrap_or(true) }))
}

/// Adds the added tokens of another tokenizer with the same entries. Returns whether there were any.
fn add_tokens_of(
    other: &tokenizers::Tokenizer,
    tokenizer: &mut tokenizers::Tokenizer,
    special: SpecialTokens,
) -> Result<bool> {
    let added = other.get_added_tokens_decoder().into_iter().filter(|(id, _)| !five(special).contains(id));
    let mut added: Vec<_> = added.collect();
    added.sort_unstable_by_key(|&(id, _)| id);
    let any = !added.is_empty();
    let tokens = added.into_iter().map(|(_, token)| token);
    tokenizer
        .add_tokens(tokens)
        .map_err(|error| Error::Input(format!("the added tokens cannot be kept: {error}")))?;
    Ok(any)
}

/// The entry for this file in the manifest of its corpus. Errors are ignored: other programs write a manifest.json too.
fn own_entry(path: &Path) -> Option<TokenizerEntry> {
    let entry = Manifest::read(path.parent()?).ok()?.tokenizer;
    (path.file_name()? == entry.file.as_str()).then_some(entry)
}

/// One more than the highest id; an error if that is absurdly large, because tables have a row per id.
fn vocab_size(path: &Path, tokenizer: &tokenizers::Tokenizer) -> Result<u32> {
    match tokenizer.get_vocab(true).into_iter().max_by_key(|&(_, id)| id) {
        Some((token, id)) if id >= MAX_VOCAB_SIZE => {
            let reason =
                format!("{token:?} has the id {id}, and ids must be below {MAX_VOCAB_SIZE}; correct it");
            Err(Error::Input(format!("{}: {reason}", path.display())))
        }
        last => Ok(last.map_or(0, |(_, id)| id + 1)),
    }
}

fn parse(path: &Path, file: &[u8]) -> Result<tokenizers::Tokenizer> {
    // The crate panics at some mistakes, and does not locate them.
    serde_json::from_slice::<IgnoredAny>(file).map_err(|e| unusable(path, &e))?;
    let mut inner = tokenizers::Tokenizer::from_bytes(file).map_err(|e| unusable(path, &e))?;
    // Truncation would silently drop tokens, and padding would add some.
    inner.with_truncation(None).map_err(|e| unusable(path, &e))?;
    inner.with_padding(None);
    if let ModelWrapper::BPE(model) = inner.get_model()
        && model.dropout.is_some_and(|dropout| dropout > 0.0)
    {
        let path = path.display();
        return Err(Error::Input(format!("{path}: dropout of its model makes ids random; set it to null")));
    }
    Ok(inner)
}

/// The vocabulary of a `vocab.txt`, with the special tokens that `find` finds among its entries.
fn vocabulary<'a>(
    path: &'a Path,
    file: &'a [u8],
    find: impl FnOnce(&dyn Fn(&str) -> Option<u32>) -> Result<SpecialTokens>,
) -> Result<(Vocabulary<'a>, SpecialTokens)> {
    let entries = vocab_txt::entries(path, file)?;
    let ids: ahash::AHashMap<String, u32> =
        entries.iter().zip(0..).map(|(entry, id)| ((*entry).to_owned(), id)).collect();
    let special = find(&|name| ids.get(name).copied())?;
    let unknown = entries.get(special.unk as usize).copied().unwrap_or_default();
    Ok((Vocabulary { path, entries, ids, unknown }, special))
}

fn drop_byte_order_mark(file: &mut Vec<u8>) {
    if file.starts_with(BYTE_ORDER_MARK) {
        file.drain(..BYTE_ORDER_MARK.len());
    }
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

fn refuse_case(path: &Path, lowercase: Option<bool>, strip_accents: Option<bool>) -> Result<()> {
    if lowercase.is_none() && strip_accents.is_none() {
        return Ok(());
    }
    let path = path.display();
    Err(Error::Input(format!(
        "{path}: lowercase and strip_accents belong to vocab.txt; a tokenizer.json has its own"
    )))
}

/// The tokenizer's file: the path itself, or the one in a folder (in a run or an export, one level down).
fn locate(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let folders = ["", "tokenizer", "discriminator", "generator"].map(|name| path.join(name));
    let mut files = folders.iter().flat_map(|dir| [JSON, "vocab.txt"].map(|name| dir.join(name)));
    files.find(|file| file.is_file()).ok_or_else(|| Error::NotFound {
        path: path.join(JSON),
        hint: ", nor vocab.txt, nor either of them in tokenizer/, discriminator/ or generator/ there; \
               name a tokenizer's file or its folder"
            .to_owned(),
    })
}

/// The special tokens by the names that the folder gives them, or else by their usual names.
fn special_of_folder(
    path: &Path,
    folder: &Folder,
    id_of: &dyn Fn(&str) -> Option<u32>,
) -> Result<SpecialTokens> {
    let mut given = [None; 5];
    for ((id, name), role) in given.iter_mut().zip(folder.roles()).zip(ROLES) {
        let Some(name) = name else { continue };
        *id = Some(id_of(&name).ok_or_else(|| {
            folder
                .refused(&format!("{role} is {name:?}, which {} does not have; add it there", path.display()))
        })?);
    }
    let mut at = 0;
    special_by(path, |names| {
        at += 1;
        given[at - 1].or_else(|| names.iter().find_map(|name| id_of(name)))
    })
}

fn find_special(path: &Path, id_of: &dyn Fn(&str) -> Option<u32>) -> Result<SpecialTokens> {
    special_by(path, |names| names.iter().find_map(|name| id_of(name)))
}

/// The special tokens, each found by its usual names, in the order of [`ROLES`].
fn special_by(path: &Path, mut id_of: impl FnMut(&[&str]) -> Option<u32>) -> Result<SpecialTokens> {
    let mut find = |names: &[&str]| {
        id_of(names).ok_or_else(|| {
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
