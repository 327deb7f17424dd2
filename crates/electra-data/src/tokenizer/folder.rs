//! The tokenizer settings in the other files of a Hugging Face folder: `tokenizer_config.json`,
//! `special_tokens_map.json`, `added_tokens.json`, and `config.json` for the class of tokenizers.
//!
//! A setting that changes ids in `transformers` 4 or 5 is honored, or rejected by name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::{AddedToken, Model as _, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use super::vocab_txt::{Case, read_if_there, unusable};
use crate::error::{Error, Result};
use crate::format::SpecialTokens;

type Object = Map<String, Value>;

/// Classes with BERT's rules, without the ending `Fast`.
const BERT: [&str; 10] = [
    "BertTokenizer",
    "ElectraTokenizer",
    "DistilBertTokenizer",
    "ConvBertTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
    "LayoutLMTokenizer",
    "LxmertTokenizer",
    "RealmTokenizer",
    "RetriBertTokenizer",
];

/// Kinds of models whose tokenizer is BERT's if no class is named.
const BERT_MODELS: [&str; 8] =
    ["bert", "electra", "distilbert", "convbert", "mobilebert", "squeezebert", "megatron-bert", "ernie"];

/// Classes with byte-level rules; `transformers` 5 ignores any other rules in their files.
const BYTE_LEVEL: [&str; 5] =
    ["RobertaTokenizer", "GPT2Tokenizer", "LongformerTokenizer", "BartTokenizer", "LEDTokenizer"];

/// Classes with SentencePiece's rules; `transformers` 5 keeps only the character normalization of their files.
const SENTENCE_PIECE: [&str; 2] = ["XLMRobertaTokenizer", "CamembertTokenizer"];

/// Classes written in Python, which `transformers` uses even beside a `tokenizer.json`.
const IN_PYTHON: [&str; 20] = [
    "BartphoTokenizer",
    "BertGenerationTokenizer",
    "BertJapaneseTokenizer",
    "BertweetTokenizer",
    "BioGptTokenizer",
    "ByT5Tokenizer",
    "CanineTokenizer",
    "CpmAntTokenizer",
    "CTRLTokenizer",
    "EsmTokenizer",
    "FlaubertTokenizer",
    "GPTNeoXJapaneseTokenizer",
    "GPTSw3Tokenizer",
    "MLukeTokenizer",
    "MyT5Tokenizer",
    "PhobertTokenizer",
    "ProphetNetTokenizer",
    "RoCBertTokenizer",
    "TapasTokenizer",
    "XLMTokenizer",
];

/// Settings that only tokenizers in Python follow. Null, an empty list and `true` have no effect.
const OF_PYTHON: [&str; 6] = [
    "never_split",
    "do_basic_tokenize",
    "word_tokenizer_type",
    "subword_tokenizer_type",
    "do_word_tokenize",
    "do_subword_tokenize",
];

/// The five roles in the order of [`super::names::five`].
pub(super) const ROLES: [&str; 5] = ["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"];

/// The settings beside a tokenizer's file.
pub(super) struct Folder {
    file: PathBuf,
    config: Object,
    /// `special_tokens_map.json`; like `added_tokens.json`, it is ignored if there is an `added_tokens_decoder`.
    special: Object,
    added: Object,
    class: Option<Class>,
}

struct Class {
    /// Without the ending `Fast`.
    name: String,
    /// The setting that names it, with its file.
    said: String,
}

impl Folder {
    /// Reads the files beside `file`; rejects settings that no tokenizer here can have.
    pub fn beside(file: &Path) -> Result<Self> {
        let config = object(&file.with_file_name("tokenizer_config.json"))?;
        let legacy = !config.contains_key("added_tokens_decoder");
        let unless_new = |name| if legacy { object(&file.with_file_name(name)) } else { Ok(Object::new()) };
        let (special, added) = (unless_new("special_tokens_map.json")?, unless_new("added_tokens.json")?);
        let model = object(&file.with_file_name("config.json")).unwrap_or_default();
        let class = class_of(file, &config, &model);
        let folder = Self { file: file.to_owned(), config, special, added, class };
        folder.refuse_python()?;
        Ok(folder)
    }

    /// Whether `transformers` makes a tokenizer with BERT's rules of this folder.
    pub fn is_bert(&self) -> bool {
        self.class.as_ref().is_some_and(|class| BERT.contains(&class.name.as_str()))
    }

