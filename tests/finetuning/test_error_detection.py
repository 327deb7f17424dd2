"""Error detection equals the discriminator's output for texts of any script and length and from any source."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from squad_reference import chunk_of_most_context, chunk_spans
from tiny_run import tiny_config

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.data.corpus import Tokenizer, write_tokenizer
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.finetuning.error_detection import read_detector
from electra_fast.huggingface.export import export
from electra_fast.model.model import Electra

SHORT = "The value of the expression isn't a name."
LONG = " ".join(f"the class of number {i} returns objekt zzz, value and name;" for i in range(9))
TEXTS = [SHORT, "", LONG, "name", " \n ", "x" * 120, SHORT.upper()]


def save_run(folder, vocab, **changes):
    """Saves a run at step 0 with parameters large enough for probabilities from 0 to 1."""
    tokenizer = Tokenizer(vocab)
    recipe = changes.pop("recipe", "google")
    config = tiny_config(recipe).override({"model.vocab_size": str(tokenizer.vocab_size)} | changes)
    model = Electra(config)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.2)
    write_tokenizer(folder / "tokenizer", tokenizer, config.model.max_positions)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    checkpoint.save(folder, model, None, TrainState(), keep=1)
    return folder


@pytest.mark.process
def test_forked_process_computes_after_its_parent(tmp_path, tiny_vocab, capfd):
    """A fork has none of OpenMP's threads; a child that waits for them is killed by its alarm."""
    save_run(tmp_path, tiny_vocab)
    model = ef.load(tmp_path)
    ids = torch.randint(5, 500, (64, 32))
    computations = (lambda: model.detect([LONG] * 40), lambda: model.discriminator_logits(ids).sum().item())
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            expected = [compute() for compute in computations]
            for compute, value in zip(computations, expected, strict=True):
                if not (child := os.fork()):
                    signal.alarm(20)
                    os._exit(0 if repr(compute())[:20] == repr(value)[:20] else 1)
                assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)
    assert capfd.readouterr().err.count("was forked after its parent had computed") == 2


def probabilities(answer):
    return [word["probability"] for word in answer["words"]]


class Reference:
    """`transformers` on an exported discriminator, one text at a time, without padding."""

    def __init__(self, folder):
        [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        self.model = getattr(transformers, name).from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def pieces(self, ids):
        """Returns the probability of each piece of an unchunked text."""
        row = [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]
        logits = self.model(torch.tensor([row])).logits[0].double()
        has_labels = self.model.config.architectures == ["ModernBertForTokenClassification"]
        replaced = logits.softmax(-1)[:, 1] if has_labels else torch.sigmoid(logits)
        return list(replaced[1:-1].tolist())

    def words(self, text, length):
        """Returns the probability that any piece of a word is replaced, each in the chunk with the most context."""
        encoding = self.tokenizer(text, add_special_tokens=False).encodings[0]
        room = length - 2
        spans = chunk_spans(len(encoding.ids), room, room // 2)
        chunks = [self.pieces(encoding.ids[start : start + length]) for start, length in spans]
        by_word = {}
        for piece, word in enumerate(encoding.word_ids):
            chunk = chunk_of_most_context(spans, piece)
            by_word[word] = 1 - (1 - by_word.get(word, 0.0)) * (1 - chunks[chunk][piece - spans[chunk][0]])
        return list(by_word.values())


@pytest.fixture(scope="module")
def exported(tmp_path_factory, whole_run):
    folder = tmp_path_factory.mktemp("errors") / "export"
    export(whole_run, out=folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_vocab):
    return save_run(tmp_path_factory.mktemp("large") / "run", tiny_vocab)


@pytest.fixture(scope="module")
def detector(run):
    return ef.load(run)


class TestProbabilities:
    @pytest.mark.parametrize("recipe", ["google", "modern"])
    def test_probabilities_equal_transformers(self, tmp_path, tiny_vocab, recipe):
        run = save_run(tmp_path / "run", tiny_vocab, recipe=recipe)
        export(run, out=tmp_path / "export", unfinished=True)
        reference = Reference(tmp_path / "export/discriminator")
        detector = ef.load(run)
        everything = []
        answers = detector.detect(iter(TEXTS))
        for text, answer in zip(TEXTS, answers, strict=True):
            expected = reference.words(text, length=16)
            assert probabilities(answer) == pytest.approx(expected, abs=1e-5), text
            assert answer["score"] == pytest.approx(np.mean(expected) if expected else 0, abs=1e-5)
            everything += expected
            [alone] = detector.detect([text])
            assert probabilities(alone) == pytest.approx(probabilities(answer), abs=1e-5)
        assert len(everything) > 100 and max(everything) - min(everything) > 0.5

    def test_all_sources_of_a_model_agree(self, whole_run, exported, tmp_path):
        alone = shutil.copytree(exported / "discriminator", tmp_path / "alone")
        [last] = sorted((whole_run / "checkpoints").iterdir(), key=lambda path: int(path.name[5:]))[-1:]
        expected = read_detector(whole_run)
        for source in (last, exported, alone, str(alone)):
            other = read_detector(source)
            assert other.sequence_length == expected.sequence_length == 16
            assert other.predict(TEXTS) == expected.predict(TEXTS), source

    @pytest.mark.parametrize(
        "changes",
        [{"generator.kind": "uniform"}, {"model.heads": "plain"}, {"model.tying": "all"}, {"recipe": "deberta"}],
        ids=str,
    )
    def test_other_generators_heads_and_architectures(self, tmp_path, tiny_vocab, changes):
        changes |= {"generator.fraction": "1"} if "model.tying" in changes else {}
        run = save_run(tmp_path / "run", tiny_vocab, **changes)
        detector = ef.load(run)
        tokenizer = Tokenizer(run)
        [ids] = tokenizer.encode_batch(["value of name"])
        special = tokenizer.special_tokens
        row = torch.tensor([[special["cls"], *ids, special["sep"]]])
        with torch.no_grad():
            logits = checkpoint.load_model(run / "checkpoints/step-0").eval().discriminator_logits(row)
        [answer] = detector.detect(["value of name"])
        assert probabilities(answer) == pytest.approx(torch.sigmoid(logits)[0, 1:-1].tolist(), abs=1e-5)


class TestWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("Don't stop, X.", ["Don", "'", "t", "stop", ",", "X", "."]),
            ("👍🏽 value 👩\u200d🚀\ufe0f", ["👍🏽", "value", "👩\u200d🚀\ufe0f"]),
            ("cafe\u0301 X\u0302\u0323, nai\u0308ve", ["cafe\u0301", "X\u0302\u0323", ",", "nai\u0308ve"]),
            ("the שָׁלוֹם עברית العربية", ["the", "שָׁלוֹם", "עברית", "العربية"]),
            ("日本語x", ["日", "本", "語", "x"]),
            ("\x00 name\u200b \u0301", ["name"]),
        ],
    )
    def test_spans_cover_words_with_their_marks(self, detector, text, words):
        [answer] = detector.detect([text])
        assert [word["text"] for word in answer["words"]] == words
        assert [text[word["start"] : word["end"]] for word in answer["words"]] == words

    def test_errors_reach_threshold(self, detector):
        [answer] = detector.detect([LONG])
        middle = float(np.median(probabilities(answer)))
        counts = []
        for threshold in (0.0, middle, 1.0):
            [answer_at] = detector.detect([LONG], threshold)
            assert answer_at["errors"] == [word for word in answer["words"] if word["probability"] >= threshold]
            assert answer_at["words"] == answer["words"] and answer_at["score"] == answer["score"]
            counts.append(len(answer_at["errors"]))
        assert counts[0] == len(answer["words"]) > counts[1] > counts[2] == 0
        assert json.loads(json.dumps(answer)) == answer

    def test_byte_level_words_have_no_spaces(self, tmp_path):
        from tokenizers import Tokenizer as Other
        from tokenizers import models, pre_tokenizers, trainers

        other = Other(models.BPE())
        other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        other.train_from_iterator([LONG], trainers.BpeTrainer(special_tokens=names, initial_alphabet=alphabet))
        other.save(str(tmp_path / "tokenizer.json"))
        run = save_run(tmp_path / "run", tmp_path / "tokenizer.json")
        [answer] = ef.load(run).detect(["the class   😀 \n name,"])
        assert [word["text"] for word in answer["words"]] == ["the", "class", "😀", "name", ","]


