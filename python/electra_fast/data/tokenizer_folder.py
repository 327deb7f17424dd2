"""Opening tokenizers with the settings in the other files of a Hugging Face folder.

These are `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, and `config.json` for the class. A
setting that changes ids in `transformers` 4 or 5 is honored, or rejected by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from electra_fast import _data
from electra_fast.data.pair_template import bert_post_processor
from electra_fast.data.sentence_piece import sentence_piece_rules
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object

Object = dict[str, Any]


def _classes(names: str) -> set[str]:
    return {f"{name}Tokenizer" for name in names.split()}


# Classes without the suffix `Fast`: with BERT's rules, and the model types with these rules if no class is set; ...
BERT = _classes("Bert Electra DistilBert ConvBert MobileBert SqueezeBert LayoutLM Lxmert Realm RetriBert")
BERT_MODELS = ("bert", "electra", "distilbert", "convbert", "mobilebert", "squeezebert", "megatron-bert", "ernie")
# ... with byte-level rules; `transformers` 5 ignores any other rules in their files; ...
BYTE_LEVEL = _classes("Roberta GPT2 Longformer Bart LED")
# ... with SentencePiece's; `transformers` 5 keeps only the character normalization of their files; ...
SENTENCE_PIECE = _classes("XLMRoberta Camembert")
# ... and of DeBERTa V2 and V3, where 4 follows the file, as we do, and 5 uses NFC as character normalization; ...
DEBERTA = "DebertaV2Tokenizer"
# ... and classes written in Python, which `transformers` uses even if there is a `tokenizer.json`.
IN_PYTHON = _classes(
    "Bartpho BertGeneration BertJapanese Bertweet BioGpt ByT5 Canine CpmAnt CTRL Esm Flaubert GPTNeoXJapanese GPTSw3 "
    "MLuke MyT5 Phobert ProphetNet RoCBert Tapas XLM"
)
# Settings that only tokenizers in Python follow. Null, an empty list and `true` have no effect.
OF_PYTHON = (
    "never_split do_basic_tokenize word_tokenizer_type subword_tokenizer_type do_word_tokenize do_subword_tokenize"
).split()
USUAL_NAMES = ("[PAD] <pad>", "[UNK] <unk>", "[CLS] <cls> <s>", "[SEP] <sep> </s>", "[MASK] <mask>")
FILES = ("tokenizer.json", "vocab.txt", "spm.model")
"""Files that a tokenizer can be opened from, the preferred one first."""
ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEBERTA_NAMES = dict(zip(NAMED, "[CLS] [SEP] [UNK] [SEP] [PAD] [CLS] [MASK]".split(), strict=True))
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Case(NamedTuple):
    """The settings of BERT's normalizer; with `chinese`, each Chinese character is a word."""

    lowercase: bool
    strip_accents: bool
    chinese: bool = True


def open_tokenizer(
    path: str, lowercase: bool | None = None, strip_accents: bool | None = None
) -> tuple[_data.Tokenizer, bool]:
    """Opens a file or a folder as `data.corpus.Tokenizer` documents; also returns whether its case was inferred."""
    _data.url_of(path)  # the error for a missing file must not show a secret in it
    path = _locate(path)
    if (known := _data.Tokenizer.beside_manifest(path, lowercase, strip_accents)) is not None:
        return known, False
    if os.path.basename(path) == "spm.model" and os.path.exists(path):
        return _open_sentence_piece(path, lowercase is not None or strip_accents is not None), False
    if not path.endswith(".json"):
        return _open_vocab(path, lowercase, strip_accents)
    if lowercase is not None or strip_accents is not None or not os.path.exists(path):
        return _data.Tokenizer(path, lowercase, strip_accents), False  # raises
    return Configured(path).tokenizer(), False


def _locate(path: str) -> str:
    """The tokenizer's file: the path itself, or the file in a folder (in a run or an export, one level down)."""
    if not os.path.isdir(path):
        return path
    for folder in ("", "tokenizer", "discriminator", "generator"):
        for name in FILES:
            if os.path.isfile(file := os.path.join(path, folder, name)):
                return file
    raise FileNotFoundError(
        f"{os.path.join(path, 'tokenizer.json')}: not found, nor vocab.txt or spm.model, nor any of them in "
        "tokenizer/, discriminator/ or generator/ in that folder; pass a tokenizer's file or its folder"
    )


