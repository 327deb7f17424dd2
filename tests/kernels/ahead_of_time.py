"""Compiles kernels for GPUs other than this machine's, and reports what their machine code uses.

It does so in a separate process, because the tests' own may run Triton's interpreter, which compiles nothing. That
process serves all requests of a test run: starting one takes longer than compiling most kernels.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from typing import Any

MAX_SHARED_BYTES = {90: 227 * 1024, 80: 163 * 1024}


@dataclass(frozen=True)
class MachineCode:
    """What one compiled kernel uses: registers and spilled bytes per thread, shared bytes per program."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    tensor_core_instructions: int


def compile_kernel(
    module: str,
    kernel: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
) -> MachineCode:
    """Compiles `electra_fast.kernels.<module>.<kernel>` for sm_<capability>.

    `signature` gives the type of each run-time argument ("*bf16", "i32", …), `constants` the value of each
    `tl.constexpr`. A type with a trailing "!" is compiled as divisible by 16, as the launcher specializes
    aligned pointers and such integers.
    """
    process = _compiler()
    process.stdin.write(json.dumps((module, kernel, signature, constants, capability, num_warps, num_stages)) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '{"error": "the compiler process ended"}')
    assert "error" not in answer, answer["error"]
    return MachineCode(**answer)


def compile_kernels(requests: list[tuple[Any, ...]]) -> list[MachineCode]:
    """`compile_kernel` for several tuples of arguments."""
    return [
        compile_kernel(*names, capability=capability, num_warps=num_warps, num_stages=num_stages)
        for *names, capability, num_warps, num_stages in requests
    ]


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """The compiling process: one line of JSON per request and per answer. It ends when its input does."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(process.communicate)
    return process


def _compile(
    module: str, kernel: str, signature: dict[str, str], constants: dict[str, Any], capability: int, *options: int
) -> MachineCode:
    import importlib
    import re
    import tempfile
    from pathlib import Path

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"electra_fast.kernels.{module}"), kernel)
    types = {name: type_.rstrip("!") for name, type_ in signature.items()}
    types |= dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in function.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if signature.get(name, "").endswith("!")
    }
    compiled = triton.compile(
        ASTSource(function, types, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": options[0], "num_stages": options[1]},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    return MachineCode(
        registers=int(found["REG"]),
        spilled_bytes=int(found["STACK"]) + int(found["LOCAL"]),
        shared_bytes=compiled.metadata.shared,
        tensor_core_instructions=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)", compiled.asm["ptx"])),
    )


def _answer(line: str) -> dict[str, Any]:
    try:
        return vars(_compile(*json.loads(line)))
    except BaseException:  # SystemExit too: the requesting test reports it
        return {"error": traceback.format_exc()[-3000:]}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print among the answers
    for line in sys.stdin:
        print(json.dumps(_answer(line)), file=answers, flush=True)
