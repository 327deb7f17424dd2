"""`export` and `import_`: conversion between runs and Hugging Face folders."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from electra_fast import checkpoint
from electra_fast.config.presets import adaptation_settings
from electra_fast.data.corpus import Tokenizer, location
from electra_fast.data.object_store import delete_objects, list_objects, read, upload_folder
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, remove, replace_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.huggingface.adaptation import (
    config_of,
    read_masked_lm,
    read_with_generator,
    restarted,
    settings_lines,
)
from electra_fast.huggingface.card import Origin, metadata, model_card
from electra_fast.huggingface.config import ONNX_FILE, OWN_KEY
from electra_fast.huggingface.folder import read_model, read_models, write_model
from electra_fast.huggingface.onnx import require_packages, write_onnx
from electra_fast.huggingface.source import checkpoint_of, folders_of, origin, tokenizer_folder
from electra_fast.huggingface.tokenizer import FILES, INPUT_NAMES, copy_tokenizer, special_ids
from electra_fast.huggingface.vocabulary import with_vocabulary
from electra_fast.huggingface.weights import num_parameters
from electra_fast.messages import say
from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS, networks_of
from electra_fast.results import Result

# Marks by which `export` recognizes its own folders, in the file that is uploaded last and in the first one.
_MARKS = {"config.json": f'"{OWN_KEY}"'.encode(), "README.md": b"exported by electra-fast"}
# Names of the files that `export` writes.
_NAMES = {*_MARKS, *FILES, "model.safetensors", ONNX_FILE}
_ONNX_OUTPUTS = {"encoder": "last_hidden_state", "discriminator": "logits"}


@dataclass(frozen=True, eq=False, repr=False)
class ExportResult(Result):
    """The result of `export`: its location (a string for a URL), its folders, and its ONNX files."""

    out: Path | str
    folders: list[str]
    onnx: dict[str, str]
    """The comparison of each ONNX file with torch, by its path within `out`."""

    def lines(self) -> Iterator[str]:
        """Yields the location of the folders, then a line per ONNX file."""
        after = "" if isinstance(self.out, Path) else " after a download"
        yield f"{self.out}: {', '.join(self.folders)} load with transformers' from_pretrained{after}"
        yield from (f"{self.out}/{name}: {comparison}" for name, comparison in self.onnx.items())


@dataclass(frozen=True, eq=False, repr=False)
class ImportResult(Result):
    """The result of `import_`: the run's folder and its networks."""

    out: Path
    networks: list[str]

    def lines(self) -> Iterator[str]:
        """Yields a line with the next command."""
        yield (
            f"{self.out}: a run at step 0 with a new learning-rate schedule and no optimizer state; train it with "
            f"`electra-fast pretrain CORPUS --out {self.out}`"
        )


def export(
    run: str | Path,
    *,
    out: str | Path,
    unfinished: bool = False,
    onnx: bool = False,
    language: str | Sequence[str] = (),
    license: str | None = None,
    dataset: str | Sequence[str] = (),
    base_model: str | None = None,
) -> ExportResult:
    """Writes out/encoder, out/discriminator and out/generator, each with tokenizer and model card, for `transformers`.

    encoder/ is the model to fine-tune or to use elsewhere: the discriminator's encoder without a head or, for the
    objective `mlm`, the generator's. If an objective produces another kind of masked language model, encoder/ includes
    its head, and there is no discriminator/. Heads that no class of `transformers` has are dropped and listed on
    standard error. If token type 1 never occurred in training, its embedding becomes a copy of type 0's.

    Args:
        run: A run (its latest checkpoint), a checkpoint, or Hugging Face folders.
        out: Output folder; an earlier export is replaced atomically. Or a URL in an object store, such as
            `s3://bucket/model`; an earlier export there is not loadable until the new one is complete.
        unfinished: Export even if the run has steps left.
        onnx: Also write encoder/model.onnx (last hidden states) and discriminator/model.onnx (logits; not for
            `deberta`, whose head `transformers` lacks), and compare them with torch. Needs the extra `onnx`.
        language: Language code of the text, such as `hu`, or several, for the model card.
        license: Identifier of the model's license, such as `apache-2.0`, for the model card.
        dataset: Name of the training text on the Hugging Face Hub, or several, for the model card.
        base_model: Name on the Hub of the model from which an import started, for the model card.

    Raises ValueError if the run is not finished, or if `out` contains anything but an earlier export; ElectraFastError
    if the outputs of an ONNX file are wrong; OSError if an upload fails, with the local folder that holds the export.
    """
    source = Path(run)
    target = location(out)
    if onnx:
        require_packages()
    about = metadata(_as_list(language), license, _as_list(dataset), base_model)
    if isinstance(target, str):
        is_free = _is_free_in_store(target)
        names = [name for name, _ in list_objects(target)]
    else:
        is_free = _is_empty(target) or _is_export(target)
        names = [path.relative_to(target).as_posix() for path in target.glob("*/*")]
    if not is_free:
        raise InputError(f"{target}: not empty and not an earlier export; choose another folder")
    if other := next((name for name in names if name.partition("/")[2] not in _NAMES), None):
        raise InputError(f"{target}: {other} does not belong to the earlier export and would be lost; move it away")
    source_origin = origin(source)
    if not unfinished:
        _check_finished(source, source_origin)
    model = read_model(source)
    source_origin = _with_trained_types(source, source_origin, model)
    tokenizer = tokenizer_folder(source, model.config.model.vocab_size)
    _check_complete(source, model, "export needs")
    if model.config.model.heads != "dense":
        raise InputError(
            f'{source}: no class of transformers has model.heads = "{model.config.model.heads}"; fine-tune the run'
        )
    _report_extra_heads(model, "not exported, since no class of transformers has this head")

    if not source_origin.token_type_1_trained:
        _copy_token_type_0(model)

    onnx_outputs = dict(_ONNX_OUTPUTS) if onnx else {}
    if onnx and model.config.model.architecture == "deberta" and onnx_outputs.pop("discriminator"):
        say("note: discriminator: no ONNX file, since no class of transformers has its head")
    folders: list[str] = []
    measured: dict[str, str] = {}

    def write_role(folder: Path, role: str, headless: bool = False) -> None:
        shape = model.config.model
        length = {"model_max_length": shape.max_positions}  # may have grown
        copy_tokenizer(tokenizer, folder, INPUT_NAMES[shape.architecture], length)
        trained = source_origin.token_type_1_trained
        write_model(folder, model, role, special_ids(folder), trained, headless=headless)
        sizes = num_parameters(folder / "model.safetensors")
        has_onnx = folder.name in onnx_outputs
        card = model_card(model.config, role, sizes, source_origin, about, headless=headless, has_onnx=has_onnx)
        (folder / "README.md").write_text(card, encoding="utf-8")
        folders.append(folder.name)

    def write(folder: Path) -> None:
        for role in model.networks:
            write_role(folder / role, role)
        if "encoder" not in model.networks:
            write_role(folder / "encoder", next(role for role in PARTS if role in model.networks), headless=True)
        for name, output in onnx_outputs.items():
            if (folder / name).is_dir():
                measured[f"{name}/{ONNX_FILE}"] = write_onnx(folder / name, output)

    if isinstance(target, str):
        _write_to_store(target, write)
    else:
        _write_folder(target, write)
    return ExportResult(target, sorted(folders), measured)


