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

# What tells a folder of ours: in the file that is uploaded last, and in the first one.
_MARKS = {"config.json": f'"{OWN_KEY}"'.encode(), "README.md": b"exported by electra-fast"}
# Names of the files that `export` writes.
_NAMES = {*_MARKS, *FILES, "model.safetensors", ONNX_FILE}
_ONNX_OUTPUTS = {"encoder": "last_hidden_state", "discriminator": "logits"}


@dataclass(frozen=True, eq=False, repr=False)
class ExportResult(Result):
    """The result of `export`: where it is, a URL as a string, and its folders."""

    out: Path | str
    folders: list[str]
    onnx: dict[str, str]
    """How each ONNX file compares with torch, by its path within `out`."""

    def lines(self) -> Iterator[str]:
        """Yields where the folders are, then a line per ONNX file."""
        once = "" if isinstance(self.out, Path) else ", once they are downloaded"
        yield f"{self.out}: {', '.join(self.folders)} load with transformers' from_pretrained{once}"
        yield from (f"{self.out}/{name}: {comparison}" for name, comparison in self.onnx.items())


@dataclass(frozen=True, eq=False, repr=False)
class ImportResult(Result):
    """The result of `import_`: the run's folder, and its networks."""

    out: Path
    networks: list[str]

    def lines(self) -> Iterator[str]:
        """Yields how to continue."""
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
    objective `mlm`, the generator's. Objectives whose result is a masked language model of another kind keep its head
    there, and have no discriminator/. Heads that no class of `transformers` has are left out and named on standard
    error. If token type 1 never occurred in training, its embedding becomes a copy of type 0's.

    Args:
        run: A run (its latest checkpoint), a checkpoint, or Hugging Face folders.
        out: Output folder; an earlier export is replaced atomically. Or a URL in an object store, such as
            `s3://bucket/model`; an earlier export there is not loadable until the new one is complete.
        unfinished: Export even if the run has steps left.
        onnx: Also write encoder/model.onnx (last hidden states) and discriminator/model.onnx (logits; not of `deberta`,
            whose head `transformers` lacks), compared with torch. Needs the packages of the extra `onnx`.
        language: Code of the text's language, such as `hu`, or several, for the model card.
        license: Identifier of the model's license, such as `apache-2.0`, for the model card.
        dataset: Name of the training text on the Hugging Face Hub, or several, for the model card.
        base_model: Name on the Hub of the model that an import started from, for the model card.

    Raises ValueError if the run is not finished, or if `out` holds anything but an earlier export; ElectraFastError if
    the outputs of an ONNX file are wrong; OSError if an upload fails, with the local folder that has the export then.
    """
    source = Path(run)
    target = location(out)
    if onnx:
        require_packages()
    about = metadata(_listed(language), license, _listed(dataset), base_model)
    if isinstance(target, str):
        is_free = _is_free_in_store(target)
        names = [name for name, _ in list_objects(target)]
    else:
        is_free = _is_empty(target) or _is_export(target)
        names = [path.relative_to(target).as_posix() for path in target.glob("*/*")]
    if not is_free:
        raise InputError(f"{target}: not empty and not an earlier export; choose another folder")
    if other := next((name for name in names if name.partition("/")[2] not in _NAMES), None):
        raise InputError(f"{target}: {other} is not of the earlier export and would be lost; move it away")
    source_origin = origin(source)
    if not unfinished:
        _check_finished(source, source_origin)
    model = read_model(source)
    source_origin = _with_trained_types(source, source_origin, model)
    tokenizer = tokenizer_folder(source, model.config.model.vocab_size)
    _check_whole(source, model, "export needs")
    if model.config.model.heads != "dense":
        raise InputError(
            f'{source}: no class of transformers has model.heads = "{model.config.model.heads}"; fine-tune from the run'
        )
    _say_own_heads(model, "not exported, since no class of transformers has this head")

    if not source_origin.token_type_1_trained:
        _copy_token_type_0(model)

    onnx_outputs = dict(_ONNX_OUTPUTS) if onnx else {}
    if onnx and model.config.model.architecture == "deberta" and onnx_outputs.pop("discriminator"):
        say("note: discriminator: no ONNX file, since no class of transformers has its head")
    folders: list[str] = []
    measured: dict[str, str] = {}

    def write_role(folder: Path, role: str, headless: bool = False) -> None:
        shape = model.config.model
        length = {"model_max_length": shape.max_positions}  # which may have grown
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


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def import_(
    model: str | Path,
    *,
    out: str | Path,
    generator: str | Path | None = None,
    mlm: bool = False,
    vocab: str | Path | None = None,
) -> ImportResult:
    """Creates a run at step 0 from Hugging Face folders or a run, which `pretrain` can continue.

    `model` holds an export, or discriminator/ and generator/ (or only generator/: objective `mlm`) of other models;
    those without a head get a new one. The folder of a DeBERTaV3 with pytorch_model.generator.bin has both. Sizes and
    tying come from the folders, the rest of config.toml from the exported run or, for other models, from the preset of
    that size. A run or a checkpoint keeps all of its networks, heads and settings. The learning-rate schedule restarts,
    with a warmup of 5% of the steps unless set, and peak rates derived from the steps if those of the exported run
    were; precision, attention backend and execution are `auto` again.

    Args:
        model: The folders, a run or a checkpoint. With `generator` or `mlm`, one encoder: a folder of any class, an
            export, a run or a checkpoint.
        out: The run's folder, missing or empty.
        generator: Makes a run for replaced-token detection from one encoder; if it is not ours, with the settings of
            `config.presets.adaptation_settings`. "small": a new generator of about a quarter of its width, which shares
            its embeddings. "same-layers:N": copies of its first N layers, which share its embeddings. Or a masked
            language model of the same vocabulary: a folder, a run or a checkpoint. With `deberta`, the embeddings are
            `disentangled`.
        mlm: Makes a run of masked language modeling from one encoder, with the same settings. Its head starts as
            that of the source, as the corrective head of a discriminator, or new.
        vocab: Another vocabulary: a tokenizer's folder or file, such as that of `vocab` with `trim`. Entries that both
            have keep their embeddings and output biases. Others begin as the mean of the pieces that the model's own
            tokenizer makes of them, or as the mean of all if it knows none.

    Raises FileNotFoundError, or ValueError naming the file, field, value and remedy.
    """
    source = Path(model)
    out = Path(out)
    if not _is_empty(out):
        raise InputError(f"{out}: not empty; choose another folder for the run")
    if vocab is not None:
        Tokenizer(vocab)  # raises before reading the model
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
    """Returns the model of a run that `import_` makes, with the run's configuration."""
    if mlm and generator is not None:
        raise InputError(f"mlm has no generator; give --generator {generator} or --mlm")
    if generator is not None:
        return read_with_generator(source, str(generator))
    return read_masked_lm(source) if mlm else _read_to_continue(source)


