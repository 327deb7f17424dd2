"""The folder of a run: creates it, or reopens it to resume the same run; refuses anything else.

Checks a command completely before torch is imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from electra_fast import _data
from electra_fast.config.config import AUTO, FREE_KEYS, HARDWARE_KEYS, Config, config_of
from electra_fast.config.presets import DEFAULT_PRESET, OBJECTIVE_SPECS, RECIPES
from electra_fast.config.section import Value, present_name
from electra_fast.data.corpus import write_tokenizer
from electra_fast.data.mixture import Corpora, Mixture, missing_folder
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import errors_named, foreign_names, replace_file
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.files.json_files import parse_json
from electra_fast.huggingface.tokenizer import check_vocabulary, run_tokenizer
from electra_fast.messages import say
from electra_fast.training import mirror
from electra_fast.training.loggers import forget_loggers, require_loggers

Changes = dict[str, tuple[Value, Value]]

# Keys that determine the parameters and moments. A run can never change them.
FIXED_KEYS = {"objective.name", "objective.generator_first", "optimizer.name"}
FIXED_SECTIONS = ("model.", "generator.")
# Exceptions, which may grow: `checkpoint.lengthened` extends learned positions.
GROWING = ("model.max_positions", "model.rope_theta", "model.local_rope_theta")
NOT_FIXED = {"model.dropout", "model.attention_dropout", "model.attention", *GROWING}
# Weights of losses that need a head. A head exists from the start or not at all.
HEAD_WEIGHTS = {"objective.corrective_weight", "objective.contrastive_weight"}
# The name, among the changed keys, for the corpora. Its values are content hashes and weights.
CORPUS = "corpus"
CHANGES_FILE = "changes.jsonl"


@dataclass(frozen=True)
class Run:
    """An open run: its folder, resolved configuration, and the checkpoint to resume from, if any."""

    folder: Path
    config: Config
    checkpoint: Path | None = None
    state: TrainState | None = None
    changes: Changes = field(default_factory=dict)
    """Differences from the run that wrote the checkpoint, except free keys: key → (was, is)."""
    recorded_keys: frozenset[str] = frozenset()
    """Hardware keys set to `auto` whose values are the ones recorded in the run."""
    kernels: tuple[tuple[str, str], ...] = ()
    """`ComputeConfig.kernels`, once chosen."""

    def with_hardware(self, config: Config) -> Run:
        """Returns the run with the hardware keys of the resolved `config`, and records them in its folder.

        Replacing a recorded value counts as a change.
        """
        differences = self.config.differences(config)
        replaced = {
            name: pair for name, pair in differences.items() if name in self.recorded_keys and name not in FREE_KEYS
        }
        if replaced and self.state is not None:
            _record(self.folder, self.state.step, replaced)
        if differences:
            replace_file(self.folder / "config.toml", config.to_toml())
        return replace(self, config=config, changes=self.changes | replaced)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds a folder's lock. Raises ValueError if another process trains there."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a folder for --out")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is training in this folder; wait for it, or choose another --out"
            ) from None
        yield


def open_run(config: Config, mixture: Mixture, *, allow_changes: bool = False, from_step: int | None = None) -> Run:
    """Creates the folder `train.out`, or reopens it at its newest intact checkpoint or at the one of `from_step`.

    Going back to `from_step` renames later checkpoints. With `train.mirror`, first downloads a newer checkpoint from
    the mirror, and then claims the mirror.

    In an existing run, free keys and `train.steps` may change, other keys only with `allow_changes`. RUN/changes.jsonl
    records changes. Raises ValueError if the folder holds something else, or a run that cannot be resumed with this
    configuration or corpus.
    """
    folder = Path(config.train.out)
    require_loggers("train.loggers", config.train.loggers)
    if config.train.mirror:
        mirror.restore(folder, config.train.mirror, goes_back=from_step is not None)
    run = _open(folder, config, mixture, allow_changes, from_step)
    if config.train.mirror:
        mirror.claim(folder, config.train.mirror, from_step)
    return run


def _open(folder: Path, config: Config, mixture: Mixture, allow_changes: bool, from_step: int | None) -> Run:
    if from_step is not None:
        directory = checkpoint_folder.at_step(folder, from_step)
        checkpoint_folder.verify(directory)
    if not (folder / "config.toml").exists():
        checkpoint_folder.require_config(folder)
        if foreign := foreign_names(folder):
            raise InputError(
                f"{folder}: contains {foreign[0]} but no run (config.toml); choose an empty folder for --out"
            )
        return _new_run(folder, config, mixture)
    checkpoint_folder.remove_unfinished(folder)
    if not checkpoint_folder.steps(folder):
        # Stopped before its first checkpoint: starts again.
        return _new_run(folder, config, mixture)
    check_vocabulary(run_tokenizer(folder), mixture.corpora[0])
    if from_step is None:
        directory, warnings = checkpoint_folder.recover_run(folder)
        for warning in warnings:  # now, since checkpoints have been renamed even if the run is refused below
            say(f"warning: {warning}")
    return _resumed_run(folder, directory, config, mixture, allow_changes, goes_back=from_step is not None)


def config_of_run(
    config: Config | str | os.PathLike[str] | None,
    corpus: Corpora | None = None,
    overrides: Mapping[str, object] | None = None,
    out: str | Path | None = None,
    from_step: int | None = None,
) -> Config:
    """Returns the configuration of a run, as `config_of`. If `config` is None, reads it from the run in `out`, if any.

    Hardware choices recorded in the run are kept if they work on this machine; otherwise they are made again. Raises
    FileNotFoundError, with the file's name, if its corpus is missing and neither argument names another.
    """
    values = Config.values_of((overrides or {}).items())
    if config is None and out:
        if from_step is not None:
            return config_at(Path(out), from_step).override(values)
        checkpoint_folder.require_config(Path(out))
        config_file = Path(out) / "config.toml"
        recorded = dict.fromkeys(HARDWARE_KEYS, AUTO) | values
        if config_file.exists():
            config = config_file
            values = recorded
        elif (url := values.get("train.mirror")) and (mirrored := mirror.read_config(str(url))):
            return Config.of_table(mirrored, recorded)
    result = config_of(config, values)
    is_file = isinstance(config, (str, os.PathLike))
    is_named = corpus is not None or "data.corpus" in values
    if is_file and not is_named and (missing := missing_folder(result.data.corpus)):
        where = f'{config}: data.corpus = "{missing}"'
        raise FileNotFoundError(f"{where}: no such folder; pass its new location: electra-fast pretrain CORPUS")
    return result


def config_at(folder: Path, step: int) -> Config:
    """Returns a run's configuration at a checkpoint, with the current number of steps and free keys."""
    then, now = (Config.load(path / "config.toml") for path in (checkpoint_folder.at_step(folder, step), folder))
    return then.override({name: now.value(name) for name in {*FREE_KEYS, "train.steps"}})


