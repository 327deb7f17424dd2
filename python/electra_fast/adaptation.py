"""`adapt`: continues an encoder on text of a domain, and measures by a task of that domain what that was worth.

Its parts are other commands': `prepare`, `import`, `pretrain`, `finetune`. What it chooses is in
`config.presets` and `_objective`.
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
"""File in the run's folder: what was asked for, and what was chosen."""
BEFORE = "before"
AFTER = "after-step-{}"
"""Folders of the fine-tunings; a run may be trained further, and is then fine-tuned again."""
OBJECTIVES = ("mlm", "electra")
# English in a vocabulary of its own has 1.1 to 1.5 tokens per word, technical text up to 2.
MOST_PER_WORD = 2.5
SAMPLE_DOCUMENTS = 100
SAMPLE_TOKENS = 500
# Larger corpora are not searched for the texts that the task is scored on.
MOST_SEARCHED = 1 << 24


@dataclass(frozen=True, eq=False, repr=False)
class AdaptResult(Result):
    """The result of `adapt`: the run, what was chosen, and the task's scores before and after."""

    out: Path
    objective: str
    choices: Sequence[str]
    """What was chosen and why, a line each."""
    step: int
    is_finished: bool = True
    """False if `train.max_minutes` stopped the training; the same call resumes."""
    metric: str | None = None
    """The task's main score, of which `before` and `after` are the values by seed."""
    before: Sequence[float] = ()
    after: Sequence[float] = ()
    num_examples: int = 0
    """Examples that the scores are of, which limit what a difference means."""

    def lines(self) -> Iterator[str]:
        """Yields where the run is, and the table of scores in percent."""
        if not self.is_finished:
            yield f"{self.out}: step {self.step}, stopped by train.max_minutes; the same call resumes"
            return
        done = f"adapted by {self.objective}, step {self.step}" if self.step else "not trained"
        yield f"{self.out}: {done}; electra-fast export or finetune {self.out}"
        if self.metric is None and self.step:
            yield (
                "whether it gained, only a task tells: give --task-data (the AUC that pretrain reports is no measure "
                "of gain)"
            )
        if self.metric is None:
            return
        rows = {"as it is": self.before, "adapted": self.after}
        medians = [statistics.median(row) for row in rows.values()]
        yield f"{self.metric} in percent, of {self.num_examples:,} examples"
        yield f"{'':<12} {'median':>7}  by seed"
        for (name, scores), median in zip(rows.items(), medians, strict=True):
            yield f"{name:<12} {100 * median:7.2f}  {'  '.join(f'{100 * score:.2f}' for score in scores)}"
        pairs = zip(self.before, self.after, strict=True)
        each = "  ".join(f"{100 * (after - before):+.2f}" for before, after in pairs)
        yield f"{'difference':<12} {100 * (medians[1] - medians[0]):+7.2f}  {each}"
        yield self._verdict()

    def _verdict(self) -> str:
        if len(self.after) == 1:
            return "a single seed does not tell a gain from chance: give --seeds 3"
        if min(self.after) > max(self.before):
            return "a gain: the lowest score of the adapted encoder is above the highest of the other"
        if max(self.after) < min(self.before):
            return "a loss: use the encoder as it is"
        return "no clear difference: the scores of the seeds overlap"


@dataclass(frozen=True)
class _Asked:
    """The arguments of `adapt` that decide what the run at step 0 is."""

    model: str
    generator: str | None
    objective: str | None
    holdout: float
    general: str | None
    vocab: str | None
    trim: bool