    /// Refuses a `vocab.txt` that is not BERT's.
    pub fn check_vocab_txt(&self) -> Result<()> {
        match &self.class {
            Some(class) if !self.is_bert() => Err(Error::Input(format!(
                "{}: {}, whose rules a vocab.txt does not have; save that tokenizer as a tokenizer.json, or name \
                 BertTokenizer if the rules are BERT's",
                self.file.display(),
                class.said
            ))),
            _ => Ok(()),
        }
    }

    /// The names given to the five roles.
    pub fn roles(&self) -> [Option<String>; 5] {
        ROLES.map(|role| self.setting(role).and_then(content).map(str::to_owned))
    }

    /// The settings of BERT's normalizer; `None` for those that are not given.
    pub fn case(&self) -> (Option<bool>, Option<Option<bool>>, Option<bool>) {
        let flag = |key: &str| self.config.get(key).and_then(Value::as_bool);
        let strip_accents = self.config.get("strip_accents").map(Value::as_bool);
        (flag("do_lower_case"), strip_accents, flag("tokenize_chinese_chars"))
    }

    /// Applies the settings to the rules of a `tokenizer.json`, as its class in `transformers` does. Returns whether
    /// that changes them.
    pub fn change_rules(&self, tokenizer: &mut Tokenizer, special: SpecialTokens) -> Result<bool> {
        let class = self.class.as_ref().map_or("", |class| &class.name);
        self.check_unknown(tokenizer, special)?;
        if BYTE_LEVEL.contains(&class) && !is_byte_level(tokenizer) {
            return Err(self.other_rules("byte-level BPE"));
        }
        if SENTENCE_PIECE.contains(&class) && !is_sentence_piece(tokenizer) {
            return Err(self.other_rules("SentencePiece's"));
        }
        self.check_prefix_space(
            tokenizer,
            BYTE_LEVEL.contains(&class) || class == "PreTrainedTokenizerFast",
        )?;
        match bert_case(tokenizer) {
            Some(case) if self.is_bert() || self.class.is_none() => self.change_case(tokenizer, case),
            None if self.is_bert() => Err(self.other_rules("BERT's")),
            _ => Ok(false),
        }
    }

    fn other_rules(&self, than: &str) -> Error {
        let said = self.class.as_ref().map_or("", |class| &class.said);
        Error::Input(format!(
            "{}: has other rules than {than}, but {said}: releases of transformers differ in which they follow; set \
             \"tokenizer_class\": \"PreTrainedTokenizerFast\" in tokenizer_config.json if these rules are right",
            self.file.display()
        ))
    }

    fn check_unknown(&self, tokenizer: &Tokenizer, special: SpecialTokens) -> Result<()> {
        let model = tokenizer.get_model();
        let makes = match model {
            ModelWrapper::WordPiece(model) => model.token_to_id(&model.unk_token),
            ModelWrapper::WordLevel(model) => model.token_to_id(&model.unk_token),
            ModelWrapper::BPE(bpe) => bpe.unk_token.as_ref().and_then(|token| model.token_to_id(token)),
            ModelWrapper::Unigram(_) => None,
        };
        match makes.filter(|&id| id != special.unk).and_then(|id| tokenizer.id_to_token(id)) {
            Some(other) => Err(self.refused(&format!(
                "unk_token is {:?}, but the model in {} makes {other:?} of unknown text; say the same in both",
                tokenizer.id_to_token(special.unk).unwrap_or_default(),
                self.file.display()
            ))),
            None => Ok(()),
        }
    }

    fn change_case(&self, tokenizer: &mut Tokenizer, has: Case) -> Result<bool> {
        let is_bert = self.is_bert();
        let (lowercase, strip_accents, chinese) = self.case();
        let unset = |default: bool, has: bool| if is_bert { default } else { has };
        let wanted_lowercase = lowercase.unwrap_or(unset(true, has.lowercase));
        let follows = lowercase.is_some() && self.leaves_accents_open(tokenizer);
        let strip_or = if follows { wanted_lowercase } else { unset(wanted_lowercase, has.strip_accents) };
        let wanted = Case {
            lowercase: wanted_lowercase,
            strip_accents: strip_accents.map_or(strip_or, |strip| strip.unwrap_or(wanted_lowercase)),
            chinese: chinese.unwrap_or(unset(true, has.chinese)),
        };
        for (is_silent, name, wanted, has) in [
            (lowercase.is_none(), "do_lower_case", wanted.lowercase, has.lowercase),
            (strip_accents.is_none() && !follows, "strip_accents", wanted.strip_accents, has.strip_accents),
            (chinese.is_none(), "tokenize_chinese_chars", wanted.chinese, has.chinese),
        ] {
            if is_silent && wanted != has {
                return Err(self.refused(&format!(
                    "no {name}, which {} has as {has} and transformers takes as {wanted}; add \"{name}\": {has}, or \
                     what the model was trained with",
                    self.file.display(),
                )));
            }
        }
        if wanted != has {
            let normalizer =
                BertNormalizer::new(true, wanted.chinese, Some(wanted.strip_accents), wanted.lowercase);
            tokenizer.with_normalizer(Some(normalizer)).map_err(|e| unusable(&self.file, &e))?;
        }
        Ok(wanted != has)
    }

