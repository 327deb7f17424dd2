"""`adapt`: continues pre-training an encoder on domain text, and measures the gain on a task of the domain.

It combines `prepare`, `import`, `pretrain` and `finetune`. Its choices are made in `config.presets` and `_objective`.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.config.config import AUTO, Config
from electra_fast.config.presets import (
    ADAPTATION_PASSES,
    ADAPTATION_STEPS,
    GENERAL_SHARE,
    LITTLE_TEXT,
    adaptation_settings,
)
from electra_fast.config.section import Scalar
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.inputs import Format, InvalidUtf8, Kind, Separator, StrPath
from electra_fast.data.mixture import Corpora, absolute
from electra_fast.data.object_store import local_file
from electra_fast.data.prepare import prepare
from electra_fast.data.prepare import vocab as make_vocab
from electra_fast.distributed.launch import Launch
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, remove, replace_file
from electra_fast.files.json_files import json_text, read_object, read_optional
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.finetuning.finetune import finetune
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.task import Split
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.job import IDENTITY
from electra_fast.huggingface.adaptation import Settings, config_of, kind_of, settings_lines, settings_of
from electra_fast.huggingface.export import read_to_train, write_run
from electra_fast.huggingface.source import tokenizer_folder
from electra_fast.huggingface.tokenizer import INPUT_NAMES, check_vocabulary, copy_tokenizer
from electra_fast.huggingface.vocabulary import with_vocabulary
from electra_fast.messages import say
from electra_fast.model.model import Electra
from electra_fast.results import Result
from electra_fast.training.plan import plan
from electra_fast.training.pretrain import PretrainResult, pretrain
from electra_fast.training.run import exclusive

RECORD = "adaptation.json"
"""File in the run's folder with the arguments and the choices."""
BEFORE = "before"
AFTER = "after-step-{}"
"""Folders of the fine-tunings. A run that is trained further is fine-tuned again."""
OBJECTIVES = ("mlm", "electra")
# English in an English vocabulary has 1.1 to 1.5 tokens per word, technical text up to 2.
MAX_TOKENS_PER_WORD = 2.5
SAMPLE_DOCUMENTS = 100
SAMPLE_TOKENS = 500
# Larger corpora are not searched for texts of the task's validation set.
MAX_SEARCHED_TOKENS = 1 << 24


@dataclass(frozen=True, eq=False, repr=False)
class AdaptResult(Result):
    """The result of `adapt`: the run, the choices, and the task's scores before and after."""

    out: Path
    objective: str
    choices: Sequence[str]
    """The choices with their reasons, one line each."""
    step: int
    is_finished: bool = True
    """False if `train.max_minutes` stopped the training; the same call resumes."""
    metric: str | None = None
    """Name of the task's main score; `before` and `after` are its values by seed."""
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    num_examples: int = 0
    """Number of examples that are scored. With few examples, only large differences are significant."""

    def lines(self) -> Iterator[str]:
        """Yields the run's folder, and the table of scores in percent."""
        if not self.is_finished:
            yield f"{self.out}: step {self.step}, stopped by train.max_minutes; the same call resumes"
            return
        done = f"adapted by {self.objective}, step {self.step}" if self.step else "not trained"
        yield f"{self.out}: {done}; electra-fast export or finetune {self.out}"
        if self.metric is None and self.step:
            yield (
                "only a task can measure the gain: pass --task-data (the AUC that pretrain reports does not measure it)"
            )
        if self.metric is None:
            return
        rows = {"original": self.before, "adapted": self.after}
        medians = [statistics.median(row) for row in rows.values()]
        yield f"{self.metric} in percent, on {self.num_examples:,} examples"
        yield f"{'':<12} {'median':>7}  by seed"
        for (name, scores), median in zip(rows.items(), medians, strict=True):
            yield f"{name:<12} {100 * median:7.2f}  {'  '.join(f'{100 * score:.2f}' for score in scores)}"
        pairs = zip(self.before, self.after, strict=True)
        changes = "  ".join(f"{100 * (after - before):+.2f}" for before, after in pairs)
        yield f"{'difference':<12} {100 * (medians[1] - medians[0]):+7.2f}  {changes}"
        yield self._verdict()

    def _verdict(self) -> str:
        if len(self.after) == 1:
            return "a single seed cannot distinguish a gain from chance: pass --seeds 3"
        if min(self.after) > max(self.before):
            return "a gain: the lowest score after adapting is above the highest score before"
        if max(self.after) < min(self.before):
            return "a loss: use the original encoder"
        return "no clear difference: the scores of the seeds overlap"