@dataclass(frozen=True)
class _Start:
    """A run that can be trained, with its corpora, and lines on what was chosen."""

    corpus: Corpora
    config: Config
    choices: list[str]

    @classmethod
    def of(
        cls, out: Path, asked: _Asked, share: float, choices: Sequence[str], config: Config, corpus: Corpus
    ) -> _Start:
        """Completes the choices by what is known of the text; `share` is that of general text."""
        per_word = corpus.coverage().tokens_per_word
        words = "" if per_word is None else f", {per_word:.2f} tokens per word"
        steps = config.train.steps
        passes = config.train.steps * _passes_per_step(config, share, corpus)
        lines = [
            f"text: {corpus.num_tokens:,} tokens in {len(corpus):,} documents{words}",
            *choices,
            f"train.steps = {steps:,} of {config.train.batch_size} rows of {config.data.sequence_length} tokens: "
            f"{passes:.3g} passes over the text",
        ]
        own = str((out / "corpus").absolute())
        if not asked.general:
            return cls(own, config, lines)
        lines.append(f"{share:.0%} of each step is general text, so that less of it is forgotten")
        return cls({own: 1 - share, asked.general: share}, config, lines)


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
    """Continues an encoder on text of a domain, as suits its kind and the amount of text; says what it chose, and why.

    Leaves a run in `out`, which `export`, `finetune`, `evaluate` and `pretrain` take; beside its checkpoints the corpus
    (`corpus/`), the choices (`adaptation.json`) and, with `task_data`, the fine-tunings (`before/`, `after-step-N/`).
    Called again after an interruption, it resumes there; with more steps, it continues.

    Args:
        model: A run, a checkpoint or a Hugging Face folder. A run that is not finished is refused, unless its
            checkpoint is named; so is a model tuned for sentences.
        inputs: Text of the domain, as for `prepare`; it is tokenized with the model's own tokenizer,
            unless `vocab` or `trim` gives it another.
        out: The run's folder, missing, empty, or left by an interruption of the same call.
        general: A corpus of general text, prepared with the model's tokenizer, of which some is mixed in.
        generator: For replaced-token detection from an encoder that has no generator, as for `import_`.
        vocab: Another vocabulary for the model, as for `import_`.
        trim: Keep only the entries of the vocabulary that the text uses, as `trim` of `vocab`.
        holdout: Fraction of the documents set aside for validation.
        task_data: Labeled data of the domain, as `train` of `finetune`: the encoder is fine-tuned on them before and
            after. Only such a task tells whether adapting gained; the AUC of pre-training does not.
        task: `classification`, `regression`, `tagging` or `question-answering`.
        dev: Labeled data to score on; by default a part of `task_data`.
        task_text: The text columns of `task_data`, as `text` of `finetune`.
        label: Its label columns.
        seeds: Number of fine-tuning runs each, with seeds 0 to `seeds - 1`.
        overrides: Keys of the run's configuration in place of those chosen, as for `pretrain`, and keys of `finetune`,
            such as `finetune.epochs`. `objective.name` is `mlm` or `electra`; with `train.steps` 0, nothing trains: the
            model has another vocabulary, if any.
        device: The device to train on, as for `pretrain`.
        documents: As for `prepare`, and so are the next five.
        text: The field with the text.
        invalid_utf8: What to do with invalid bytes.
        format: The format of every file.
        skip_bad_rows: Most malformed JSON records to skip.
        threads: Threads that tokenize.
        kind: `files` or `documents`, where `inputs` would be misread.

    Raises:
        ValueError, FileNotFoundError: Model, text, data and options do not fit together.
        Diverged, TrainingFailed, Interrupted: As for `pretrain`.
    """
    given, tuning, is_trained = _sorted(overrides or {})
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
    asked = _asked(given, model, generator, holdout, general, vocab, trim)
    data = {"train": task_data, "dev": dev, "text": task_text, "label": label}
    dev_split = _read_dev(task, data)
    with exclusive(_checked(out, asked)):
        start = _start(out, asked, inputs, reading, given, dev_split)
    for line in start.choices if is_trained else start.choices[:1]:
        say(line)
    scores: dict[str, list[float]] = {}
    metric = None

    def measure(encoder: str | Path, name: str, folder: Path) -> None:
        nonlocal metric
        if task_data is not None:
            what = "the encoder as it is" if name == "before" else "the adapted encoder"
            say(f"{folder}: fine-tunes {what}, with {seeds} {'seed' if seeds == 1 else 'seeds'}")
            options = {"task": task, "seeds": seeds, "device": device, "overrides": tuning, **data}
            ((task_name, found),) = finetune(encoder, out=folder, **options).items()
            metric = found.metric
            scores[name] = [run[found.metric] for run in found.runs]
            # Measured before, so that both are computed alike.
            tuning["finetune.precision"] = read_object(folder / task_name / IDENTITY)["hardware"]["precision"]

    measure(asked.model, "before", out / BEFORE)
    trained = pretrain(start.corpus, out=out, overrides=given, device=device) if is_trained else PretrainResult(out, 0)
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
    """Yields what `adapt` would choose and why, and the plan of its training; leaves nothing.

    Takes the arguments of `adapt`, all of them. The text is tokenized, and the first steps are measured, in a temporary
    folder.
    """
    given, _, is_trained = _sorted(options.pop("overrides"))
    names = ("generator", "holdout", "general", "vocab", "trim")
    asked = _asked(given, model, **{name: options.pop(name) for name in names})
    task = options.pop("task")
    seeds = options.pop("seeds")
    columns = {"train": "task_data", "dev": "dev", "text": "task_text", "label": "label"}
    data = {name: options.pop(option) for name, option in columns.items()}
    dev_split = _read_dev(task, data)
    _checked(Path(out), asked)
    with tempfile.TemporaryDirectory() as folder:
        start = _start(Path(folder), asked, inputs, options, given, dev_split)
        yield from start.choices if is_trained else start.choices[:1]
        if is_trained:
            yield from plan(start.corpus, config=start.config, device=device).lines()
    measured = "" if data["train"] is None else f", and {seeds} fine-tunings each in {BEFORE}/ and {AFTER.format('N')}/"
    yield f"would leave     {out}: the run, its text in corpus/{measured}"