class TestInputs:
    def test_empty_texts_score_zero(self, detector):
        none = {"score": 0.0, "errors": [], "words": []}
        assert detector.detect(["", " \t\n", "\x00\u200b"]) == [none] * 3
        assert detector.detect([]) == []
        with pytest.raises(ef.InputError, match="detect takes a list of texts; put a single text into a list"):
            detector.detect("a text")

    @pytest.mark.parametrize("method", ["detect", "encode"])
    def test_input_must_be_a_list_of_texts(self, detector, method):
        for texts, message in (
            (b"bytes", f"{method} takes a list of texts"),
            ({"text": "a"}, f"{method} takes a list of texts"),
            (pd.DataFrame({"text": ["a"]}), f"{method} takes a list of texts; pass one column of the table"),
            (["a", None], "example 1 = None: must be a string"),
            (["a", ("a", "b")], r"example 1 = \('a', 'b'\): must be a string"),
            (["a", "\udc00"], "example 1: unpaired surrogate, which is not text"),
        ):
            with pytest.raises(ef.InputError, match=message):
                getattr(detector, method)(texts)

    def test_invalid_threshold_is_refused(self, detector):
        for threshold in (-0.1, 1.5, float("nan")):
            with pytest.raises(ValueError, match=f"threshold = {threshold}: must be a probability from 0 to 1"):
                detector.detect([], threshold)


class TestSources:
    def test_foreign_folder_reads_all_positions(self, exported, tmp_path):
        """Without a recorded sequence length, texts are read in chunks of all positions."""
        other = shutil.copytree(exported / "discriminator", tmp_path / "other")
        table = json.loads((other / "config.json").read_text(encoding="utf-8"))
        foreign = {name: value for name, value in table.items() if not name.startswith("electra_fast")}
        (other / "config.json").write_text(json.dumps(foreign), encoding="utf-8")
        detector = read_detector(other)
        assert detector.sequence_length == table["max_position_embeddings"] > 16
        expected = Reference(other).words(LONG, detector.sequence_length)
        assert probabilities(detector.predict([LONG])[0]) == pytest.approx(expected, abs=1e-5)

    def test_model_without_discriminator_is_refused(self, exported, encoder_folder):
        source = exported / "generator"
        with pytest.raises(ValueError, match=f"^{re.escape(str(source))}: has no discriminator, only the gen") as e:
            ef.load(source).detect(["a"])
        assert "\n" not in str(e.value) and 'objective.name = "electra"' in str(e.value)
        with pytest.raises(ValueError, match="has no discriminator, only the encoder;"):
            ef.load(encoder_folder).detect(["a"])