def write_run(folder: Path, *, source: Path, electra: Electra, tokenizer: Path) -> None:
    """Writes a run at step 0 with a model from `source`: its config.toml, which makes the folder a run, is the last."""
    copy_tokenizer(tokenizer, folder / "tokenizer", INPUT_NAMES[electra.config.model.architecture])
    trained = _with_trained_types(source, origin(source), electra).token_type_1_trained
    checkpoint.save(folder, electra, None, TrainState(imported=True, token_type_1_trained=trained), keep=1)
    (folder / "config.toml").write_text(electra.config.to_toml(), encoding="utf-8")


def _read_to_continue(source: Path) -> Electra:
    if (stored := checkpoint_of(source)) is not None:
        model = checkpoint.load_model(stored)
    else:
        model = read_models(folders_of(source), with_new_heads=True)
        _check_whole(source, model, "training needs", "; make one with --generator small (generator=...)")
        _say_own_heads(model, "not in the folder, so it starts untrained")
    model.config = restarted(model.config)
    return model


def _with_trained_types(source: Path, source_origin: Origin, model: Electra) -> Origin:
    """Returns a source's origin, with token type 1 as trained if it is no longer a copy in a folder of `export`.

    Other programs that fine-tune such a folder keep what its config.json says.
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


def _check_whole(source: Path, model: Electra, needs: str, remedy: str = "") -> None:
    missing = networks_of(model.config).keys() - model.networks.keys()
    if missing:
        present = " and ".join(model.networks)
        raise InputError(f"{source}: only the {present}; {needs} the {' and '.join(sorted(missing))} too{remedy}")


def _say_own_heads(model: Electra, remark: str) -> None:
    for role, network in model.networks.items():
        for name in network.heads.keys() - {f"{role}_head"}:
            say(f"note: {name}: {remark}")


@torch.no_grad()
def _copy_token_type_0(model: Electra) -> None:
    for table in _token_types(model):
        table[1] = table[0]


def _is_empty(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose another folder")
    return not foreign_names(folder)


def _is_export(folder: Path) -> bool:
    entries = list(folder.iterdir())
    configs = [entry / "config.json" for entry in entries if entry.name in PARTS]
    return len(configs) == len(entries) and all(
        path.is_file() and f'"{OWN_KEY}"' in path.read_text(encoding="utf-8", errors="replace") for path in configs
    )


def _is_free_in_store(url: str) -> bool:
    """Returns whether nothing is below a URL, or an export and nothing else, complete or not."""
    folders = {name.partition("/")[0] for name, _ in list_objects(url)}
    return folders <= PARTS.keys() and all(
        any(mark in (read(f"{url}/{folder}/{name}") or b"") for name, mark in _MARKS.items()) for folder in folders
    )


def _write_to_store(url: str, write: Callable[[Path], None]) -> None:
    """Writes a temporary folder, which stays if it cannot be uploaded, and replaces the objects below a URL."""
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
        raise OSError(f"{url}: not written: {error}; the export is in {folder}, from where you can copy it") from error
    remove(parent)


def _write_folder(out: Path, write: Callable[[Path], None]) -> None:
    try:
        replace_folder(out, write)
    except FileNotFoundError:
        raise  # the message names the source
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out}: not written: {error}") from error
