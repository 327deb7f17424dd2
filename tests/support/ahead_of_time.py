"""Compiles the kernels that a call launches for GPUs other than this machine's, and reports their resources.

A launch is only recorded, with the types, alignment and constants for which Triton would specialize it. A separate
process compiles, because the process of the tests may use Triton's interpreter, which compiles nothing.
It serves all requests of a test run, since starting a process takes longer than compiling most kernels.
"""

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
from unittest import mock

import torch

from electra_fast.card import Card

# Compute capability, or AMD's architecture.
Target = int | str
# Shared memory of a multiprocessor in KiB, for all its programs. Each program needs `RESERVED_BYTES` in addition.
SHARED_KIB = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100, "gfx942": 64}
RESERVED_BYTES = 1024
NUM_REGISTERS = 65_536
POINTERS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS |= {torch.bool: "i1", torch.int32: "i32", torch.int64: "i64"}
# Module, name, types, constants and options of a kernel.
Request = tuple[str, str, dict[str, str], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class MachineCode:
    """Resources of a compiled kernel: registers and spilled bytes per thread, shared bytes per program."""

    target: Target
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_instructions: int

    def fits(self, programs_per_sm: int = 1) -> bool:
        """Returns whether `programs_per_sm` programs fit into a multiprocessor's shared memory."""
        reserved = 0 if isinstance(self.target, str) or self.target < 80 else RESERVED_BYTES
        return (self.shared_bytes + reserved) * programs_per_sm <= SHARED_KIB[self.target] * 1024

    def check(self, programs_per_sm: int, max_spilled_bytes: int = 0) -> None:
        """Asserts that `programs_per_sm` programs fit on a multiprocessor, with at most `max_spilled_bytes` spilled."""
        assert self.spilled_bytes <= max_spilled_bytes, self
        assert self.registers * 32 * self.num_warps * programs_per_sm <= NUM_REGISTERS, self
        assert self.fits(programs_per_sm), self


def compile_launches(
    call: Callable[[], Any], target: Target = 90, only: tuple[str, ...] = ()
) -> dict[str, MachineCode]:
    """Compiles the kernels that a call launches, all or `only` some, for a target; runs none of them."""
    requests = [request for request in recorded(call, target) if not only or request[1] in only]
    assert requests
    return {request[1]: compiled(request, target) for request in requests}


def recorded(call: Callable[[], Any], target: Target) -> list[Request]:
    """Returns the kernels that a call launches on a GPU of this architecture, in order; runs none of them."""
    from electra_fast.kernels import corrupt, launch

    requests = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        requests.append(_specialization(kernel, args, options))

    with (
        mock.patch.object(type(corrupt._corrupt_kernel), "run", record),
        mock.patch.object(launch, "card", lambda _: card_of_target(target)),
    ):
        call()
    return requests


def card_of_target(target: Target) -> Card:
    """Returns a card of this architecture with an H200's number of multiprocessors."""
    if isinstance(target, str):
        return Card(target, (9, 4), is_rocm=True, shared_bytes=SHARED_KIB[target] << 10, gfx=target)
    return Card(f"sm_{target}", divmod(target, 10), shared_bytes=SHARED_KIB[target] << 10)


def compiled(request: Request, target: Target) -> MachineCode:
    return _compiler().submit(_compile, *request, target).result()


def _specialization(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Request:
    """Returns (module, name, types, constants, options). A trailing "!" of a type means divisible by 16."""
    parameters = inspect.signature(kernel.fn).parameters
    values = dict(zip(parameters, args, strict=False)) | options
    types = {}
    constants = {}
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
    """Disables the interpreter in the compiling process, before it imports Triton."""
    os.environ["TRITON_INTERPRET"] = "0"


def _compile(
    module: str, name: str, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any], target: Target
) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    signature = {arg: types.get(arg, "constexpr").rstrip("!") for arg in kernel.arg_names}
    aligned = [arg for arg, type_ in types.items() if type_.endswith("!")]
    attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
    is_amd = isinstance(target, str)
    gpu = GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", target, 32)
    code = triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=options)
    registers, spilled = _amd_usage(code.asm["amdgcn"]) if is_amd else _nvidia_usage(code.asm["cubin"])
    instructions = r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)|\bv_mfma"
    return MachineCode(
        target=target,
        num_warps=code.metadata.num_warps,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=code.metadata.shared,
        tensor_core_instructions=len(re.findall(instructions, code.asm["amdgcn" if is_amd else "ptx"])),
    )


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    counts = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return int(counts["REG"]), int(counts["STACK"]) + int(counts["LOCAL"])


def _amd_usage(assembly: str) -> tuple[int, int]:
    counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return int(counts["vgpr_count"]), int(counts["private_segment_fixed_size"])
