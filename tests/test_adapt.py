"""`adapt`: its choices by encoder, equality with the single commands, warnings and errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from in_process import run
from test_encoder import hf_folder
from test_pair_templates import save_tokenizer
from tiny_run import lines, weights
from tiny_task import sentences

import electra_fast as ef
from electra_fast.adaptation import _has_case, _num_steps
from electra_fast.config.config import Config
from electra_fast.config.presets import GENERAL_SHARE, LITTLE_TEXT
from electra_fast.errors import InputError, Interrupted
from electra_fast.files import checkpoint_folder
from electra_fast.huggingface.adaptation import kind_of

FAST: dict[str, Any] = {"train.steps": 2, "train.batch_size": 4, "train.eval_batches": 1, "data.sequence_length": 16}
FAST |= {"train.precision": "fp32", "train.matmul": "default"}
WORDS = [f"--{key}={value}" for key, value in FAST.items()]


@pytest.fixture
def text(tmp_path: Path, tiny_text: list[str]) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(tiny_text[:20]), encoding="utf-8")
    return path


@pytest.fixture
def exported(tmp_path: Path, whole_run: Path) -> Path:
    ef.export(whole_run, out=tmp_path / "exported")
    return tmp_path / "exported"


@pytest.fixture
def rows(write_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("electra_fast.finetuning.config.MIN_STEPS", 4)
    return write_rows([{"text": words, "label": str(label)} for words, label in sentences(60)])


def changed(run: Path, out: Path, changes: dict[str, Any]) -> Path:
    """Copies a run and changes the settings of its last checkpoint."""
    shutil.copytree(run, out)
    step = checkpoint_folder.latest(out)
    for folder in (out, step):
        (folder / "config.toml").write_text(Config.load(folder / "config.toml").override(changes).to_toml())
    checkpoint_folder.seal(step, checkpoint_folder.read_state(step))
    return out


@pytest.mark.parametrize("objective", [None, "mlm"])
def test_adapt_equals_prepare_import_and_pretrain(
    tmp_path: Path, whole_run: Path, text: Path, objective: str | None
) -> None:
    """The learning rates are those that the run was trained with; warmup and schedule start again."""
    objective_override = {} if objective is None else {"objective.name": objective}
    source = changed(whole_run, tmp_path / "source", {"optimizer.name": "muon"})
    result = ef.adapt(source, [text], out=tmp_path / "run", overrides=FAST | objective_override)
    ef.import_(source, out=tmp_path / "other", mlm=objective == "mlm")
    corpus = ef.prepare([text], vocab=tmp_path / "other", out=tmp_path / "shards", holdout=0.02, progress=False)
    rates = Config.load(source / "config.toml").resolved().optimizer
    keys = {f"optimizer.{name}": getattr(rates, name) for name in ("learning_rate", "muon_learning_rate")}
    keys |= FAST | {"train.log_every": 1, "train.eval_every": 1, "train.checkpoint_every": 1}
    ef.pretrain(corpus.out, out=tmp_path / "other", overrides=keys)
    adapted = weights(tmp_path / "run")
    expected = weights(tmp_path / "other")
    assert adapted.keys() == expected.keys() and all(torch.equal(adapted[name], expected[name]) for name in adapted)
    configs = [Config.load(tmp_path / name / "config.toml") for name in ("run", "other")]
    assert configs[0].differences(configs[1]).keys() == {"data.corpus", "train.out"}
    assert (result.step, result.is_finished, result.metric) == (2, True, None)
    assert result.objective == (objective or "electra") and "only a task can measure the gain" in str(result)
    assert f"optimizer.learning_rate = {rates.learning_rate:g}" in str(result.choices)
    assert json.loads(result.to_json())["choices"] == list(result.choices)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("BERT", "BertForMaskedLM"), ("RoBERTa", "RobertaForMaskedLM"), ("XLM-R", "XLMRobertaModel")],
)
def test_transformers_models_keep_their_tokenizers(tmp_path: Path, text: Path, kind: str, name: str) -> None:
    positions: dict[str, Any] = {} if kind == "BERT" else {"max_position_embeddings": 68, "pad_token_id": 3}
    hf_folder(tmp_path / "model", name, vocab_size=320, num_hidden_layers=1, **positions)
    (tmp_path / "model/vocab.txt").unlink()
    save_tokenizer(tmp_path / "model", kind)
    result = ef.adapt(tmp_path / "model", [text], out=tmp_path / "run", overrides=FAST)
    ef.export(tmp_path / "run", out=tmp_path / "out")
    words = "The cats sat in a naïve café."
    exported_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out/encoder"))
    model_tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    assert (
        exported_tokenizer.encode(words, add_special_tokens=False)
        == model_tokenizer.encode(words, add_special_tokens=False).ids
    )
    assert (
        ef.Tokenizer.of(ef.Corpus(tmp_path / "run/corpus")).encode_batch([words])[0].tolist()
        == model_tokenizer.encode(words, add_special_tokens=False).ids
    )
    assert result.objective == "mlm" and "passes over the text" in result.choices[-1]


@pytest.mark.parametrize(
    ("source", "options", "objective"),
    [
        ("exported", {}, "electra"),
        ("exported/generator", {}, "mlm"),
        ("exported/encoder", {}, "mlm"),
        ("exported/discriminator", {}, "mlm"),
        ("exported/discriminator", {"generator": "small"}, "electra"),
        ("exported", {"overrides": {"objective.name": "mlm"}}, "mlm"),
    ],
)
def test_objective_is_chosen_by_source(
    tmp_path: Path, exported: Path, text: Path, source: str, options: dict[str, Any], objective: str
) -> None:
    overrides = FAST | options.pop("overrides", {})
    result = ef.adapt(tmp_path / source, [text], out=tmp_path / "run", overrides=overrides, **options)
    assert result.objective == Config.load(tmp_path / "run/config.toml").objective.name == objective
    ef.export(tmp_path / "run", out=tmp_path / "out")  # an ordinary run
    assert ef.Corpus(tmp_path / "run/corpus").holdout is not None


@pytest.mark.parametrize(("passes", "steps"), [(1, 20), (0.1, 200), (0.02, 300), (0.001, 3_000), (1e-5, 20_000)])
def test_number_of_steps_is_three_passes_within_bounds(passes: float, steps: int) -> None:
    assert _num_steps(passes) == steps


def test_dry_run_prints_steps_for_text(
    tmp_path: Path, whole_run: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Explicit settings are not reported as choices, and explicit sizes cause no warning."""
    monkeypatch.setattr("electra_fast.training.forecast.MAX_TABLE_SHARE", 0)
    out = tmp_path / "run"
    options = ["--sequence-length", 16, "--batch-size", 64, "--lr", 3e-4]
    done = run("adapt", whole_run, text, "--out", out, "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    ef.prepare([text], vocab=whole_run, out=tmp_path / "shards", holdout=0.02, progress=False)
    tokens = ef.Corpus(tmp_path / "shards").num_tokens
    steps = _num_steps(1024 / tokens)
    assert f"train.steps = {steps:,} of 64 rows of 16 tokens: {steps * 1024 / tokens:.3g} passes" in done.stdout
    assert "learning_rate 0.0003" in done.stdout and "optimizer.learning_rate" not in done.stdout
    assert "the embedding table has" not in done.stdout
    assert f"text: {tokens:,} tokens" in done.stdout and "memory " in done.stdout and "time " in done.stdout
    assert f"would write     {out}: the run, its text in corpus/\n" in done.stdout and not out.exists()
    assert (f"{tokens:,} tokens are too little text" in done.stderr) == (tokens < LITTLE_TEXT)


def test_task_is_scored_before_and_after(tmp_path: Path, whole_run: Path, text: Path, rows: Path) -> None:
    options = ["--task-data", rows, "--seeds", 2, "--finetune.epochs", 1, *WORDS]
    done = run("adapt", whole_run, text, "--out", tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    for name, encoder in (("before", whole_run), ("after-step-2", tmp_path / "run")):
        task: dict[str, Any] = {"task": "classification", "train": rows, "overrides": {"finetune.epochs": 1}}
        results = ef.finetune(encoder, out=tmp_path / name, seeds=2, **task)
        scores = [task_run["accuracy"] for task_run in results["classification"]["runs"]]
        adapt_runs = json.loads((tmp_path / "run" / name / "results.json").read_text())["classification"]["runs"]
        assert [task_run["accuracy"] for task_run in adapt_runs] == scores
        label = "original" if name == "before" else "adapted"
        shown = "  ".join(f"{100 * score:.2f}" for score in scores)
        assert f"{label:<12} {100 * sum(scores) / 2:7.2f}  {shown}\n" in done.stdout
    assert "accuracy in percent, on 6 examples\n" in done.stdout  # a tenth of 60 validates
    again = run("adapt", whole_run, text, "--out", tmp_path / "run", *options, "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["after"] == scores


def test_adapted_run_is_scored_later_and_trained_further(
    tmp_path: Path, whole_run: Path, text: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption of either fine-tuning does not change the result."""
    task: dict[str, Any] = {"task_data": rows, "seeds": 1}
    whole = ef.adapt(whole_run, [text], out=tmp_path / "whole", overrides=FAST, **task)
    ef.adapt(whole_run, [text], out=tmp_path / "run", overrides=FAST)
    precisions: list[str | None] = []
    for ended_in in ("before", "after-step-2"):

        def ended(*arguments: Any, ended_in: str = ended_in, **options: Any) -> Any:
            precisions.append(options["overrides"].get("finetune.precision"))
            if options["out"].name == ended_in:
                raise Interrupted(15, "ended")
            return ef.finetune(*arguments, **options)

        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr("electra_fast.adaptation.finetune", ended)
            ef.adapt(whole_run, [text], out=tmp_path / "run", **task)
    assert precisions == [None, None, "fp32"]  # both use the precision of the first
    late = ef.adapt(whole_run, [text], out=tmp_path / "run", **task)
    assert (late.before, late.after, late.choices) == (whole.before, whole.after, whole.choices)
    more = ef.adapt(whole_run, [text], out=tmp_path / "run", overrides={"train.steps": 3}, **task)
    assert more.step == 3 and "train.steps = 3 of 4 rows" in more.choices[-1] and more.before == whole.before
    assert {"before", "after-step-2", "after-step-3"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0.5, 0.6], [0.61, 0.7], "a gain"),
        ([0.5, 0.6], [0.6, 0.9], "no clear"),
        ([0.5, 0.6], [0.3, 0.5], "no clear"),
        ([0.5, 0.6], [0.3, 0.4], "a loss"),
        ([0.5], [0.7], "a single seed"),
    ],
)
def test_gain_must_exceed_spread_of_seeds(before: list[float], after: list[float], verdict: str) -> None:
    result = ef.AdaptResult(Path("run"), "mlm", [], 5, metric="f1", before=before, after=after)
    *_, difference, last = str(result).splitlines()
    assert last.startswith(verdict) and difference.split()[1] == f"{100 * (median(after) - median(before)):+.2f}"


def test_adapt_resumes_at_any_point(
    tmp_path: Path, whole_run: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the last file of the run, before training, or during training, it gives the same run."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    ef.adapt(whole_run, [text], out=whole, overrides=FAST)

    def killed(*_: object, **__: object) -> None:
        raise Interrupted(15, "killed")

    for name in ("Corpus", "read_to_train", "write_run", "pretrain"):
        with monkeypatch.context() as patch:
            patch.setattr(f"electra_fast.adaptation.{name}", killed)
            with pytest.raises(Interrupted):
                ef.adapt(whole_run, [text], out=cut, overrides=FAST)
        assert (cut / "config.toml").exists() == (name == "pretrain")
        if name != "pretrain":  # other commands refuse the incomplete run
            with pytest.raises(InputError, match="cut: contains"):
                ef.pretrain(cut / "corpus", out=cut)
    again = ef.adapt(whole_run, [text], out=cut, overrides=FAST)
    assert lines(whole) == lines(cut) and again.choices == ef.adapt(whole_run, [text], out=whole).choices
    expected = weights(whole)
    resumed = weights(cut)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    with pytest.raises(
        InputError, match="run: holdout is 0.1, but the run was started with 0.02; use the same value to resume"
    ):
        ef.adapt(whole_run, [text], out=whole.rename(tmp_path / "run"), holdout=0.1)


def test_run_out_of_time_is_not_scored(
    tmp_path: Path, whole_run: Path, text: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = ef.PretrainResult(tmp_path / "run", 1, is_finished=False)
    monkeypatch.setattr("electra_fast.adaptation.pretrain", lambda *_, **__: stopped)
    done = run("adapt", whole_run, text, "--out", tmp_path / "run", "--task-data", rows, "--seeds", 1, *WORDS)
    assert done.returncode == 75 and "step 1, stopped by train.max_minutes; the same call resumes" in done.stdout
    assert not list((tmp_path / "run").glob("after*"))
    assert "fine-tuning the original encoder with 1 seed\n" in done.stderr


def test_general_text_is_mixed_in(tmp_path: Path, whole_run: Path, text: Path, validation_corpus: Path) -> None:
    """The generator is trained already, so it does not train alone first."""
    source = changed(whole_run, tmp_path / "source", {"objective.generator_first": 2, "train.max_minutes": 5})
    result = ef.adapt(source, [text], out=tmp_path / "run", general=validation_corpus, overrides=FAST)
    config = Config.load(tmp_path / "run/config.toml")
    corpora = config.data.corpus
    assert (config.objective.generator_first, config.train.max_minutes) == (0, 0)
    assert corpora == {str(tmp_path / "run/corpus"): 1 - GENERAL_SHARE, str(validation_corpus): GENERAL_SHARE}
    assert f"{GENERAL_SHARE:.0%} of each step is general text" in str(result.choices)


def test_trimmed_and_given_vocabulary(tmp_path: Path, whole_run: Path, text: Path) -> None:
    """The embeddings equal the result of `vocab --trim` and `import --vocab` and match the new token ids."""
    ef.vocab([text], out=tmp_path / "vocabulary", trim=whole_run, progress=False)
    ef.import_(whole_run, out=tmp_path / "imported", vocab=tmp_path / "vocabulary")
    expected = weights(tmp_path / "imported")
    for name, options in (("trimmed", {"trim": True}), ("given", {"vocab": tmp_path / "vocabulary"})):
        result = ef.adapt(whole_run, [text], out=tmp_path / name, overrides={"train.steps": 0}, **options)
        assert result.step == 0 and "not trained" in str(result)
        adapted = weights(tmp_path / name)
        assert all(torch.equal(adapted[key], tensor) for key, tensor in expected.items())
        corpus = ef.Corpus(tmp_path / name / "corpus")
        tokenizer = ef.Tokenizer(tmp_path / "vocabulary")
        assert corpus.vocab_size == tokenizer.vocab_size < ef.Tokenizer(whole_run / "tokenizer").vocab_size
        assert ef.Tokenizer.of(corpus).content_hash == tokenizer.content_hash
    with pytest.raises(InputError, match="trim: reads the text twice"):
        ef.adapt(whole_run, iter(["a text"]), out=tmp_path / "other", trim=True)


def test_warnings(
    tmp_path: Path, whole_run: Path, rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warns about little text, another language, and validation texts of the task in the domain text."""
    # All warnings come before the first fine-tuning.
    monkeypatch.setattr("electra_fast.adaptation.finetune", Mock(side_effect=Interrupted(2, "stopped")))
    foreign = tmp_path / "hungarian.jsonl"
    seen = [json.loads(line) for line in rows.read_text().splitlines()]
    more = [{"text": "zöldségfeldolgozó szövetkezetünk gyümölcsösládáinak nyilvántartása"}] * 99
    foreign.write_text("".join(json.dumps(row) + "\n" for row in [*seen[:20], *more]))
    with pytest.raises(Interrupted):
        ef.adapt(whole_run, [foreign], out=tmp_path / "run", task_data=rows, dev=rows, overrides=FAST, holdout=0)
    stderr = capsys.readouterr().err
    assert "tokens are too little text" in stderr and "tokens per word: the text may be in another language" in stderr
    assert "20 of the 60 validation texts of the task are documents of the domain text" in stderr


@pytest.mark.parametrize(("words", "has_case"), [("ein Satz, und noch einer", True), ("這是一個句子。", False)])
def test_text_without_spaces_has_no_case(tmp_path: Path, words: str, has_case: bool) -> None:
    """In Chinese text, words between spaces would have dozens of tokens each."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*words})]))
    ef.prepare(iter([words]), vocab=tmp_path / "vocab.txt", out=tmp_path / "shards", cased=True, progress=False)
    assert _has_case(ef.Corpus(tmp_path / "shards")) == has_case


def test_unusable_sources_are_refused(tmp_path: Path, whole_run: Path, exported: Path, text: Path) -> None:
    def refused(model: Path, message: str, **options: Any) -> None:
        with pytest.raises((InputError, FileNotFoundError), match=message):
            ef.adapt(model, [text], out=tmp_path / "run", **options)
        assert not (tmp_path / "run/corpus").exists()  # the preparation may take hours
        shutil.rmtree(tmp_path / "run", ignore_errors=True)

    tuned = exported / "encoder"
    for name in ("modules.json", "config_sentence_transformers.json"):
        (tuned / name).write_text("{}")
        (tuned / "README.md").write_text("---\nbase_model: nreimers/MiniLM-L6\n---\n")
        refused(
            tuned,
            r"a sentence-embedding model \(.*json\).*its base encoder \(nreimers/MiniLM-L6\) and train the result",
        )
        refused(tuned, "a sentence-embedding model", generator="small")
        (tuned / name).unlink()
    unfinished = changed(whole_run, tmp_path / "unfinished", {"train.steps": 99})
    refused(unfinished, "at step 24 of 99; finish it .*, or adapt its checkpoint as it is: .*step-24")
    assert kind_of(checkpoint_folder.latest(unfinished)) == "pair"
    refused(exported / "discriminator", "has no generator, which", overrides={"objective.name": "electra"})
    refused(whole_run, "mlm: uses no generator; remove", generator="small", overrides={"objective.name": "mlm"})
    refused(whole_run, "must be one of mlm, electra for adapt", overrides={"objective.name": "electra15"})
    refused(whole_run, "--label: needs --task-data", label="queue")
    refused(tmp_path / "nowhere", "nowhere: no such folder")
    other = shutil.copytree(exported / "generator", tmp_path / "other")
    (other / "tokenizer.json").unlink()
    entries = (other / "vocab.txt").read_text()
    (other / "vocab.txt").write_text(entries + "another\n")
    refused(other, "entries, but the model has .*; put the model's tokenizer there")
    (other / "vocab.txt").write_text(entries)
    (other / "model.safetensors").write_bytes(b"cut")
    refused(other, "not a complete safetensors file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").touch()
    refused(whole_run, "run: not empty; choose another folder")


def test_finetuned_encoder_is_adapted_with_warning(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = exported / "encoder/config.json"
    path.write_text(path.read_text().replace("ElectraModel", "ElectraForSequenceClassification"))
    assert kind_of(exported / "encoder") == "encoder"
    assert "fine-tuned for a task (ElectraForSequenceClassification), whose head is dropped" in capsys.readouterr().err