def _sorted(overrides: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Returns the keys of training and of fine-tuning, and whether to train: with 0 steps the model stays as it is."""
    untrained = {name for name in ("steps", "train.steps") if str(overrides.get(name)) == "0"}
    tuning = {name: overrides[name] for name in overrides if name.startswith("finetune.")}
    given = {name: overrides[name] for name in overrides if name not in untrained | tuning.keys()}
    return Config.values_of(given.items()), FinetuningConfig.values_of(tuning.items()), not untrained


def _asked(
    overrides: dict[str, Any],
    model: str | Path,
    generator: str | Path | None,
    holdout: float,
    general: str | Path | None,
    vocab: str | Path | None,
    trim: bool,
) -> _Asked:
    """Returns the arguments as they are recorded; takes the objective out of `overrides`."""
    if Launch.from_environment().world_size > 1:
        raise InputError("adapt runs in one process; for several GPUs: electra-fast import, and torchrun with pretrain")
    objective = overrides.pop("objective.name", None)
    if objective not in (None, *OBJECTIVES):
        raise InputError(f"objective.name = {objective!r} must be one of {', '.join(OBJECTIVES)} to adapt")
    if objective == "mlm" and generator is not None:
        raise InputError(f"objective.name = mlm has no generator; leave out --generator {generator}")
    return _Asked(
        model=str(Path(model).absolute()),
        generator=None if generator is None else str(generator),
        objective=objective,
        holdout=holdout,
        general=None if general is None else str(absolute(str(general))),
        vocab=None if vocab is None else str(Path(vocab).absolute()),
        trim=trim,
    )


def _checked(out: Path, asked: _Asked) -> Path:
    """Returns the folder. Raises ValueError unless it is new, or left by the same call."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose another folder for the run")
    recorded = read_optional(out / RECORD).get("asked", {})
    if not recorded and foreign_names(out):
        raise InputError(f"{out}: not empty; choose another folder for the run")
    for name, value in vars(asked).items() if (out / "config.toml").exists() else ():
        if (was := recorded.get(name, value)) != value:
            raise InputError(
                f"{out}: begun with {name} = {was!r}, now it is {value!r}; leave it as it was to resume, or give "
                "another --out"
            )
    return out