@dataclass(frozen=True)
class _Arguments:
    """The arguments of `adapt` that determine the run at step 0."""

    model: str
    generator: str | None
    objective: str | None
    holdout: float
    general: str | None
    vocab: str | None
    trim: bool


@dataclass(frozen=True)
class _Start:
    """A run that is ready for training, with its corpora, and lines about the choices."""

    corpus: Corpora
    config: Config
    choices: list[str]

    @classmethod
    def of(
        cls, out: Path, arguments: _Arguments, fraction: float, choices: Sequence[str], config: Config, corpus: Corpus
    ) -> _Start:
        """Adds facts about the text to the choices; `fraction` is the fraction of general text."""
        per_word = corpus.coverage().tokens_per_word
        words = "" if per_word is None else f", {per_word:.2f} tokens per word"
        steps = config.train.steps
        passes = config.train.steps * _passes_per_step(config, fraction, corpus)
        lines = [
            f"text: {corpus.num_tokens:,} tokens in {len(corpus):,} documents{words}",
            *choices,
            f"train.steps = {steps:,} of {config.train.batch_size} rows of {config.data.sequence_length} tokens: "
            f"{passes:.3g} passes over the text",
        ]
        corpus_folder = str((out / "corpus").absolute())
        if not arguments.general:
            return cls(corpus_folder, config, lines)
        lines.append(f"{fraction:.0%} of each step is general text, so that the encoder forgets less of it")
        return cls({corpus_folder: 1 - fraction, arguments.general: fraction}, config, lines)