def _new_run(folder: Path, config: Config, mixture: Mixture) -> Run:
    config = resolved(config, mixture)
    replace_file(folder / "config.toml", config.to_toml())  # first, since it marks the folder as a run
    with errors_named(folder / "tokenizer"):
        write_tokenizer(folder / "tokenizer", mixture.tokenizer, max_length=config.model.max_positions)
    return Run(folder, config)


def _resumed_run(
    folder: Path, directory: Path, config: Config, mixture: Mixture, allow_changes: bool, *, goes_back: bool
) -> Run:
    state = checkpoint_folder.read_state(directory)
    saved = Config.load(directory / "config.toml")
    is_import = state.loader is None
    recorded = {} if goes_back else _recorded(folder, state.step)
    if not is_import:
        if saved.data.lanes == AUTO:  # a run from before there were lanes
            saved = saved.override(lanes=1)
        if config.data.lanes == AUTO:
            config = config.override({"data.lanes": _last_value("data.lanes", saved, recorded)})
        # Values derived from the number of steps stay as they were at the run's start.
        names = [f"optimizer.{key}" for key in config.optimizer.unresolved_keys]
        config = config.override({name: _last_value(name, saved, recorded) for name in names})
    choices = _hardware_choices(config, saved, recorded)
    size = config.model.vocab_size or saved.model.vocab_size
    config = resolved(config.override(choices, vocab_size=size), mixture)
    is_fixed = config.model.architecture == "deberta"  # its relative positions would change
    for name in GROWING:
        was = saved.value(name)
        now = config.value(name)
        if is_fixed and now != was:
            raise InputError(
                f"{folder}: {name} = {now!r}: must stay {was!r}, since a deberta model cannot be lengthened"
            )
        if float(str(now)) < float(str(was)):
            raise InputError(f"{folder}: {name} = {now!r}: must be at least {was!r}, the value of this run")
    changes: Changes = {
        name: pair
        for name, pair in saved.differences(config).items()
        # Keys that an import does not fix are chosen when its training starts.
        if name not in FREE_KEYS and (not is_import or name.startswith(FIXED_SECTIONS)) and pair[0] != AUTO
    }
    if state.corpus not in (None, mixture.content_hash):
        changes[CORPUS] = (state.corpus, mixture.content_hash)
    if config.train.steps < state.step:
        raise InputError(
            f"{folder}: train.steps = {config.train.steps}: must be at least {state.step}, the step of this run; "
            "raise it, or choose another --out"
        )
    unrecorded = _since(recorded, changes)
    _refuse(folder, directory, unrecorded, config, allow_changes or is_import)
    if goes_back:
        _forget_changes(folder, state.step)
        for message in checkpoint_folder.set_aside_after(folder, state.step):
            say(message)
    if unrecorded:
        _record(folder, state.step, unrecorded)
    if unrecorded or goes_back:
        forget_loggers(folder, state.step)
    replace_file(folder / "config.toml", config.to_toml())
    return Run(folder, config, directory, state, changes, frozenset(choices))