    /// Whether accents are stripped if text is lowercased.
    fn leaves_accents_open(&self, tokenizer: &Tokenizer) -> bool {
        matches!(tokenizer.get_normalizer(), Some(NormalizerWrapper::BertNormalizer(bert)) if bert.strip_accents.is_none())
    }

    /// `transformers` 4 sets `add_prefix_space` of byte-level rules, by default to false; 5 leaves some as they are.
    fn check_prefix_space(&self, tokenizer: &Tokenizer, is_set: bool) -> Result<()> {
        let Some(PreTokenizerWrapper::ByteLevel(rules)) = tokenizer.get_pre_tokenizer() else {
            return Ok(());
        };
        let given = self.config.get("add_prefix_space").and_then(Value::as_bool);
        if given.unwrap_or(rules.add_prefix_space && !is_set) == rules.add_prefix_space {
            return Ok(());
        }
        Err(self.refused(&format!(
            "add_prefix_space is {}, but {} in {}; releases of transformers differ in which they follow: say the same \
             in both",
            given.map_or("not set".to_owned(), |given| given.to_string()),
            rules.add_prefix_space,
            self.file.display()
        )))
    }

    /// Adds the tokens that the other files add. Returns whether there are any.
    pub fn add_tokens(&self, tokenizer: &mut Tokenizer, five: [u32; 5]) -> Result<bool> {
        let wanted = self.added_tokens()?;
        let decoder = self.config.contains_key("added_tokens_decoder");
        self.check_named(tokenizer)?;
        self.check_tokens_kept(tokenizer, &wanted, five, decoder && self.is_bert())?;
        let mut changed = false;
        for (id, token) in wanted {
            let known = tokenizer.token_to_id(&token.content);
            if known.is_some_and(|known| five.contains(&known)) && id.is_none_or(|id| Some(id) == known) {
                continue;
            }
            let has = known
                .and_then(|id| tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id).cloned());
            let shown = format!("{:?}", token.content);
            match has {
                Some(has)
                    if !decoder
                        || id.is_none()
                        || has.clone().special(true) == token.clone().special(true) => {}
                Some(_) => {
                    return Err(self.refused(&format!(
                        "the added token {shown} has other flags than in {}; say the same in both",
                        self.file.display()
                    )));
                }
                None => {
                    tokenizer.add_tokens([token.clone()]).map_err(|e| unusable(&self.file, &e))?;
                    changed = true;
                }
            }
            let found = tokenizer.token_to_id(&token.content);
            if let (Some(id), Some(found)) = (id, found)
                && id != found
            {
                return Err(self.refused(&format!(
                    "the added token {shown} has the id {id}, but {found} is its place in {}; correct the id",
                    self.file.display()
                )));
            }
        }
        Ok(changed)
    }

    /// `transformers` 5 drops added tokens of a `tokenizer.json` with BERT's class that `added_tokens_decoder` lacks.
    fn check_tokens_kept(
        &self,
        tokenizer: &Tokenizer,
        wanted: &[(Option<u32>, AddedToken)],
        five: [u32; 5],
        drops: bool,
    ) -> Result<()> {
        let splits = self.config.get("split_special_tokens").and_then(Value::as_bool) == Some(true);
        let has = tokenizer.get_added_tokens_decoder();
        let mut has: Vec<_> = has.iter().filter(|(id, _)| !five.contains(id)).collect();
        has.sort_unstable_by_key(|&(id, _)| id);
        let lost =
            |token: &AddedToken| drops && !wanted.iter().any(|(_, other)| other.content == token.content);
        if let Some((_, token)) = has.iter().find(|(_, token)| lost(token)) {
            return Err(self.refused(&format!(
                "added_tokens_decoder lacks the added token {:?} of {}; releases of transformers differ in whether \
                 they keep it: add it there",
                token.content,
                self.file.display()
            )));
        }
        let is_five =
            |token: &AddedToken| tokenizer.token_to_id(&token.content).is_some_and(|id| five.contains(&id));
        let new = wanted.iter().map(|(_, token)| token).filter(|token| !is_five(token));
        match has.into_iter().map(|(_, token)| token).chain(new).find(|token| splits && token.special) {
            Some(token) => Err(self.refused(&format!(
                "split_special_tokens is true, which would split the added token {:?}; remove that setting",
                token.content
            ))),
            None => Ok(()),
        }
    }

    /// The tokens that the files add, in the order in which `transformers` adds them, with the ids that they give.
    fn added_tokens(&self) -> Result<Vec<(Option<u32>, AddedToken)>> {
        let named = self.named_tokens();
        let mut tokens = Vec::new();
        if let Some(Value::Object(decoder)) = self.config.get("added_tokens_decoder") {
            for (id, token) in decoder {
                let id = id.parse().ok().filter(|_| token.is_object());
                let token = added_token(token, false);
                let (Some(id), Some(token)) = (id, token) else {
                    return Err(self.refused("added_tokens_decoder is not a table of ids and tokens"));
                };
                tokens.push((Some(id), token));
            }
        }
        for (name, id) in &self.added {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                let path = self.file.with_file_name("added_tokens.json");
                Error::Input(format!(
                    "{}: {name:?} has no id; the file is a table of tokens and ids",
                    path.display()
                ))
            })?;
            let special = named.iter().any(|token| &token.content == name);
            tokens.push((Some(id), AddedToken::from(name.as_str(), special)));
        }
        tokens.sort_by_key(|&(id, _)| id);
        for token in named {
            if tokens.iter().all(|(_, other)| other.content != token.content) {
                tokens.push((None, token));
            }
        }
        Ok(tokens)
    }

    /// The tokens that have a role or are listed as special.
    fn named_tokens(&self) -> Vec<AddedToken> {
        let roles =
            ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
        let roles = roles.iter().filter_map(|role| self.setting(role));
        let lists = ["additional_special_tokens", "extra_special_tokens"];
        let listed = lists.iter().flat_map(|&key| [self.config.get(key), self.special.get(key)]).flatten();
        let listed = listed.flat_map(|list| match list {
            Value::Array(list) => list.iter().collect(),
            Value::Object(named) => named.values().collect(),
            _ => Vec::new(),
        });
        let mut tokens: Vec<AddedToken> = Vec::new();
        for token in roles.chain(listed).filter_map(|token| added_token(token, true)) {
            if tokens.iter().all(|other| other.content != token.content) {
                tokens.push(token);
            }
        }
        tokens
    }

    /// `transformers` 5 also adds the tokens of all other keys that end in `_token`; 4 does not.
    fn check_named(&self, tokenizer: &Tokenizer) -> Result<()> {
        let added = tokenizer.get_added_vocabulary().get_vocab();
        let standard = |key: &str| ROLES.contains(&key) || matches!(key, "bos_token" | "eos_token");
        let new = |value: &&Value| value.as_str().is_some_and(|name| !added.contains_key(name));
        let mut others = self.config.iter().filter(|(key, _)| key.ends_with("_token") && !standard(key));
        match others.find(|(_, value)| new(value)) {
            Some((key, value)) => Err(self.refused(&format!(
                "{key} is {value}, which only some releases of transformers add; move it to additional_special_tokens"
            ))),
            None => Ok(()),
        }
    }

    fn setting(&self, key: &str) -> Option<&Value> {
        self.special.get(key).or_else(|| self.config.get(key)).filter(|value| !value.is_null())
    }

    fn refuse_python(&self) -> Result<()> {
        let has_json = self.file.with_file_name("tokenizer.json").is_file();
        let auto = self.config.get("auto_map").map(|map| map.get("AutoTokenizer").unwrap_or(map));
        if let Some(auto) = auto.filter(|auto| !has_json || auto.get(1).is_some_and(Value::is_null)) {
            return Err(self.refused(&format!(
                "auto_map names a tokenizer in Python ({auto}), whose rules electra-fast does not have; save a \
                 tokenizer.json that has them and remove auto_map"
            )));
        }
        if let Some(class) = self.class.as_ref().filter(|class| IN_PYTHON.contains(&class.name.as_str())) {
            return Err(Error::Input(format!(
                "{}: {}, a tokenizer in Python whose rules electra-fast does not have; split the text with it first, \
                 or use a model with a tokenizer.json",
                self.file.display(),
                class.said
            )));
        }
        let changes = |value: &&Value| match value {
            Value::Null | Value::Bool(true) => false,
            Value::Array(list) => !list.is_empty(),
            _ => true,
        };
        let mut set = OF_PYTHON.iter().filter_map(|&key| Some((key, self.config.get(key).filter(changes)?)));
        match set.next().filter(|_| !has_json) {
            Some((key, value)) => Err(self.refused(&format!(
                "{key} is {value}, which tokenizers in Python alone follow; remove it, or save a tokenizer.json \
                 that has these rules"
            ))),
            None => Ok(()),
        }
    }

    pub fn refused(&self, what: &str) -> Error {
        Error::Input(format!("{}: {what}", self.file.with_file_name("tokenizer_config.json").display()))
    }
}