def adapt(
    model: str | Path,
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    out: str | Path,
    general: str | Path | None = None,
    generator: str | Path | None = None,
    vocab: str | Path | None = None,
    trim: bool = False,
    holdout: float = 0.02,
    task_data: Any = None,
    task: str = "classification",
    dev: Any = None,
    task_text: str | Sequence[str] = (),
    label: str | Sequence[str] = (),
    seeds: int = 3,
    overrides: Mapping[str, object] | None = None,
    device: str = AUTO,
    documents: Separator = "blank-line",
    text: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
    format: Format = "auto",
    skip_bad_rows: int = 0,
    threads: int = 0,
    kind: Kind = "auto",
) -> AdaptResult:
    """Continues pre-training an encoder on domain text; chooses the settings for its kind and the amount of text.

    Writes a run to `out` for `export`, `finetune`, `evaluate` and `pretrain`. Next to its checkpoints are the corpus
    (`corpus/`), the choices (`adaptation.json`) and, with `task_data`, the fine-tunings (`before/`, `after-step-N/`).
    After an interruption, the same call resumes; with more steps, it continues.

    Args:
        model: A run, a checkpoint or a Hugging Face folder. An unfinished run is refused, unless one of its checkpoints
            is passed. Sentence-embedding models are refused too.
        inputs: Domain text (see `prepare`); it is tokenized with the model's tokenizer, unless `vocab` or `trim`
            changes it.
        out: The run's folder: missing, empty, or left by an interruption of the same call.
        general: A corpus of general text, prepared with the model's tokenizer, to mix in.
        generator: A generator for replaced-token detection, if the model has none; see `import_`.
        vocab: A new vocabulary for the model; see `import_`.
        trim: Keep only the vocabulary entries that the text uses; see `trim` of `vocab`.
        holdout: Fraction of the documents for the validation set.
        task_data: Labeled data of the domain (see `train` of `finetune`). The encoder is fine-tuned on them before and
            after adapting. Only such a task can measure the gain; the AUC of pre-training does not.
        task: `classification`, `regression`, `tagging` or `question-answering`.
        dev: Labeled data to score on; by default split off from `task_data`.
        task_text: The text columns of `task_data`; see `text` of `finetune`.
        label: The label columns of `task_data`.
        seeds: Number of fine-tuning runs before and after, with the seeds 0, 1, 2, ...
        overrides: Keys of the run's configuration that replace the chosen values (see `pretrain`), and keys of
            `finetune`, such as `finetune.epochs`. `objective.name` is `mlm` or `electra`. With `train.steps` 0, only
            the vocabulary is changed, and nothing is trained.
        device: The device to train on; see `pretrain`.
        documents: See `prepare`, also for the next five arguments.
        text: The field with the text.
        invalid_utf8: Handling of invalid bytes.
        format: The format of every file.
        skip_bad_rows: Maximum number of malformed JSON records to skip.
        threads: Number of threads for tokenization.
        kind: `files` or `documents`, if `inputs` is ambiguous.

    Raises:
        ValueError, FileNotFoundError: Model, text, data or options are wrong or do not match.
        Diverged, TrainingFailed, Interrupted: See `pretrain`.
    """
    settings, tuning, is_trained = _split_overrides(overrides or {})
    out = Path(out)
    reading = {
        "documents": documents,
        "text": text,
        "invalid_utf8": invalid_utf8,
        "format": format,
        "skip_bad_rows": skip_bad_rows,
        "threads": threads,
        "kind": kind,
    }
    arguments = _arguments(settings, model, generator, holdout, general, vocab, trim)
    data = {"train": task_data, "dev": dev, "text": task_text, "label": label}
    dev_split = _read_dev(task, data)
    with exclusive(_check_folder(out, arguments)):
        start = _make_start(out, arguments, inputs, reading, settings, dev_split)
    for line in start.choices if is_trained else start.choices[:1]:
        say(line)
    scores: dict[str, list[float]] = {}
    metric = None

    def measure(encoder: str | Path, name: str, folder: Path) -> None:
        nonlocal metric
        if task_data is not None:
            subject = "the original encoder" if name == "before" else "the adapted encoder"
            say(f"{folder}: fine-tuning {subject} with {seeds} {'seed' if seeds == 1 else 'seeds'}")
            options = {"task": task, "seeds": seeds, "device": device, "overrides": tuning, **data}
            ((task_name, result),) = finetune(encoder, out=folder, **options).items()
            metric = result.metric
            scores[name] = [run[result.metric] for run in result.runs]
            # Use the precision measured before adapting for both.
            tuning["finetune.precision"] = read_object(folder / task_name / IDENTITY)["hardware"]["precision"]

    measure(arguments.model, "before", out / BEFORE)
    trained = PretrainResult(out, 0)
    if is_trained:
        trained = pretrain(start.corpus, out=out, overrides=settings, device=device)
    if trained.is_finished:
        measure(out, "after", out / AFTER.format(trained.step))
    return AdaptResult(
        out=out,
        objective=start.config.objective.name,
        choices=start.choices,
        step=trained.step,
        is_finished=trained.is_finished,
        metric=metric,
        num_examples=0 if dev_split is None else len(dev_split.texts),
        **scores,
    )