def _start(
    out: Path,
    asked: _Asked,
    inputs: Any,
    reading: Mapping[str, Any],
    overrides: Mapping[str, Scalar],
    dev_split: Split | None,
) -> _Start:
    """Prepares the text and makes the run, or finds both; prints what is unwise."""
    source = Path(asked.model)
    is_made = (out / "config.toml").exists()
    if not is_made:
        kind = kind_of(source)
        if asked.objective == "electra" and kind != "pair" and not asked.generator:
            raise InputError(f"{source}: has no generator, which electra needs; give one with --generator")
        objective, why = _objective(asked, kind)
        # Before the text is prepared, which may take hours: finds mistakes.
        electra = read_to_train(source, asked.generator, mlm=objective == "mlm")
        own = tokenizer_folder(source, electra.config.model.vocab_size)
        tokenizer = _tokenizer(out, asked, own, inputs, reading)
    corpus = _prepared(out, asked, inputs, reading)
    _warn(corpus, dev_split)
    if not is_made:
        _make_run(out, asked, electra, why, tokenizer, corpus, overrides)
    record = read_object(out / RECORD)
    config = Config.load(out / "config.toml").override(overrides)
    return _Start.of(out, asked, record["general"], record["choices"], config, corpus)


def _tokenizer(out: Path, asked: _Asked, own: Path, inputs: Any, reading: Mapping[str, Any]) -> Path:
    """Records what is asked and returns the tokenizer for it, of which `out` gets a copy to prepare the text with.

    `own` is the model's.
    """
    record = read_optional(out / RECORD)
    replace_file(out / RECORD, json_text({"asked": vars(asked)}))
    tokenizer = Path(asked.vocab) if asked.vocab else own
    if asked.trim:
        source = tokenizer
        tokenizer = out / "trimmed"
        if record.get("asked") != vars(asked):
            remove(tokenizer)
        if isinstance(inputs, Iterator):
            raise InputError("trim reads the text twice; give files, or a list of documents")
        if not tokenizer.exists():
            make_vocab(inputs, out=tokenizer, trim=source, **reading)
    copy_tokenizer(tokenizer, out / "tokenizer", INPUT_NAMES["bert"])  # `write_run` names the model's inputs
    return tokenizer


def _objective(asked: _Asked, kind: str) -> tuple[str, str]:
    """Returns the objective, and why."""
    if asked.objective is not None:
        return asked.objective, "as given"
    if asked.generator is not None:
        return "electra", "with the generator that you chose"
    if kind == "pair":
        return "electra", "it has a trained generator; masked language modeling gained as much"
    return "mlm", "it has no trained generator, and beside a new one an encoder learns less"


