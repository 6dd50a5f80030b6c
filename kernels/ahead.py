"""Triton kernels compiled for a GPU that need not be here: launches inside `compiling` are compiled and not run.

Operators are called as they are, on tensors of the host whose values nobody reads; what would have been launched is
built for the target, down to machine code. For a process of its own: triton is told of a device that is not there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One specialization of a kernel. `stack_bytes` of a thread are what its registers had no room for."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int


@contextmanager
def compiling(capability: int) -> Iterator[dict[str, Compiled]]:
    """Within, every launch compiles for compute capability `capability` (90, 100); what was built, by its hash."""
    found: dict[str, Compiled] = {}
    target = GPUTarget("cuda", capability, 32)
    run = JITFunction.run

    def build(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        built = run(kernel, *arguments, grid=grid, warmup=True, **options)
        if built.hash not in found:
            found[built.hash] = _measured(kernel.__name__, built)
        return built

    driver.set_active(_Absent(target))
    JITFunction.run = build
    try:
        yield found
    finally:
        JITFunction.run = run


class _Absent:
    """What triton asks of a device before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _measured(name: str, built: Any) -> Compiled:
    """Resources by the disassembler that comes with triton."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = _USAGE.search(said)
    if usage is None:
        raise RuntimeError(f"the disassembler says nothing of {name}: {said}")
    metadata = built.metadata
    return Compiled(name, int(usage[1]), int(usage[2]), int(metadata.shared), 32 * int(metadata.num_warps))