def _hardware_choices(config: Config, saved: Config, recorded: Changes) -> dict[str, str]:
    """Returns the run's recorded values of hardware keys that are `auto` now.

    Imports and old checkpoints have no recorded values. Their values are chosen as if the run were new.
    """
    asked = [name for name in HARDWARE_KEYS if config.value(name) == AUTO]
    values = {name: _last_value(name, saved, recorded) for name in asked}
    return {name: value for name, value in values.items() if value != AUTO}


def _last_value(name: str, saved: Config, recorded: Changes) -> str:
    return str(recorded[name][1] if name in recorded else saved.value(name))


def resolved(config: Config, mixture: Mixture) -> Config:
    """Fills in the corpus's vocabulary size, the lanes, and the values derived from `train.steps`.

    An embedding table may be larger than the vocabulary: some frameworks pad it for speed on GPUs.
    """
    if 0 < config.model.vocab_size < mixture.vocab_size:
        raise InputError(
            f"model.vocab_size = {config.model.vocab_size}: must be at least {mixture.vocab_size}, the size of the "
            "corpus's vocabulary; remove the key, or prepare the corpus with the model's vocabulary"
        )
    if config.data.lanes == AUTO:
        config = config.override(lanes=_data.auto_lanes(mixture.folders, config.train.batch_size))
    return config.resolved().override(vocab_size=config.model.vocab_size or mixture.vocab_size)


def _refuse(folder: Path, directory: Path, changes: Changes, config: Config, allow_changes: bool) -> None:
    for name, (was, now) in changes.items():
        has_other_heads = name in HEAD_WEIGHTS and (not was) != (not now)
        if name in FIXED_KEYS or has_other_heads or (name.startswith(FIXED_SECTIONS) and name not in NOT_FIXED):
            raise InputError(
                f"{folder}: {name} = {now!r}, but this run was started with {was!r}, and a change would need another "
                f"model or optimizer state; {_how_to_resume(name, directory)}, or choose another --out"
            )
        if name == "train.steps" and OBJECTIVE_SPECS[config.objective.name].num_stages > 1:
            raise InputError(
                f"{folder}: train.steps = {now}, but this run was started with {was}, and a change would move the "
                "boundary of its stages; restore the value to resume, or choose another --out"
            )
        if allow_changes or name == "train.steps":
            continue
        remedy = "restore the value to resume, pass --allow-changes (allow_changes=True), or choose another --out"
        if name == CORPUS:
            remedy = remedy.replace("restore the value", "pass that corpus")
            raise InputError(
                f"{directory}: trained on the corpus with content hash {was}, but {config.data.corpus} has {now}; "
                + remedy
            )
        raise InputError(f"{folder}: {name} = {now!r}, but this run was started with {was!r}; {remedy}")


def _how_to_resume(name: str, directory: Path) -> str:
    """Returns the remedy for a changed fixed key. For the architecture, the remedy is the run's recipe."""
    if name != "model.architecture":
        return "restore the value to resume"
    saved = Config.load(directory / "config.toml")
    presets = {candidate: Config.preset(DEFAULT_PRESET, candidate) for candidate in RECIPES}
    recipes = [candidate for candidate, config in presets.items() if config.value(name) == saved.value(name)]
    recipe = min(recipes, key=lambda candidate: len(presets[candidate].differences(saved)))
    return f'resume with --out alone, or with --recipe {recipe} (recipe = "{recipe}" in the file)'


def _since(recorded: Changes, changes: Changes) -> Changes:
    """Returns the changes that no earlier session recorded, including values that were changed back."""
    unrecorded = {name: (recorded.get(name, (was, was))[1], now) for name, (was, now) in changes.items()}
    unrecorded |= {name: (now, was) for name, (was, now) in recorded.items() if name not in changes}
    return {name: (before, now) for name, (before, now) in unrecorded.items() if before != now}


def _recorded(folder: Path, step: int) -> Changes:
    """Returns the changes made at this step or later, which no checkpoint includes: key → (first old, last new)."""
    changes: Changes = {}
    path = folder / CHANGES_FILE
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        try:
            record = parse_json(line)
            for name, pair in record["changes"].items() if record["step"] >= step else ():
                was, now = (present_name(name, value) for value in pair)
                changes[name] = (changes.get(name, (was, now))[0], now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: line {number}: not a record of changes ({error}); remove the line") from None
    return changes


def _forget_changes(folder: Path, step: int) -> None:
    path = folder / CHANGES_FILE
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        replace_file(path, "".join(line for line in lines if json.loads(line)["step"] < step))


def _record(folder: Path, step: int, changes: Changes) -> None:
    path = folder / CHANGES_FILE
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"step": step, "time": now, "version": _data.VERSION, "changes": changes}
    replace_file(path, before + json.dumps(record) + "\n")