def dry_run(model: str | Path, inputs: Any, *, out: str | Path, device: str, **options: Any) -> Iterator[str]:
    """Yields the choices of `adapt` with reasons, and the plan of its training; leaves no files.

    Takes all arguments of `adapt`. Tokenizes the text and measures the first steps in a temporary folder.
    """
    settings, _, is_trained = _split_overrides(options.pop("overrides"))
    names = ("generator", "holdout", "general", "vocab", "trim")
    arguments = _arguments(settings, model, **{name: options.pop(name) for name in names})
    task = options.pop("task")
    seeds = options.pop("seeds")
    columns = {"train": "task_data", "dev": "dev", "text": "task_text", "label": "label"}
    data = {name: options.pop(option) for name, option in columns.items()}
    dev_split = _read_dev(task, data)
    _check_folder(Path(out), arguments)
    with tempfile.TemporaryDirectory() as folder:
        start = _make_start(Path(folder), arguments, inputs, options, settings, dev_split)
        yield from start.choices if is_trained else start.choices[:1]
        if is_trained:
            yield from plan(start.corpus, config=start.config, device=device).lines()
    measured = "" if data["train"] is None else f", and {seeds} fine-tunings each in {BEFORE}/ and {AFTER.format('N')}/"
    yield f"would write     {out}: the run, its text in corpus/{measured}"


def _split_overrides(overrides: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Returns the keys of training and of fine-tuning, and whether to train (not with 0 steps)."""
    untrained = {name for name in ("steps", "train.steps") if str(overrides.get(name)) == "0"}
    tuning = {name: overrides[name] for name in overrides if name.startswith("finetune.")}
    settings = {name: overrides[name] for name in overrides if name not in untrained | tuning.keys()}
    return Config.values_of(settings.items()), FinetuningConfig.values_of(tuning.items()), not untrained


def _arguments(
    overrides: dict[str, Any],
    model: str | Path,
    generator: str | Path | None,
    holdout: float,
    general: str | Path | None,
    vocab: str | Path | None,
    trim: bool,
) -> _Arguments:
    """Returns the arguments to record; removes the objective from `overrides`."""
    if Launch.from_environment().world_size > 1:
        raise InputError("adapt: runs in one process; for several GPUs, use import, then pretrain with torchrun")
    objective = overrides.pop("objective.name", None)
    if objective not in (None, *OBJECTIVES):
        raise InputError(f"objective.name = {objective!r}: must be one of {', '.join(OBJECTIVES)} for adapt")
    if objective == "mlm" and generator is not None:
        raise InputError(f"objective.name = mlm: uses no generator; remove --generator {generator}")
    return _Arguments(
        model=str(Path(model).absolute()),
        generator=None if generator is None else str(generator),
        objective=objective,
        holdout=holdout,
        general=None if general is None else str(absolute(str(general))),
        vocab=None if vocab is None else str(Path(vocab).absolute()),
        trim=trim,
    )


def _check_folder(out: Path, arguments: _Arguments) -> Path:
    """Returns the folder. Raises ValueError unless it is new or was written by the same call."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose another folder for the run")
    recorded = read_optional(out / RECORD).get("asked", {})
    if not recorded and foreign_names(out):
        raise InputError(f"{out}: not empty; choose another folder for the run")
    for name, value in vars(arguments).items() if (out / "config.toml").exists() else ():
        if (was := recorded.get(name, value)) != value:
            raise InputError(
                f"{out}: {name} is {value!r}, but the run was started with {was!r}; use the same value to resume, or "
                "choose another --out"
            )
    return out


def _make_start(
    out: Path,
    arguments: _Arguments,
    inputs: Any,
    reading: Mapping[str, Any],
    overrides: Mapping[str, Scalar],
    dev_split: Split | None,
) -> _Start:
    """Prepares the text and writes the run, unless both exist; prints warnings."""
    source = Path(arguments.model)
    is_made = (out / "config.toml").exists()
    if not is_made:
        kind = kind_of(source)
        if arguments.objective == "electra" and kind != "pair" and not arguments.generator:
            raise InputError(f"{source}: has no generator, which electra needs; pass one with --generator")
        objective, why = _objective(arguments, kind)
        # Before the preparation of the text, which may take hours, to find mistakes early.
        electra = read_to_train(source, arguments.generator, mlm=objective == "mlm")
        model_tokenizer = tokenizer_folder(source, electra.config.model.vocab_size)
        tokenizer = _tokenizer(out, arguments, model_tokenizer, inputs, reading)
    corpus = _prepare_corpus(out, arguments, inputs, reading)
    _warn(corpus, dev_split)
    if not is_made:
        _make_run(out, arguments, electra, why, tokenizer, corpus, overrides)
    record = read_object(out / RECORD)
    config = Config.load(out / "config.toml").override(overrides)
    return _Start.of(out, arguments, record["general"], record["choices"], config, corpus)