/// BERT's rules with the settings of this `tokenizer.json`, if it has them.
pub(super) fn bert_case(tokenizer: &Tokenizer) -> Option<Case> {
    let Some(NormalizerWrapper::BertNormalizer(bert)) = tokenizer.get_normalizer() else { return None };
    let ModelWrapper::WordPiece(model) = tokenizer.get_model() else { return None };
    let splits = matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::BertPreTokenizer(_)));
    let usual = model.continuing_subword_prefix == "##" && model.max_input_chars_per_word == 100;
    (splits && usual && bert.clean_text).then(|| Case {
        lowercase: bert.lowercase,
        strip_accents: bert.strip_accents.unwrap_or(bert.lowercase),
        chinese: bert.handle_chinese_chars,
    })
}

fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    matches!(tokenizer.get_model(), ModelWrapper::BPE(_))
        && tokenizer.get_normalizer().is_none()
        && matches!(tokenizer.get_pre_tokenizer(), Some(PreTokenizerWrapper::ByteLevel(rules)) if rules.use_regex)
}

fn is_sentence_piece(tokenizer: &Tokenizer) -> bool {
    let rules = serde_json::to_string(&(tokenizer.get_normalizer(), tokenizer.get_pre_tokenizer()));
    let has = |part: &str| rules.as_ref().is_ok_and(|rules| rules.contains(part));
    matches!(tokenizer.get_model(), ModelWrapper::Unigram(_))
        && has("Metaspace\"")
        && has("\"always\"")
        && (has("\"Precompiled\"") || tokenizer.get_normalizer().is_none() && has("\"WhitespaceSplit\""))
}

