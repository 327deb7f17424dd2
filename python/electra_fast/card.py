"""Facts about GPUs: capabilities, architectures, peak speeds and known faults. No other module has such facts."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

# NVIDIA's architectures, keyed by compute capability or by its major version.
_ARCHITECTURES: dict[tuple[int, ...], str] = {
    (7, 0): "Volta",
    (7, 5): "Turing",
    (8, 9): "Ada",
    (8,): "Ampere",
    (9,): "Hopper",
    (10,): "Blackwell",
    (11,): "Blackwell",
    (12,): "consumer Blackwell",
}
# AMD's architectures with bf16 products: MI200, MI300, MI350, RDNA 3 and 4.
_GFX_WITH_BF16 = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
# Dense peaks in TFLOP/s from the data sheets, keyed by words of the device's name: 16-bit matrix products that
# accumulate in fp32, and fp32 without tensor cores. The first entry whose words all occur in the name applies.
_PEAKS: dict[str, tuple[float, float]] = {
    "GB300": (2500, 80),
    "B300": (2250, 75),
    "GB200": (2500, 80),
    "B200": (2250, 75),
    "GB10": (125, 31),
    "PRO 6000 BLACKWELL SERVER": (480, 120),
    "PRO 6000 BLACKWELL MAX": (440, 110),
    "PRO 6000 BLACKWELL WORKSTATION": (504, 126),
    "RTX 5090": (209.5, 104.8),
    "GH200": (989, 67),
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "H100 PCIE": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "H800 PCIE": (756, 51),
    "H800": (989, 67),
    "H20": (148, 44),
    "L40S": (362, 91.6),
    "L40": (181, 90.5),
    "L4": (121, 30.3),
    "RTX 6000 ADA": (364.2, 91.1),
    "RTX 4090": (165, 82.6),
    "RTX 4080": (97.5, 48.7),
    "A100": (312, 19.5),
    "A800": (312, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165, 10.3),
    "A10G": (70, 35),
    "A10": (125, 31.2),
    "RTX A6000": (154.8, 38.7),
    "RTX 3090 TI": (80, 40),
    "RTX 3090": (71, 35.6),
    "T4": (65, 8.1),
    "V100 PCIE": (112, 14),
    "V100": (125, 15.7),
    "MI300X": (1307, 163.4),
}
# Words of slices and variants: their peaks differ from the entries without these words.
_VARIANTS = {"MIG", "LAPTOP", "MAX", "TI", "D", "SUPER"}
# Versions of Triton that compile wrong code, with the issue in triton-lang/triton.
_FAULTY_TRITON = {"3.7.0": 11366, "3.7.1": 11366}


@dataclass(frozen=True)
class Card:
    """A GPU, as its driver describes it.

    Args:
        name: `torch.cuda.get_device_name`.
        capability: NVIDIA's compute capability; on ROCm, numbers with another meaning.
        is_rocm: True for an AMD GPU with ROCm.
        num_multiprocessors: Number of streaming multiprocessors, or of AMD's compute units.
        shared_bytes: Shared memory per multiprocessor.
        gfx: AMD's name of the architecture, such as `gfx942`; empty for other GPUs.
        memory_bytes: Size of the memory; 0 if unknown.
    """

    name: str
    capability: tuple[int, int]
    is_rocm: bool = False
    num_multiprocessors: int = 132
    shared_bytes: int = 228 << 10
    gfx: str = ""
    memory_bytes: int = 0

    def __str__(self) -> str:
        """Returns, for instance, `NVIDIA H100 PCIe (Hopper 9.0)` or `AMD Instinct MI300X (gfx942)`."""
        major, minor = self.capability
        return f"{self.name} ({self.architecture if self.is_rocm else f'{self.architecture} {major}.{minor}'.strip()})"

    @property
    def architecture(self) -> str:
        """For instance `Hopper`, `Blackwell` (data center), `consumer Blackwell` or `gfx942`; empty if unknown."""
        if self.is_rocm:
            return self.gfx
        return _ARCHITECTURES.get(self.capability, _ARCHITECTURES.get(self.capability[:1], ""))

    @property
    def is_hopper(self) -> bool:
        """True for H100, H200 and other Hopper cards; an MI300 reports the capability (9, 4) but is not one."""
        return self.architecture == "Hopper"

    @property
    def has_bf16(self) -> bool:
        """True if matrix products in bf16 are as fast as in fp16."""
        return self.gfx.startswith(_GFX_WITH_BF16) if self.is_rocm else self.capability >= (8, 0)

    @property
    def has_fp16_tensor_cores(self) -> bool:
        """True if matrix products in fp16 are several times as fast as in fp32."""
        return not self.is_rocm and self.capability >= (7, 0)

    @property
    def has_flash_attention(self) -> bool:
        """True if torch's flash attention runs. On ROCm it uses other libraries, which are untested here."""
        return not self.is_rocm and self.capability >= (8, 0)

    def peak_flops(self, precision: str) -> float | None:
        """Returns the dense peak in FLOP/s of matrix products in `fp32`, `fp16` or `bf16`; None if unknown."""
        words = set(re.split(r"[^A-Z0-9]+", self.name.upper()))
        for key, (half, single) in _PEAKS.items():
            if (known := set(key.split())) <= words and words & _VARIANTS <= known:
                if precision == "fp32":
                    return single * 1e12
                return half * 1e12 if precision == "fp16" or self.has_bf16 else None
        return None


@functools.cache
def card_of(device: torch.device) -> Card:
    properties = torch.cuda.get_device_properties(device)
    is_rocm = torch.version.hip is not None
    return Card(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        is_rocm,
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.gcnArchName.partition(":")[0] if is_rocm else "",
        properties.total_memory,
    )


def device_peak(device: torch.device, precision: str) -> float | None:
    """Returns a device's dense peak in FLOP/s (`Card.peak_flops`); None for a CPU."""
    return card_of(device).peak_flops(precision) if device.type == "cuda" else None


def missing_for_triton(card: Card | None) -> str | None:
    """Returns the reason why Triton kernels cannot run, with a remedy, or None if they can.

    Without a card, checks only Triton itself, the C compiler and Python's headers.
    """
    try:
        from triton import __version__ as version
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install triton"
    if issue := _FAULTY_TRITON.get(version):
        return f"Triton {version} compiles wrong code (triton issue {issue}); upgrade torch, which includes Triton"
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler for its launchers, and found no {' or '.join(compilers)}; install gcc"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.is_file():
        return f"Triton needs Python's headers for its launchers, and {header} is missing; install python3-dev"
    if card is not None and not card.is_rocm and card.capability < (7, 5):
        major, minor = card.capability
        return f"Triton needs compute capability 7.5, and {card.name} has {major}.{minor}; use the reference operations"
    return None
