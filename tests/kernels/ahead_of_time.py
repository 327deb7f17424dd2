"""Compiles the kernels that a call launches for GPUs other than this machine's, and reports what their code uses.

A launch is only recorded: the types, alignment and constants of its arguments are what Triton would specialize for.
Another process compiles, because the tests' own may run Triton's interpreter, which compiles nothing. It serves all
requests of a test run: starting one takes longer than compiling most kernels.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Bytes of shared memory that the programs of a multiprocessor may use, and what each of them takes beside its own.
SHARED_BYTES, RESERVED_BYTES = {90: 228 * 1024, 80: 164 * 1024}, 1024
NUM_REGISTERS = 65_536
POINTERS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS |= {torch.bool: "i1", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class MachineCode:
    """Resources of a compiled kernel: registers and spilled bytes per thread, shared bytes per program."""

    capability: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_instructions: int

    def check(self, programs_per_sm: int, max_spilled_bytes: int = 0) -> None:
        """Asserts that as many programs fit on a multiprocessor as the launcher assumes, without spills."""
        assert self.spilled_bytes <= max_spilled_bytes, self
        assert self.registers * 32 * self.num_warps * programs_per_sm <= NUM_REGISTERS, self
        assert (self.shared_bytes + RESERVED_BYTES) * programs_per_sm <= SHARED_BYTES[self.capability], self


def compile_launches(
    call: Callable[[], Any], capability: int = 90, only: tuple[str, ...] = ()
) -> dict[str, MachineCode]:
    """The code for sm_<capability> of the kernels that a call launches, all or `only` some; runs none of them."""
    import pytest

    from electra_fast.kernels.corrupt import _corrupt_kernel

    requests = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if not only or kernel.fn.__name__ in only:
            requests.append((*_specialization(kernel, args, options), capability))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(_corrupt_kernel), "run", record)
        call()
    assert requests
    return {request[1]: _compiler().submit(_compile, *request).result() for request in requests}


def _specialization(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """(module, name, types, constants, options): a type with a trailing "!" is divisible by 16."""
    parameters = inspect.signature(kernel.fn).parameters
    values = dict(zip(parameters, args, strict=False)) | options
    types, constants = {}, {}
    for name, parameter in parameters.items():
        value = values.pop(name)
        if value is None or "constexpr" in str(parameter.annotation):
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            types[name] = f"*{POINTERS[value.dtype]}" + "!" * (value.data_ptr() % 16 == 0)
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32" + "!" * (value % 16 == 0)
    return kernel.fn.__module__, kernel.fn.__name__, types, constants, values


@functools.cache
def _compiler() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _leave_the_interpreter)


def _leave_the_interpreter() -> None:
    """In the compiling process, which has not imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "0"


def _compile(
    module: str, name: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], capability: int
) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    signature = {each: types.get(each, "constexpr").rstrip("!") for each in kernel.arg_names}
    aligned = [each for each, type_ in types.items() if type_.endswith("!")]
    attributes = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", capability, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return MachineCode(
        capability=capability,
        num_warps=compiled.metadata.num_warps,
        registers=int(found["REG"]),
        spilled_bytes=int(found["STACK"]) + int(found["LOCAL"]),
        shared_bytes=compiled.metadata.shared,
        tensor_core_instructions=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])),
    )