def _as_list(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def import_(
    model: str | Path,
    *,
    out: str | Path,
    generator: str | Path | None = None,
    mlm: bool = False,
    vocab: str | Path | None = None,
) -> ImportResult:
    """Creates a run at step 0, for `pretrain` to continue, from Hugging Face folders or another run.

    `model` contains an export, or discriminator/ and generator/ (or only generator/: objective `mlm`) of other models;
    a model without a head gets a new one. The folder of a DeBERTaV3 with pytorch_model.generator.bin contains both
    networks. Sizes and tying come from the folders, the rest of config.toml from the exported run or, for other models,
    from the preset of that size. A run or a checkpoint keeps all of its networks, heads and settings. The learning-rate
    schedule restarts: its warmup is 5% of the steps unless set, and its peak learning rates are derived from the steps
    if they were in the exported run. Precision, attention backend and execution are `auto` again.

    Args:
        model: The folders, a run or a checkpoint. With `generator` or `mlm`, one encoder: a folder of any class, an
            export, a run or a checkpoint.
        out: The run's folder, missing or empty.
        generator: Makes a run for replaced-token detection from one encoder, with the settings of
            `config.presets.adaptation_settings` unless it was trained here. "small": a new generator of about a quarter
            of its width, which shares its embeddings. "same-layers:N": copies of its first N layers, which share its
            embeddings. Or a masked language model with the same vocabulary: a folder, a run or a checkpoint. With
            `deberta`, the embeddings are `disentangled`.
        mlm: Makes a run of masked language modeling from one encoder, with the same settings. Its head is a copy of
            the source's head or of a discriminator's corrective head, or new.
        vocab: Another vocabulary: a tokenizer's folder or file, such as the output of `vocab` with `trim`. Entries of
            both vocabularies keep their embeddings and output biases. A new entry starts as the mean of the pieces
            into which the model's tokenizer splits it, or as the mean of all entries if it knows none of them.

    Raises FileNotFoundError, or ValueError with the file, field, value and remedy.
    """
    source = Path(model)
    out = Path(out)
    if not _is_empty(out):
        raise InputError(f"{out}: not empty; choose another folder for the run")
    if vocab is not None:
        Tokenizer(vocab)  # raises an error before the model is read
    electra = read_to_train(source, generator, mlm=mlm)
    if (mlm or generator is not None) and config_of(source) is None:
        shape = electra.config.model
        for line in settings_lines(electra.config, adaptation_settings(shape.architecture, shape.hidden_size)):
            say(line)
    electra.config = electra.config.override({"train.out": str(out)})
    tokenizer = tokenizer_folder(source, electra.config.model.vocab_size)
    if vocab is not None:
        electra = with_vocabulary(electra, tokenizer, Path(vocab))
        tokenizer = Path(vocab)
    _write_folder(out, partial(write_run, source=source, electra=electra, tokenizer=tokenizer))
    return ImportResult(out, list(electra.networks))


def read_to_train(source: Path, generator: str | Path | None, *, mlm: bool) -> Electra:
    """Returns the model of the run that `import_` makes, with the run's configuration."""
    if mlm and generator is not None:
        raise InputError(f"--mlm trains without a generator; remove --mlm or --generator {generator}")
    if generator is not None:
        return read_with_generator(source, str(generator))
    return read_masked_lm(source) if mlm else _read_to_continue(source)


def write_run(folder: Path, *, source: Path, electra: Electra, tokenizer: Path) -> None:
    """Writes a run at step 0 with a model from `source`; config.toml, which makes the folder a run, comes last."""
    copy_tokenizer(tokenizer, folder / "tokenizer", INPUT_NAMES[electra.config.model.architecture])
    trained = _with_trained_types(source, origin(source), electra).token_type_1_trained
    checkpoint.save(folder, electra, None, TrainState(imported=True, token_type_1_trained=trained), keep=1)
    (folder / "config.toml").write_text(electra.config.to_toml(), encoding="utf-8")


def _read_to_continue(source: Path) -> Electra:
    if (stored := checkpoint_of(source)) is not None:
        model = checkpoint.load_model(stored)
    else:
        model = read_models(folders_of(source), with_new_heads=True)
        _check_complete(source, model, "training needs", "; create one with --generator small (generator=...)")
        _report_extra_heads(model, "not in the folder, so it starts untrained")
    model.config = restarted(model.config)
    return model


def _with_trained_types(source: Path, source_origin: Origin, model: Electra) -> Origin:
    """Returns a source's origin, with token type 1 as trained if it is no longer a copy in a folder of `export`.

    Other programs that fine-tune such a folder do not change the key in its config.json.
    """
    if checkpoint_of(source) is not None or all(torch.equal(*table) for table in _token_types(model)):
        return source_origin
    return dataclasses.replace(source_origin, token_type_1_trained=True)


def _token_types(model: Electra) -> Iterator[Tensor]:
    return (table for name, table in model.named_parameters() if name.endswith(".token_type"))


def _check_finished(source: Path, source_origin: Origin) -> None:
    step = source_origin.steps
    num_steps = source_origin.num_steps
    if step < num_steps and (step or not source_origin.imported):  # an untrained import counts as finished
        raise InputError(
            f"{source}: at step {step:,} of {num_steps:,}; finish it with `electra-fast pretrain`, or export it "
            "as it is with --unfinished (unfinished=True)"
        )


def _check_complete(source: Path, model: Electra, needs: str, remedy: str = "") -> None:
    missing = networks_of(model.config).keys() - model.networks.keys()
    if missing:
        present = " and ".join(model.networks)
        raise InputError(f"{source}: has only the {present}; {needs} the {' and '.join(sorted(missing))} too{remedy}")


def _report_extra_heads(model: Electra, remark: str) -> None:
    for role, network in model.networks.items():
        for name in network.heads.keys() - {f"{role}_head"}:
            say(f"note: {name}: {remark}")


@torch.no_grad()
def _copy_token_type_0(model: Electra) -> None:
    for table in _token_types(model):
        table[1] = table[0]


def _is_empty(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: must be a folder, but is a file; choose another folder")
    return not foreign_names(folder)


def _is_export(folder: Path) -> bool:
    entries = list(folder.iterdir())
    configs = [entry / "config.json" for entry in entries if entry.name in PARTS]
    return len(configs) == len(entries) and all(
        path.is_file() and f'"{OWN_KEY}"' in path.read_text(encoding="utf-8", errors="replace") for path in configs
    )


def _is_free_in_store(url: str) -> bool:
    """Returns whether the only objects below a URL, if any, belong to an export, complete or not."""
    folders = {name.partition("/")[0] for name, _ in list_objects(url)}
    return folders <= PARTS.keys() and all(
        any(mark in (read(f"{url}/{folder}/{name}") or b"") for name, mark in _MARKS.items()) for folder in folders
    )


def _write_to_store(url: str, write: Callable[[Path], None]) -> None:
    """Writes a temporary folder and replaces the objects below a URL; the folder stays if the upload fails."""
    parent = Path(tempfile.mkdtemp(prefix="electra-fast-export-"))
    folder = parent / "export"
    _write_folder(folder, write)
    try:
        old = [name for name, _ in list_objects(url)]
        delete_objects(url, [name for name in old if name.endswith("/config.json")])
        new = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        delete_objects(url, [name for name in old if name not in new])
        upload_folder(folder, url, last="config.json")
    except KeyboardInterrupt:
        remove(parent)
        raise
    except (OSError, InputError) as error:
        raise OSError(f"{url}: not written: {error}; copy the export from {folder}") from error
    remove(parent)


def _write_folder(out: Path, write: Callable[[Path], None]) -> None:
    try:
        replace_folder(out, write)
    except FileNotFoundError:
        raise  # the message names the source
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out}: not written: {error}") from error