class Configured:
    """A `tokenizer.json` with the settings of its folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.folder = Folder(path)
        self.opened = _data.Tokenizer(path, None, None, self.folder.names())
        vocab = _beside(path, "vocab.txt")
        if os.path.exists(vocab) and (disagreement := _data.Tokenizer.disagreement(vocab, path)):
            raise InputError(disagreement)
        self.rules = Rules(self.opened)
        self.case = self.folder.checked_case(self.rules)
        self.added = self.folder.add_tokens(self.rules)

    def tokenizer(self) -> _data.Tokenizer:
        case = None if self.case == self.rules.bert_case() else self.case
        return _rewritten(self.path, self.opened, case, self.added) if case or self.added else self.opened


def _open_vocab(path: str, lowercase: bool | None, strip_accents: bool | None) -> tuple[_data.Tokenizer, bool]:
    folder = Folder(path)
    names = folder.names()
    plain = _data.Tokenizer(path, None, None, names)
    guess = Case(bool(plain.settings[0]), bool(plain.settings[1]))
    other = _json_beside(path)
    stored = folder.stored_case() if other is None else other.case or other.rules.bert_case()
    requested = None
    if lowercase is not None:
        alike = [case.strip_accents for case in (stored, guess) if case and case.lowercase == lowercase]
        requested = (lowercase, [*alike, lowercase][0] if strip_accents is None else strip_accents)
    case = folder.case(guess, requested) if other is None else _case_beside(path, other.path, stored, requested)
    inferred = case is None
    case = case or guess
    if strip_accents is not None:
        case = case._replace(strip_accents=strip_accents)
    tokenizer = plain if case[:2] == guess[:2] else _data.Tokenizer(path, case.lowercase, case.strip_accents, names)
    rules = Rules(tokenizer)
    added = folder.add_tokens(rules) if other is None else other.rules.own_tokens()
    if case.chinese and not added and _has_usual_names(tokenizer):
        return tokenizer, inferred
    return _rewritten(path, tokenizer, case, added), inferred


def _open_sentence_piece(path: str, is_case_given: bool) -> _data.Tokenizer:
    if is_case_given:
        raise InputError(f"{path}: cased and strip_accents apply to a vocab.txt only; an spm.model has its own")
    folder = Folder(path)
    if folder.class_name != DEBERTA:
        raise InputError(
            f"{path}: {folder.class_said}, but an spm.model does not have its rules; set {DEBERTA} if they fit, or "
            "save that tokenizer as a tokenizer.json"
        )
    rules = sentence_piece_rules(path, folder.config.get("do_lower_case") is True)
    ids = {piece: number for number, (piece, _) in enumerate(rules["model"]["vocab"])}
    added = {token["id"]: token for token in rules["added_tokens"]}
    for _, token in folder.added_tokens():
        number = ids.setdefault(token["content"], len(ids))
        added[number] = {"id": number} | token
    rules["added_tokens"] = [token for _, token in sorted(added.items())]
    pad, unk, cls, sep, mask = ((name, ids[name]) for name in map(str, folder.names()))
    rules["post_processor"] = bert_post_processor(cls, sep)
    special = (pad[1], unk[1], cls[1], sep[1], mask[1])
    opened = _data.Tokenizer.restored(path, ("tokenizer.json", json.dumps(rules).encode()), (None, None), special)
    checked = Rules(opened)
    folder.checked_case(checked)
    folder.add_tokens(checked)
    return opened


def _json_beside(vocab: str) -> Configured | None:
    path = _beside(vocab, "tokenizer.json")
    if not os.path.exists(path):
        return None
    # A vocabulary with another name may be unrelated.
    if os.path.basename(vocab) != "vocab.txt" and _data.Tokenizer.disagreement(vocab, path):
        return None
    return Configured(path)


def _case_beside(path: str, other: str, stored: Case | None, requested: tuple[bool, bool] | None) -> Case:
    if requested is not None:
        return Case(*requested, stored is None or stored.chinese)
    if stored is None:
        raise InputError(
            f"{other}: has the entries of {path} but rules that a vocab.txt cannot have; open {other}, or pass "
            f"--cased or --uncased for {path}"
        )
    return stored


def _has_usual_names(tokenizer: _data.Tokenizer) -> bool:
    ids = ([tokenizer.token_to_id(name) for name in names.split()] for names in USUAL_NAMES)
    return [next((i for i in role if i is not None), None) for role in ids] == list(tokenizer.special_tokens)


def _rewritten(path: str, opened: _data.Tokenizer, case: Case | None, added: list[Object]) -> _data.Tokenizer:
    """The tokenizer of a complete `tokenizer.json` with this case and these added tokens, with or without ids."""
    rules = json.loads(opened.to_json())
    if case is not None:
        rules["normalizer"] |= {
            "handle_chinese_chars": case.chinese,
            "strip_accents": case.strip_accents,
            "lowercase": case.lowercase,
        }
    rules["added_tokens"] += [{"id": 0} | token for token in added]
    special = opened.special_tokens
    changed = _data.Tokenizer.restored(path, ("tokenizer.json", json.dumps(rules).encode()), (None, None), special)
    complete = changed.to_json().encode()
    return _data.Tokenizer.restored(path, ("tokenizer.json", complete), (None, None), special)


class Rules:
    """Everything about a tokenizer except its entries."""

    def __init__(self, tokenizer: _data.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.five = tokenizer.special_tokens
        rules = json.loads(tokenizer.rules())
        self.normalizer: Object = rules["normalizer"] or {}
        self.splitter: Object = rules["pre_tokenizer"] or {}
        self.model: str = rules["model"]
        self.unknown: int | None = rules["unknown"]
        self.has_usual_pieces: bool = rules["has_usual_pieces"]
        self.added: dict[int, Object] = {token.pop("id"): token for token in rules["added_tokens"]}
        self.num_entries: int = rules["num_entries"]

    def own_tokens(self) -> list[Object]:
        return [token for number, token in sorted(self.added.items()) if number not in self.five]

    def id_of(self, name: str) -> int | None:
        added = next((number for number, token in self.added.items() if token["content"] == name), None)
        return self.tokenizer.token_to_id(name) if added is None else added

    def add(self, token: Object) -> int:
        """Adds a token like the `tokenizers` crate: with the id of its entry or the next free id."""
        number = self.id_of(token["content"])
        number = max([self.num_entries, *(known + 1 for known in self.added)]) if number is None else number
        self.added[number] = token
        return number

    def bert_case(self) -> Case | None:
        splits = self.splitter.get("type") == "BertPreTokenizer" and self.has_usual_pieces
        if self.normalizer.get("type") != "BertNormalizer" or not splits or not self.normalizer["clean_text"]:
            return None
        lowercase = self.normalizer["lowercase"]
        strip = self.normalizer["strip_accents"]
        return Case(lowercase, lowercase if strip is None else strip, self.normalizer["handle_chinese_chars"])

    def is_byte_level(self) -> bool:
        """Returns whether a byte-level class of `transformers` would have the same rules."""
        splits = self.splitter.get("type") == "ByteLevel" and self.splitter["use_regex"]
        return self.model == "BPE" and not self.normalizer and splits

    def is_sentence_piece(self) -> bool:
        """Returns whether a SentencePiece class of `transformers` would have the same rules."""
        text = json.dumps([self.normalizer, self.splitter])
        if self.model != "Unigram" or 'Metaspace"' not in text or '"always"' not in text:
            return False
        return '"Precompiled"' in text or (not self.normalizer and '"WhitespaceSplit"' in text)


class Folder:
    """The settings in the folder of a tokenizer's file. Rejects settings that are not supported here."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.place = _beside(file, "tokenizer_config.json")
        self.config = _object(self.place)
        # Both are ignored if there is an `added_tokens_decoder`.
        legacy = "added_tokens_decoder" not in self.config
        self.special = _object(_beside(file, "special_tokens_map.json")) if legacy else {}
        self.added = _object(_beside(file, "added_tokens.json")) if legacy else {}
        self.class_name, self.class_said = self._class()
        self.is_bert = self.class_name in BERT
        if self.class_name == DEBERTA:  # has these names unless the files set others
            names_set = {key: self._setting(key) for key in DEBERTA_NAMES if _content(self._setting(key))}
            self.special = {key: value for key, value in self.special.items() if key not in DEBERTA_NAMES}
            self.config |= DEBERTA_NAMES | names_set
        self._refuse_python()

    def _class(self) -> tuple[str, str]:
        try:
            model = _object(_beside(self.file, "config.json"))
        except (OSError, InputError):
            model = {}
        for table, name in ((self.config, "tokenizer_config.json"), (model, "config.json")):
            if isinstance(name_of_class := table.get("tokenizer_class"), str):
                is_plain = name_of_class == "PreTrainedTokenizerFast"
                stem = name_of_class if is_plain else name_of_class.removesuffix("Fast")
                return stem, f"tokenizer_class is {_shown(name_of_class)} in {_beside(self.file, name)}"
        kind = model.get("model_type")
        said = f"model_type is {_shown(kind)} in {_beside(self.file, 'config.json')}"
        if kind in BERT_MODELS:
            return "BertTokenizer", said
        if kind == "deberta-v2" or os.path.basename(self.file) == "spm.model":
            return DEBERTA, said
        return "", ""

    def _refuse_python(self) -> None:
        has_json = os.path.isfile(_beside(self.file, "tokenizer.json"))
        if "auto_map" in self.config:
            auto = self.config["auto_map"]
            auto = auto.get("AutoTokenizer", auto) if isinstance(auto, dict) else auto
            if not has_json or (isinstance(auto, list) and len(auto) > 1 and auto[1] is None):
                self._refuse(
                    f"auto_map names a tokenizer in Python ({_shown(auto)}), whose rules electra-fast does not have; "
                    "save a tokenizer.json with these rules and remove auto_map"
                )
        if self.class_name in IN_PYTHON:
            raise InputError(
                f"{self.file}: {self.class_said}, a tokenizer in Python whose rules electra-fast does not have; split "
                "the text with it first, or use a model with a tokenizer.json"
            )
        for key in OF_PYTHON:
            value = self.config.get(key)
            if not (value is None or value is True or value == [] or has_json):
                self._refuse(
                    f"{key} = {_shown(value)}: has an effect on tokenizers in Python only; remove it, or save a "
                    "tokenizer.json with these rules"
                )

    def _refuse(self, reason: str) -> NoReturn:
        raise InputError(f"{self.place}: {reason}")

    def _setting(self, key: str) -> Any:
        return self.special[key] if key in self.special else self.config.get(key)

    def _flag(self, key: str) -> bool | None:
        value = self.config.get(key)
        return value if isinstance(value, bool) else None

    def names(self) -> tuple[str | None, ...]:
        return tuple(_content(self._setting(role)) for role in ROLES)

    def stored_case(self) -> Case | None:
        lowercase = self._flag("do_lower_case")
        strip = self._flag("strip_accents")
        return None if lowercase is None else Case(lowercase, lowercase if strip is None else strip)

    def case(self, guess: Case, requested: tuple[bool, bool] | None) -> Case | None:
        """The requested case of a `vocab.txt`, or else the case stored in the folder, if any."""
        if self.class_name and not self.is_bert:
            raise InputError(
                f"{self.file}: {self.class_said}, but a vocab.txt does not have its rules; save that tokenizer as a "
                "tokenizer.json, or set BertTokenizer if the rules are BERT's"
            )
        stored = self._flag("do_lower_case")
        chinese = self._flag("tokenize_chinese_chars")
        if requested is None and stored is None and self.is_bert and not guess.strip_accents:
            self._refuse(
                f"no do_lower_case, so transformers lowercases and strips accents, but {self.file} has entries with "
                'capitals or accents; add "do_lower_case": false, or pass --cased or --uncased'
            )
        is_stored = stored is not None or self.is_bert
        if requested is None and not is_stored and chinese is None:
            return None
        if requested is None:
            lowercase = guess.lowercase if stored is None else stored
            strip = self._flag("strip_accents")
            requested = lowercase, (lowercase if is_stored else guess.strip_accents) if strip is None else strip
        return Case(*requested, chinese is not False)

    def checked_case(self, rules: Rules) -> Case | None:
        """The case of a `tokenizer.json` under its class in `transformers`; None without BERT's rules."""
        name = self.class_name
        unknown = rules.five[1]
        if rules.unknown is not None and rules.unknown != unknown:
            ours, other = (_shown(rules.tokenizer.id_to_token(number)) for number in (unknown, rules.unknown))
            self._refuse(f"unk_token is {ours}, but {other} in the model of {self.file}; use the same in both")
        if name in BYTE_LEVEL and not rules.is_byte_level():
            self._refuse_rules("byte-level BPE")
        if name in SENTENCE_PIECE and not rules.is_sentence_piece():
            self._refuse_rules("SentencePiece's")
        if name == DEBERTA:
            self._check_deberta(rules)
        self._check_prefix_space(rules, name in BYTE_LEVEL or name == "PreTrainedTokenizerFast")
        has = rules.bert_case()
        if has is None and self.is_bert:
            self._refuse_rules("BERT's")
        return self._wanted_case(rules, has) if has and (self.is_bert or not name) else None

    def _check_deberta(self, rules: Rules) -> None:
        text = json.dumps([rules.normalizer, rules.splitter])
        if rules.model != "Unigram" or '"Metaspace"' not in text:
            self._refuse_rules("SentencePiece's")
        for key, default, mark in (
            ("do_lower_case", False, '"Lowercase"'),
            ("split_by_punct", False, '"Punctuation"'),
            ("add_prefix_space", True, '"always"'),
        ):
            value = self._flag(key)
            if (default if value is None else value) != (mark in text):
                said = "not set" if value is None else _shown(value)
                self._refuse(
                    f"{key} is {said}, but {self.file} has other rules, and releases of transformers differ in which "
                    "they follow; use the same in both"
                )

    def _refuse_rules(self, than: str) -> NoReturn:
        raise InputError(
            f"{self.file}: has other rules than {than}, but {self.class_said}, and releases of transformers differ in "
            'which they follow; set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json if these '
            "rules are right"
        )

    def _wanted_case(self, rules: Rules, has: Case) -> Case:
        lowercase = self._flag("do_lower_case")
        chinese = self._flag("tokenize_chinese_chars")
        default = Case(True, True) if self.is_bert else has
        wanted_lowercase = default.lowercase if lowercase is None else lowercase
        follows = lowercase is not None and rules.normalizer["strip_accents"] is None
        if "strip_accents" in self.config:
            strip = self._flag("strip_accents")
            strip = wanted_lowercase if strip is None else strip
        else:
            strip = wanted_lowercase if follows or self.is_bert else has.strip_accents
        wanted = Case(wanted_lowercase, strip, default.chinese if chinese is None else chinese)
        silent = (lowercase is None, "strip_accents" not in self.config and not follows, chinese is None)
        keys = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
        for key, is_silent, current, default_value in zip(keys, silent, has, wanted, strict=True):
            if is_silent and current != default_value:
                self._refuse(
                    f"no {key}: {_shown(current)} in {self.file}, but {_shown(default_value)} in transformers; "
                    f'add "{key}": {_shown(current)}, or the value that the model was trained with'
                )
        return wanted

    def _check_prefix_space(self, rules: Rules, is_set: bool) -> None:
        """Checks `add_prefix_space`: `transformers` 4 sets it for byte-level rules, by default false; 5 not always."""
        if rules.splitter.get("type") != "ByteLevel":
            return
        flag = self._flag("add_prefix_space")
        has = rules.splitter["add_prefix_space"]
        if ((has and not is_set) if flag is None else flag) != has:
            said = "not set" if flag is None else _shown(flag)
            self._refuse(
                f"add_prefix_space is {said}, but {_shown(has)} in {self.file}, and releases of transformers differ in "
                "which they follow; use the same in both"
            )

    def add_tokens(self, rules: Rules) -> list[Object]:
        wanted = self.added_tokens()
        new = []
        decoder = "added_tokens_decoder" in self.config
        self._check_named(rules)
        self._check_tokens_kept(rules, [token for _, token in wanted], decoder and self.is_bert)
        for number, token in wanted:
            shown = _shown(token["content"])
            known = rules.id_of(token["content"])
            if known in rules.five and number in (None, known):
                continue
            if known in rules.added:
                if decoder and number is not None and rules.added[known] | {"special": 0} != token | {"special": 0}:
                    self._refuse(f"the added token {shown} has other flags than in {self.file}; use the same in both")
                actual = known
            else:
                actual = rules.add(token)
                new.append(token)
            if number not in (None, actual):
                place = f"{actual} in {self.file}"
                self._refuse(f"the added token {shown} has id {number}, but {place}; correct the id")
        return new

    def _check_tokens_kept(self, rules: Rules, wanted: list[Object], drops: bool) -> None:
        """Checks that no release drops tokens: `transformers` 5 drops BERT's that `added_tokens_decoder` lacks."""
        has = rules.own_tokens()
        names = {token["content"] for token in wanted}
        for token in has:
            if drops and token["content"] not in names:
                self._refuse(
                    f"added_tokens_decoder lacks the added token {_shown(token['content'])} of {self.file}; releases "
                    "of transformers differ in whether they keep it, so add it"
                )
        if self._flag("split_special_tokens"):
            for token in has + [token for token in wanted if rules.id_of(token["content"]) not in rules.five]:
                if token["special"]:
                    self._refuse(
                        "split_special_tokens is true, which would split the added token "
                        f"{_shown(token['content'])}; remove that setting"
                    )

    def added_tokens(self) -> list[tuple[int | None, Object]]:
        """The tokens that the files add, with their ids in these files, in the order of `transformers`."""
        named = list(self._named_tokens())
        special = {token["content"] for token in named}
        tokens: list[tuple[int, Object]] = []
        decoder = self.config.get("added_tokens_decoder")
        for number, value in decoder.items() if isinstance(decoder, dict) else ():
            token = _added_token(value, False) if isinstance(value, dict) else None
            if token is None or not (number.isascii() and number.isdecimal() and len(number) <= 10):
                self._refuse("added_tokens_decoder must be a table of ids and tokens")
            tokens.append((int(number), token))
        for name, number in self.added.items():
            if type(number) is not int or not 0 <= number < 1 << 32:
                place = _beside(self.file, "added_tokens.json")
                raise InputError(f"{place}: {_shown(name)} has no id; the file must be a table of tokens and ids")
            if (token := _added_token(name, name in special)) is not None:
                tokens.append((number, token))
        tokens.sort(key=lambda pair: pair[0])
        known = {token["content"] for _, token in tokens}
        return [*tokens, *((None, token) for token in named if token["content"] not in known)]

    def _named_tokens(self) -> Iterator[Object]:
        values = [self._setting(role) for role in NAMED]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            for listed in (self.config.get(key), self.special.get(key)):
                values += listed if isinstance(listed, list) else listed.values() if isinstance(listed, dict) else []
        names: set[str] = set()
        for token in (_added_token(value, True) for value in values):
            if token is not None and token["content"] not in names:
                names.add(token["content"])
                yield token

    def _check_named(self, rules: Rules) -> None:
        """Checks other keys that end in `_token`: `transformers` 5 adds their tokens, 4 does not."""
        added = {token["content"] for token in rules.added.values()}
        for key, value in self.config.items():
            if key.endswith("_token") and key not in NAMED and isinstance(value, str) and value not in added:
                self._refuse(
                    f"{key} = {_shown(value)}: only some releases of transformers add this token; move it to "
                    "additional_special_tokens"
                )


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def _added_token(token: Any, special: bool) -> Object | None:
    if (content := _content(token)) is None:
        return None
    flags = {key: token.get(key) for key in FLAGS} if isinstance(token, dict) else {}
    special = special or flags.get("special") is True
    default = dict.fromkeys(FLAGS, False) | {"normalized": not special}
    flags_set = {key: value for key, value in flags.items() if isinstance(value, bool)}
    return {"content": content} | default | flags_set | {"special": special}


def _object(path: str) -> Object:
    if not os.path.exists(path):
        return {}
    content = read_object(Path(path))
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}: unpaired surrogate; fix it") from None
    return content


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), name)