def _tokenizer(
    out: Path, arguments: _Arguments, model_tokenizer: Path, inputs: Any, reading: Mapping[str, Any]
) -> Path:
    """Records the arguments; returns the tokenizer of the run, and copies it to `out` to prepare the text with."""
    record = read_optional(out / RECORD)
    replace_file(out / RECORD, json_text({"asked": vars(arguments)}))
    tokenizer = Path(arguments.vocab) if arguments.vocab else model_tokenizer
    if arguments.trim:
        source = tokenizer
        tokenizer = out / "trimmed"
        if record.get("asked") != vars(arguments):
            remove(tokenizer)
        if isinstance(inputs, Iterator):
            raise InputError("trim: reads the text twice; pass files or a list of documents")
        if not tokenizer.exists():
            make_vocab(inputs, out=tokenizer, trim=source, **reading)
    copy_tokenizer(tokenizer, out / "tokenizer", INPUT_NAMES["bert"])  # `write_run` names the model's inputs
    return tokenizer


def _objective(arguments: _Arguments, kind: str) -> tuple[str, str]:
    """Returns the objective and the reason."""
    if arguments.objective is not None:
        return arguments.objective, "as you chose"
    if arguments.generator is not None:
        return "electra", "with the generator that you chose"
    if kind == "pair":
        return "electra", "it has a trained generator; masked language modeling gained as much"
    return "mlm", "it has no trained generator, and with a new generator an encoder learns less"


