"""What launches of tile kernels have in common: plans, formats as macros, where rows begin. Knows no operator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, Code, Scale

WARP, UNIT = 32, 8  # threads; columns that a thread takes at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """What `source` is compiled with, and the threads and the shared memory of a block."""

    source: Path
    defines: Mapping[str, int]
    threads: int
    shared_bytes: int = 0

    def compile(self, architecture: str = "sm_90a") -> tuple[bytes, str]:
        """Machine code and the compiler's report; needs no GPU."""
        return compile_cubin(self.source, architecture, self.defines)

    def launch(self, blocks: int, parameters: ctypes.Structure, device: torch.device) -> None:
        """Queue one launch; the kernel is compiled when it is first wanted. Raises KernelError."""
        self.kernel(device).launch((blocks, 1, 1), parameters)

    def kernel(self, device: torch.device) -> Kernel:
        """Loaded on this device."""
        return _loaded(self.source, tuple(sorted(self.defines.items())), self.threads, self.shared_bytes, device.index)


def threads_of(columns: int, turns: int) -> int:
    """Threads of a block that takes `columns` in `turns`, or more where there would be more than 1,024."""
    units = columns // UNIT
    return min(-(-units // (turns * WARP)) * WARP, 1024)


def casting(spec: CastSpec | None) -> dict[str, int]:
    """Macros of a format; None is bf16. Raises KernelError for codes these kernels do not make."""
    if spec is None:
        return {"GROUP": 0, "POWERS": 0}
    if spec.code is not Code.E4M3:
        raise KernelError(f"codes are {spec.code.name}", fix="cast to E4M3")
    return {"GROUP": spec.group, "POWERS": int(spec.scale is Scale.E8M0)}


def check_aligned(**tensors: Tensor | None) -> None:
    """Raises KernelError naming the first whose rows do not begin at multiples of 16 bytes."""
    for name, tensor in tensors.items():
        if tensor is not None and not aligned(tensor):
            raise KernelError(f"{name} begins at an odd address", fix="let rows begin at multiples of 16 bytes")


def aligned(tensor: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes."""
    row_bytes = tensor.stride(0) * tensor.element_size() if tensor.ndim > 1 else 0
    return tensor.data_ptr() % 16 == 0 and row_bytes % 16 == 0


def address(tensor: Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> int:
    """The major number."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _loaded(source: Path, defines: tuple[tuple[str, int], ...], threads: int, shared_bytes: int, device: int) -> Kernel:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        architecture = f"sm_{major}{minor}" + ("a" if major == 9 else "")
        return load(compile_cubin(source, architecture, dict(defines))[0], source.stem, threads, shared_bytes)