fn class_of(file: &Path, config: &Object, model: &Object) -> Option<Class> {
    let name = |table: &Object, key: &str| table.get(key).and_then(Value::as_str).map(str::to_owned);
    let said = |name: &str, key: &str, other: &str| {
        format!("{key} is {name:?} in {}", file.with_file_name(other).display())
    };
    let named = [(config, "tokenizer_config.json"), (model, "config.json")];
    let named = named.into_iter().find_map(|(table, file)| Some((name(table, "tokenizer_class")?, file)));
    if let Some((class, file)) = named {
        let stem = if class == "PreTrainedTokenizerFast" { &class } else { class.trim_end_matches("Fast") };
        return Some(Class { name: stem.to_owned(), said: said(&class, "tokenizer_class", file) });
    }
    let kind = name(model, "model_type")?;
    BERT_MODELS
        .contains(&kind.as_str())
        .then(|| Class { name: "BertTokenizer".to_owned(), said: said(&kind, "model_type", "config.json") })
}

fn content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str()).filter(|content| !content.is_empty())
}

/// A token from its name or its table of flags.
fn added_token(token: &Value, special: bool) -> Option<AddedToken> {
    let flag = |key: &str, default| token.get(key).and_then(Value::as_bool).unwrap_or(default);
    let special = special || flag("special", false);
    Some(
        AddedToken::from(content(token)?, special)
            .single_word(flag("single_word", false))
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .normalized(flag("normalized", !special)),
    )
}

fn object(path: &Path) -> Result<Object> {
    match read_if_there(path)? {
        Some(file) => serde_json::from_slice(&file).map_err(|e| unusable(path, &e)),
        None => Ok(Object::new()),
    }
}