def _make_run(
    out: Path,
    arguments: _Arguments,
    electra: Electra,
    why: str,
    tokenizer: Path,
    corpus: Corpus,
    overrides: Mapping[str, Scalar],
) -> None:
    """Chooses and records the settings, and writes the run at step 0; `why` is the reason for the objective."""
    source = Path(arguments.model)
    if arguments.vocab or arguments.trim:
        electra = with_vocabulary(electra, tokenizer_folder(source, electra.config.model.vocab_size), tokenizer)
    general_fraction = GENERAL_SHARE if arguments.general else 0.0
    keys, settings = _settings(source, electra.config)
    if arguments.generator is None and electra.config.objective.name != "mlm":
        keys["objective.generator_first"] = 0  # the generator is trained already
    per_step = _passes_per_step(electra.config.override(keys | dict(overrides)), general_fraction, corpus)
    steps = int(overrides.get("train.steps", _num_steps(per_step)))
    keys |= {"train.out": str(out), "train.steps": steps, "train.log_every": max(1, steps // 40)}
    keys |= dict.fromkeys(("train.eval_every", "train.checkpoint_every"), max(1, steps // 4))
    electra.config = electra.config.override(keys)
    chosen = [({key: names[key] for key in names if key not in overrides}, reason) for names, reason in settings]
    choices = [
        f'objective.name = "{electra.config.objective.name}": {why}',
        *settings_lines(electra.config, [(names, reason) for names, reason in chosen if names]),
    ]
    replace_file(out / RECORD, json_text({"asked": vars(arguments), "general": general_fraction, "choices": choices}))
    write_run(out, source=source, electra=electra, tokenizer=tokenizer)


def _settings(source: Path, config: Config) -> tuple[dict[str, Scalar], Settings]:
    """Returns the keys to continue a model of `config`, and the keys to report with their reasons."""
    if config_of(source) is None:
        return settings_of(config.model), adaptation_settings(config.model.architecture, config.model.hidden_size)[:1]
    optimizer = config.resolved().optimizer  # resolved for the source's number of steps
    rates = ["learning_rate", "muon_learning_rate"][: 2 if optimizer.name == "muon" else 1]
    keys: dict[str, Scalar] = {f"optimizer.{name}": getattr(optimizer, name) for name in rates}
    return dict(keys), [(keys, "the learning rates of its pre-training")]


def _prepare_corpus(out: Path, arguments: _Arguments, inputs: Any, reading: Mapping[str, Any]) -> Corpus:
    """Tokenizes the text with `out/tokenizer` into `out/corpus`, unless that is done."""
    vocab: Path | Tokenizer = out / "tokenizer"
    if arguments.general:
        general = Corpus(arguments.general)
        check_vocabulary(out / "tokenizer", general)
        vocab = Tokenizer.of(general)  # corpora can be mixed only if they have the same vocabulary file
    prepare(inputs, vocab=vocab, out=out / "corpus", holdout=arguments.holdout, **reading)
    return Corpus(out / "corpus")


def _passes_per_step(config: Config, general_fraction: float, corpus: Corpus) -> float:
    return config.train.batch_size * config.data.sequence_length * (1 - general_fraction) / max(1, corpus.num_tokens)


def _num_steps(passes_per_step: float) -> int:
    usual, most = (max(1, round(passes / passes_per_step)) for passes in ADAPTATION_PASSES)
    fewest, limit = ADAPTATION_STEPS
    return min(limit, max(usual, min(most, fewest)))


def _has_case(corpus: Corpus) -> bool:
    """Returns whether most letters of a sample have case; scripts without spaces between words have no case."""
    documents = (corpus[number][:SAMPLE_TOKENS] for number in range(min(SAMPLE_DOCUMENTS, len(corpus))))
    text = Tokenizer.of(corpus).decode(token for document in documents for token in document.tolist())
    letters = [letter for letter in text if letter.isalpha()]
    return 2 * sum(letter.lower() != letter.upper() for letter in letters) > len(letters)


def _warn(corpus: Corpus, dev_split: Split | None) -> None:
    """Prints warnings about a text, except about unknown tokens, which `prepare` reports."""
    if corpus.num_tokens < LITTLE_TEXT:
        say(
            f"warning: {corpus.num_tokens:,} tokens are too little text to adapt to; add text, or fine-tune the "
            "original encoder"
        )
    per_word = corpus.coverage().tokens_per_word
    if per_word is not None and per_word > MAX_TOKENS_PER_WORD and _has_case(corpus):
        say(
            f"warning: {per_word:.1f} tokens per word: the text may be in another language than the model's; adapt a "
            "model of its language, or a multilingual model"
        )
    if dev_split is not None and dev_split.words is None and corpus.num_tokens <= MAX_SEARCHED_TOKENS:
        texts = [texts[0] for texts in dev_split.texts if len(texts) == 1]  # pairs are not documents
        known = {ids.tobytes() for ids in Tokenizer.of(corpus).encode_batch(texts)}
        seen = len(known & {document.tobytes() for document in corpus})
        if seen:
            say(
                f"warning: {seen:,} of the {len(known):,} validation texts of the task are documents of the domain "
                "text, so the adapted encoder will have seen them; remove them, or pass other examples with --dev"
            )


def _read_dev(task: str, data: Mapping[str, Any]) -> Split | None:
    """Reads the task's data, to find mistakes early; returns the validation split, None without data."""
    if data["train"] is None:
        options = {"dev": data["dev"] is not None, "task-text": len(data["text"]), "label": len(data["label"])}
        if flag := next((flag for flag, is_given in options.items() if is_given), None):
            raise InputError(f"--{flag}: needs --task-data")
        return None
    with contextlib.ExitStack() as copies:
        tables = {name: file_or_table(name, data[name]) for name in ("train", "dev") if data[name] is not None}
        files = {name: copies.enter_context(local_file(path)) for name, path in tables.items()}
        (task_data,) = read_tasks(task, files=files, columns={name: data[name] for name in ("text", "label")})
    return task_data.dev[0]
