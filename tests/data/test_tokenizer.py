"""Vocabularies on disk: reading, casing, comparison, and errors."""

import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
import transformers
from in_process import run
from tokenizers import models, pre_tokenizers, processors, trainers

import electra_fast as ef
from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus, Tokenizer, write_tokenizer
from electra_fast.data.prepare import prepare
from electra_fast.errors import InputError
from electra_fast.huggingface.export import export, import_
from electra_fast.training.evaluate import evaluate
from electra_fast.training.pretrain import pretrain

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNCASED = {"cased": False, "strip_accents": True}
CASED = {"cased": True, "strip_accents": False}
LOWER = {"cased": False, "strip_accents": False}
JAPANESE = "がっこう で かがく を まなぶ か が か が"


def write_vocab(path, *words):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*SPECIAL, *words]) + "\n", encoding="utf-8")
    return path


class TestReading:
    def test_unreadable_file_is_reported(self, tmp_path):
        for name in ("none.txt", "none.json"):
            with pytest.raises(FileNotFoundError, match=f"{name}: not found"):
                Tokenizer(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="tokenizer.json: not found, nor vocab.txt or spm.model, nor any"):
            Tokenizer(tmp_path)
        bad = {
            "latin.txt": (b"caf\xe9", "invalid UTF-8 at byte 3"),
            "half.json": (b"{", "not a usable tokenizer"),
            "other.json": (b'{"a": 1}', "not a usable tokenizer"),
            "vocab.txt": ("\n".join([*SPECIAL[:-1], "a"]).encode(), r"no \[MASK\] in the vocabulary"),
        }
        for name, (content, reason) in bad.items():
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"{name}: {reason}"):
                Tokenizer(tmp_path / name)

    def test_tokenizer_is_opened_by_its_folder(self, tmp_path):
        vocab = write_vocab(tmp_path / "vocab.txt", "a", "A")
        assert Tokenizer(tmp_path).path == vocab
        write_tokenizer(tmp_path / "run/tokenizer", Tokenizer(vocab, cased=False), 512)
        run = Tokenizer(tmp_path / "run")
        assert run.path == tmp_path / "run/tokenizer/tokenizer.json"
        assert [ids.tolist() for ids in run.encode_batch(["A"])] == [[5]]
        (tmp_path / "run/tokenizer/tokenizer.json").unlink()
        assert Tokenizer(tmp_path / "run").options == UNCASED  # from tokenizer_config.json
        prepare(iter(["A a"]), vocab=vocab, cased=False, out=tmp_path / "shards", progress=False)
        corpus = Tokenizer(tmp_path / "shards")  # the manifest has the case of its vocabulary
        assert corpus.options == UNCASED and not corpus.casing_inferred


