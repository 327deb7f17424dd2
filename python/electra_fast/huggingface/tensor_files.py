"""Tensor files of a Hugging Face folder: one, or several with an index; in the format of safetensors or of torch.

Other modules read folders without torch, so only the functions here import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object

if TYPE_CHECKING:
    from torch import Tensor

GENERATOR_FILE = "pytorch_model.generator.bin"
"""The generator of a DeBERTaV3, in the folder of its discriminator."""


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """Reads the tensors of a `weights_file`. Raises FileNotFoundError, or ValueError with the file."""
    from electra_fast.checkpoint import require_finite

    tensors: dict[str, Tensor] = {}
    places = _shards(file) if file.suffix == ".json" else {}
    for path in sorted({file.parent / name for name in places.values()}) if places else [file]:
        part = _read_tensors(path)
        check_dtypes(path, part)
        require_finite(path, part)
        tensors |= part
    if missing := places.keys() - tensors.keys():
        raise InputError(f"{file}: {min(missing)} is in none of the listed files")
    return tensors


def tensor_names(file: Path) -> frozenset[str]:
    """Returns the names of the tensors of a `weights_file`; none if it is missing or damaged."""
    if not file.is_file():
        return frozenset()
    import safetensors

    try:
        if file.suffix == ".json":
            return frozenset(_shards(file))
        if file.suffix == ".safetensors":
            with safetensors.safe_open(file, "pt") as opened:
                return frozenset(opened.keys())
        return _names_in_torch_file(file, file.stat().st_mtime_ns)
    except (OSError, InputError, safetensors.SafetensorError):
        return frozenset()


@lru_cache(maxsize=8)
def _names_in_torch_file(file: Path, _modified: int) -> frozenset[str]:
    return frozenset(_read_tensors(file, "meta"))


def check_dtypes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises InputError for weights that are not plain floating-point numbers, such as quantized ones."""
    import torch

    known = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for name, tensor in tensors.items():
        if tensor.dtype not in known and not name.endswith(("position_ids", "token_type_ids")):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{path}: tensor {name} is quantized ({kind}); save the model in fp32 or bf16")


def weights_file(folder: Path, role: str | None = None) -> Path:
    """Returns the file of a folder's tensors, or the index of several; a generator may have a separate file."""
    if role == "generator" and (folder / GENERATOR_FILE).is_file():
        return folder / GENERATOR_FILE
    names = (f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
    return next((folder / name for name in names if (folder / name).is_file()), folder / "model.safetensors")


def _shards(index: Path) -> dict[str, str]:
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise InputError(f"{index}: weight_map must map tensors to the names of files in this folder")
    files = sorted(set(names.values()))
    if missing := [name for name in files if not (index.parent / name).is_file()]:
        raise FileNotFoundError(
            f"{index.parent / missing[0]}: no such file; {len(missing)} of the {len(files)} files in {index.name} are "
            "missing, so download them"
        )
    return names


def _read_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; a Hugging Face model folder must have its weights there or in pytorch_model.bin"
        )
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path}: not a complete safetensors file ({error}); download the file again") from None
    try:
        tensors = torch.load(path, device, weights_only=True)
    except Exception as error:  # an arbitrary pickle can raise any exception
        raise InputError(
            f"{path}: not a complete file of tensors (torch.load(weights_only=True) raises {type(error).__name__}); "
            "download the file again, or save model.state_dict() instead of the whole model"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise InputError(f"{path}: expected a state dict; save model.state_dict() instead of the whole model")
    return {str(name): tensor.detach() for name, tensor in tensors.items()}