def _make_run(
    out: Path,
    asked: _Asked,
    electra: Electra,
    why: str,
    tokenizer: Path,
    corpus: Corpus,
    overrides: Mapping[str, Scalar],
) -> None:
    """Chooses what is not in `overrides`, records that, and writes the run at step 0; `why` is of the objective."""
    source = Path(asked.model)
    if asked.vocab or asked.trim:
        electra = with_vocabulary(electra, tokenizer_folder(source, electra.config.model.vocab_size), tokenizer)
    share = GENERAL_SHARE if asked.general else 0.0
    keys, settings = _settings(source, electra.config)
    if asked.generator is None and electra.config.objective.name != "mlm":
        keys["objective.generator_first"] = 0  # it is trained
    per_step = _passes_per_step(electra.config.override(keys | dict(overrides)), share, corpus)
    steps = int(overrides.get("train.steps", _num_steps(per_step)))
    keys |= {"train.out": str(out), "train.steps": steps, "train.log_every": max(1, steps // 40)}
    keys |= dict.fromkeys(("train.eval_every", "train.checkpoint_every"), max(1, steps // 4))
    electra.config = electra.config.override(keys)
    chosen = [({key: own[key] for key in own if key not in overrides}, reason) for own, reason in settings]
    choices = [
        f'objective.name = "{electra.config.objective.name}": {why}',
        *settings_lines(electra.config, [(own, reason) for own, reason in chosen if own]),
    ]
    replace_file(out / RECORD, json_text({"asked": vars(asked), "general": share, "choices": choices}))
    write_run(out, source=source, electra=electra, tokenizer=tokenizer)


def _settings(source: Path, config: Config) -> tuple[dict[str, Scalar], Settings]:
    """Returns the keys that continue a model of `config`, and those to mention, with their reasons."""
    if config_of(source) is None:
        return settings_of(config.model), adaptation_settings(config.model.architecture, config.model.hidden_size)[:1]
    optimizer = config.resolved().optimizer  # for the steps of the source
    rates = ["learning_rate", "muon_learning_rate"][: 2 if optimizer.name == "muon" else 1]
    keys: dict[str, Scalar] = {f"optimizer.{name}": getattr(optimizer, name) for name in rates}
    return dict(keys), [(keys, "the rates that it was trained with")]


def _prepared(out: Path, asked: _Asked, inputs: Any, reading: Mapping[str, Any]) -> Corpus:
    """Tokenizes the text into `out/corpus` by `out/tokenizer`, or finds that done."""
    vocab: Path | Tokenizer = out / "tokenizer"
    if asked.general:
        general = Corpus(asked.general)
        check_vocabulary(out / "tokenizer", general)
        vocab = Tokenizer.of(general)  # only corpora with the same file of a vocabulary are mixed
    prepare(inputs, vocab=vocab, out=out / "corpus", holdout=asked.holdout, **reading)
    return Corpus(out / "corpus")


def _passes_per_step(config: Config, share: float, corpus: Corpus) -> float:
    return config.train.batch_size * config.data.sequence_length * (1 - share) / max(1, corpus.num_tokens)


def _num_steps(passes_per_step: float) -> int:
    usual, most = (max(1, round(passes / passes_per_step)) for passes in ADAPTATION_PASSES)
    fewest, limit = ADAPTATION_STEPS
    return min(limit, max(usual, min(most, fewest)))


def _has_case(corpus: Corpus) -> bool:
    """Returns whether most letters of a sample have case: scripts without spaces between words have none."""
    documents = (corpus[number][:SAMPLE_TOKENS] for number in range(min(SAMPLE_DOCUMENTS, len(corpus))))
    text = Tokenizer.of(corpus).decode(token for document in documents for token in document.tolist())
    letters = [letter for letter in text if letter.isalpha()]
    return 2 * sum(letter.lower() != letter.upper() for letter in letters) > len(letters)


def _warn(corpus: Corpus, dev_split: Split | None) -> None:
    """Prints what is unwise about a text; `prepare` has warned of unknown tokens."""
    if corpus.num_tokens < LITTLE_TEXT:
        say(
            f"warning: {corpus.num_tokens:,} tokens are little text to adapt to; without more of it, fine-tune the "
            "encoder as it is"
        )
    per_word = corpus.coverage().tokens_per_word
    if per_word is not None and per_word > MOST_PER_WORD and _has_case(corpus):
        say(
            f"warning: {per_word:.1f} tokens per word: the text may be of another language than the model's; one of "
            "its language, or a multilingual one, learns more from it"
        )
    if dev_split is not None and dev_split.words is None and corpus.num_tokens <= MOST_SEARCHED:
        texts = [each[0] for each in dev_split.texts if len(each) == 1]  # a pair is no document
        known = {ids.tobytes() for ids in Tokenizer.of(corpus).encode_batch(texts)}
        seen = len(known & {document.tobytes() for document in corpus})
        if seen:
            say(
                f"warning: {seen:,} of the {len(known):,} texts that the task is scored on are documents of the text, "
                "which the adapted encoder has seen then; leave them out, or give others with --dev"
            )


def _read_dev(task: str, data: Mapping[str, Any]) -> Split | None:
    """Reads the data of the task, so that mistakes are found first; returns what is scored, None if there are none."""
    if data["train"] is None:
        given = {"dev": data["dev"] is not None, "task-text": len(data["text"]), "label": len(data["label"])}
        if flag := next((flag for flag, is_given in given.items() if is_given), None):
            raise InputError(f"--{flag} is for --task-data, which is not given")
        return None
    with contextlib.ExitStack() as copies:
        tables = {name: file_or_table(name, data[name]) for name in ("train", "dev") if data[name] is not None}
        files = {name: copies.enter_context(local_file(path)) for name, path in tables.items()}
        (found,) = read_tasks(task, files=files, columns={name: data[name] for name in ("text", "label")})
    return found.dev[0]