class TestCase:
    @pytest.fixture
    def text(self, tmp_path):
        (tmp_path / "text.txt").write_text(f"{JAPANESE}\n" * 50, encoding="utf-8")
        return tmp_path / "text.txt"

    @pytest.mark.parametrize(("flags", "options"), [(["--cased"], CASED), ([], LOWER), (["--strip-accents"], UNCASED)])
    def test_vocab_stores_case_and_prepare_uses_it(self, text, tmp_path, flags, options):
        vocab = tmp_path / "v/vocab.txt"
        assert run("vocab", text, "--out", vocab, "--size", 64, *flags).returncode == 0
        names = ["tokenizer.json", "tokenizer_config.json", "vocab.txt"]
        assert sorted(path.name for path in vocab.parent.iterdir()) == names
        tokenizer = Tokenizer(vocab)
        assert tokenizer.options == options and tokenizer.fast and not tokenizer.casing_inferred
        assert Tokenizer(vocab.parent).path.name == "tokenizer.json" and Tokenizer(vocab.parent).fast
        done = run("prepare", text, "--vocab", vocab, "--out", tmp_path / "shards")
        assert done.returncode == 0 and "judging" not in done.stderr, done.stderr
        assert Corpus(tmp_path / "shards").tokenizer_options == options
        decoded = Tokenizer.of(Corpus(tmp_path / "shards")).decode(Corpus(tmp_path / "shards")[0])
        assert ("が" in decoded) == (flags != ["--strip-accents"])
        assert Tokenizer(vocab, cased=flags != ["--cased"]).options != options  # explicit flags take precedence

    def test_tokenizer_json_without_vocab_txt(self, text, tmp_path):
        report = ef.vocab([text], out=tmp_path / "v/own.json", size=64, cased=True, progress=False)
        assert [path.name for path in (tmp_path / "v").iterdir()] == ["own.json"]
        ef.vocab([text], out=tmp_path / "w/vocab.txt", size=64, cased=True, progress=False)
        alone = Tokenizer(tmp_path / "v/own.json")
        other = Tokenizer(tmp_path / "w/vocab.txt")
        assert alone.fast and alone.vocab_size == report.num_entries
        assert alone.content_hash == other.content_hash
        assert alone.to_json() == other.to_json() == (tmp_path / "w/tokenizer.json").read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("words", "casing", "options"),
        [
            (["か", "が"], "uncased (text is lowercased, accents are kept)", LOWER),
            (["A", "が"], "cased", CASED),
            (["か"], "uncased (text is lowercased, accents are dropped)", UNCASED),
        ],
    )
    def test_guessed_case_is_reported_with_the_flag(self, text, tmp_path, words, casing, options):
        vocab = write_vocab(tmp_path / "vocab.txt", *words)
        done = run("prepare", text, "--vocab", vocab, "--out", tmp_path / "shards")
        [line] = [line for line in done.stderr.splitlines() if "assumed" in line]
        assert line.startswith(f"{vocab}: assumed {casing} from ")
        assert "--cased or --uncased" in line
        assert Corpus(tmp_path / "shards").tokenizer_options == options
        told = UNCASED if options == CASED else options  # by BERT's rule, or inferred from the entries
        assert Tokenizer(vocab, cased=False).options == told
        done = run("prepare", text, "--vocab", vocab, "--uncased", "--out", tmp_path / "told")
        assert done.returncode == 0 and "judging" not in done.stderr

    @pytest.mark.parametrize("flags", [[], ["--cased"]])
    def test_transformers_opens_the_folder_of_a_new_vocabulary(self, tmp_path, flags):
        text = "Ízes kór és kor. हिन्दी में किताब! ที่บ้าน มี แมว; Việt Nam Йод ещё, がか 日本語 한국어 İşık"
        (tmp_path / "text.txt").write_text(f"{text}\n" * 9, encoding="utf-8")
        assert run("vocab", tmp_path / "text.txt", "--out", tmp_path / "v/vocab.txt", *flags).returncode == 0
        expected = Tokenizer(tmp_path / "v").encode_batch([text])[0].tolist()
        opened = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "v"))
        assert opened(text, add_special_tokens=False)["input_ids"] == expected
        assert Tokenizer(tmp_path / "v").special_tokens["unk"] not in expected
        (tmp_path / "v/tokenizer.json").unlink()  # the settings in the other file are sufficient
        opened = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "v"))
        assert opened(text, add_special_tokens=False)["input_ids"] == expected
        assert Tokenizer(tmp_path / "v").encode_batch([text])[0].tolist() == expected

    def test_conflicting_tokenizer_json_is_an_error(self, tmp_path):
        vocab = write_vocab(tmp_path / "vocab.txt", "a")
        rules = json.loads(Tokenizer(vocab).to_json())
        rules["pre_tokenizer"] = {"type": "Whitespace"}
        (tmp_path / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
        with pytest.raises(ValueError, match="tokenizer.json: has the entries of .*vocab.txt but rules that"):
            Tokenizer(vocab)
        assert Tokenizer(vocab, cased=False).options == UNCASED


ODD_TEXTS = [
    "Don't stop, the café's naïve owner said.",
    "",
    " \t\n",
    "😀👍🏽 emoji👩\u200d🚀 and ﬁ ligature ½",
    "e\u0301 combining a\u030a and x\u0302\u0323",
    "עברית (שָׁלוֹם) العربية, then English",
    "中文字符和English混排，日本語テキスト 한국어",
    "control\x00 soft\u00adhyphen zero\u200bwidth \ufeffbom \ufffd",
    "İstanbul STRASSE straße ΣΊΣΥΦΟΣ",
    "[MASK] in the text, [CLS] too  " + "x" * 101,
]


@pytest.fixture(params=["uncased", "cased", "uncased with accents", "byte-level", "byte-level, trimmed"])
def odd_tokenizer(request, tmp_path):
    """A tokenizer.json with most characters of `ODD_TEXTS` and some words in its vocabulary."""
    if request.param.startswith("byte-level"):
        other = tokenizers.Tokenizer(models.BPE())
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if "trimmed" in request.param:
            other.post_processor = processors.ByteLevel(trim_offsets=True)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
        other.train_from_iterator(ODD_TEXTS * 3, trainer)
        other.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"
    characters = sorted({*"".join(ODD_TEXTS), *"".join(ODD_TEXTS).lower()} - {*"😀 \t\n语\u0302\x00"})
    pieces = [*characters, *(f"##{c}" for c in characters), "the", "caf", "##é", "café", "cafe", "strasse", "##ing"]
    vocab = write_vocab(tmp_path / "vocab.txt", *dict.fromkeys(pieces))
    lowercase = request.param != "cased"
    strip = request.param == "uncased"
    json_file = tmp_path / "tokenizer.json"
    json_file.write_text(Tokenizer(vocab, cased=not lowercase, strip_accents=strip).to_json(), encoding="utf-8")
    return json_file


def test_offsets_equal_the_tokenizers_package(odd_tokenizer):
    expected = tokenizers.Tokenizer.from_file(str(odd_tokenizer))
    expected.encode_special_tokens = True
    tokenizer = Tokenizer(odd_tokenizer)
    for text, pieces, ids in zip(
        ODD_TEXTS, tokenizer.encode_with_offsets(ODD_TEXTS), tokenizer.encode_batch(ODD_TEXTS), strict=True
    ):
        encoding = expected.encode(text, add_special_tokens=False)
        assert pieces.ids.tolist() == ids.tolist() == encoding.ids, text
        assert [tuple(place) for place in pieces.offsets.tolist()] == encoding.offsets, text
        assert pieces.words.tolist() == encoding.word_ids, text
        assert {array.dtype for array in pieces} == {np.dtype(np.int32)} and pieces.offsets.shape[1] == 2


@pytest.mark.parametrize(
    ("others", "command", "message"),
    [
        (["vocab.txt"], "vocab text.txt --out vocab.txt", "vocab.txt: exists and would be overwritten; choose"),
        (["tokenizer.json"], "vocab text.txt --out vocab.txt", "tokenizer.json: exists and would be overwritten"),
        ([], "vocab text.txt --out text.txt", "text.txt: is one of the inputs and would be overwritten"),
        ([], "vocab *.txt --out text.txt", "text.txt: is one of the inputs and would be overwritten"),
        (["vocab.txt"], "prepare vocab.txt --vocab vocab.txt --out shards", "vocab.txt: the vocabulary itself is amon"),
        (["vocab.txt"], "prepare . --vocab vocab.txt --out shards", "vocab.txt: the vocabulary itself is among the in"),
    ],
)
def test_existing_files_and_inputs_are_not_overwritten(tmp_path, monkeypatch, others, command, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words " * 50)
    for name in others:
        write_vocab(tmp_path / name, "some")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(*command.split(), *(["--size", 50] if command.startswith("vocab") else []))
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def tiny_config():
    keys = {"train.steps": "1", "train.batch_size": "4", "data.sequence_length": "32"}
    return Config.preset("tiny", "google").override(keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_corpus, tiny_vocab):
    """A run and its export, and corpora with the run's vocabulary and with others."""
    folder = tmp_path_factory.mktemp("told-apart")
    pretrain(tiny_corpus, config=tiny_config(), out=folder / "run")
    export(folder / "run", out=folder / "export")
    words = tiny_vocab.read_text(encoding="utf-8").split()[len(SPECIAL) :]
    write_vocab(folder / "shuffled.txt", *reversed(words))
    write_vocab(folder / "smaller.txt", *words[:200])
    documents = ["the value of the expression is a name"] * 60
    for name, vocab, cased in [
        ("same", folder / "run", None),
        ("shuffled", folder / "shuffled.txt", None),
        ("smaller", folder / "smaller.txt", None),
        ("cased", tiny_vocab, True),
    ]:
        prepare(iter(documents), vocab=vocab, cased=cased, out=folder / name, progress=False)
    return folder


class TestVocabulariesAreDistinguished:
    def test_equal_vocabularies_have_equal_hashes(self, folder, tiny_corpus, tiny_vocab):
        places = [tiny_vocab, folder / "run", folder / "export", folder / "export/generator/vocab.txt"]
        hashes = {Tokenizer(place).content_hash for place in places}
        hashes |= {Tokenizer.of(Corpus(corpus)).content_hash for corpus in (tiny_corpus, folder / "same")}
        [content_hash] = hashes
        assert re.fullmatch("[0-9a-f]{32}", content_hash)
        for other in ("shuffled", "smaller", "cased"):
            assert Tokenizer.of(Corpus(folder / other)).content_hash != content_hash

    @pytest.mark.parametrize(
        ("source", "other"), [("run", "shuffled"), ("export", "smaller"), ("run/checkpoints/step-1", "cased")]
    )
    def test_evaluate_refuses_another_vocabulary(self, folder, tiny_corpus, source, other):
        run_tokenizer, other_tokenizer = (Tokenizer.of(Corpus(corpus)) for corpus in (tiny_corpus, folder / other))
        with pytest.raises(ValueError, match="tokenizer.json .* is not the vocabulary of the corpus, ") as caught:
            evaluate(folder / source, folder / other)
        for tokenizer in (run_tokenizer, other_tokenizer):
            assert f"{tokenizer.vocab_size:,} entries" in str(caught.value)
            assert tokenizer.content_hash in str(caught.value)
        assert "prepare the text with --vocab" in str(caught.value)

    def test_imported_run_refuses_another_vocabulary(self, folder, tmp_path):
        assert evaluate(folder / "run", folder / "same", max_batches=1)["rows"]
        import_(folder / "export", out=tmp_path / "imported")
        with pytest.raises(ValueError, match="is not the vocabulary of the corpus"):
            pretrain(folder / "cased", config=tiny_config(), out=tmp_path / "imported")
        assert pretrain(folder / "same", config=tiny_config(), out=tmp_path / "imported").step == 1

    def test_generator_needs_the_vocabulary_of_the_discriminator(self, folder, tmp_path):
        mixed = shutil.copytree(folder / "export", tmp_path / "mixed")
        write_tokenizer(mixed / "generator", Tokenizer(folder / "shuffled.txt"), 512)
        with pytest.raises(ValueError, match="generator/tokenizer.json: must have the same vocabulary as"):
            import_(mixed, out=tmp_path / "run")
        for role in ("discriminator", "generator"):
            write_tokenizer(mixed / role, Tokenizer(write_vocab(tmp_path / "large.txt", *map(str, range(3000)))), 512)
        with pytest.raises(ValueError, match="has 3,005 entries, but the model has [0-9]+"):
            import_(mixed, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_run_without_tokenizer_is_refused(self, folder, tmp_path):
        run = shutil.copytree(folder / "run", tmp_path / "run")
        shutil.rmtree(run / "tokenizer")
        for use in (
            lambda: evaluate(run, folder / "same"),
            lambda: pretrain(folder / "same", config=tiny_config(), out=run),
        ):
            with pytest.raises(FileNotFoundError, match="tokenizer: no such folder; copy the run's tokenizer back"):
                use()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("model.vocab.##b", 2**32 - 1, '"##b" has id 4294967295; ids must be below 16777216'),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "not a usable tokenizer"),
        # Errors that the library raises at the first text, or at the first ids.
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "not a usable tokenizer"),
        ("decoder", {"type": "Strip", "content": "a", "start": 9, "stop": 9}, "not a usable tokenizer"),
        ("version", '1.0" "x": "', r"not a usable tokenizer \(expected .* at line 1 column"),
        # Not an error: words may be as long as the text.
        ("model.max_input_chars_per_word", 2**63, None),
    ],
)
def test_library_panic_is_one_line(tmp_path, capfd, part, value, message):
    rules = json.loads(Tokenizer(write_vocab(tmp_path / "vocab.txt", "a", "##b")).to_json())
    *parents, name = part.split(".")
    table = rules
    for parent in parents:
        table = table[parent]
    table[name] = value
    path = tmp_path / "hostile" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(rules).replace('\\"', '"'))

    def use():
        tokenizer = Tokenizer(path)
        tokenizer.encode_batch(["ab " + 4000 * "é" + 4000 * "b"])
        tokenizer.decode([5, 6])

    if message is None:
        use()
    else:
        with pytest.raises(InputError, match=f"hostile/tokenizer.json: {message}"):
            use()
    assert "panicked" not in capfd.readouterr().err
