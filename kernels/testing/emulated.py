"""CUDA kernels without assembly, compiled for the CPU and run there cluster after cluster. Knows no kernel."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kernels.errors import KernelError

_SHARED_BYTES = 232_448  # what a block of Hopper may ask for
_LAUNCH = """
#define SHARED_UNITS ({shared} / 16)
#define CLUSTER_BLOCKS {cluster}
#include "{header}"
#include "{source}"
extern "C" int launch(unsigned blocks, unsigned threads, const Parameters *p) {{
    memset(memory, 0xa5, sizeof memory);
    return emulated::run(blocks, threads, CLUSTER_BLOCKS, [p] {{ {name}(*p); }});
}}
"""


def has_compiler() -> bool:
    """Whether a C++ compiler is here."""
    return shutil.which("g++") is not None


class EmulatedKernel:
    """The kernel `name` of a source that takes one structure called Parameters; `folder` takes what is built.

    `cluster` blocks run at a time and see each other's shared memory.
    """

    def __init__(self, source: Path, name: str, defines: Mapping[str, int], folder: Path, cluster: int = 1) -> None:
        header = Path(__file__).with_suffix(".cuh")
        unit, library = folder / f"{name}.cpp", folder / f"{name}.so"
        unit.write_text(_LAUNCH.format(header=header, source=source, name=name, shared=_SHARED_BYTES, cluster=cluster))
        given = [f"-D{key}={value}" for key, value in defines.items()]
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", *given, "-o", str(library), str(unit)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            raise KernelError(f"g++ refuses {source.name}: {built.stderr}", fix="install g++ 9 or newer")
        self._launch = ctypes.CDLL(str(library)).launch

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure) -> None:
        """Run to the end. Raises KernelError where the threads of a block wait for each other for ever."""
        if not self._launch(blocks, threads, ctypes.byref(parameters)):
            raise KernelError("the threads of a block wait for each other for ever", fix="look at its barriers")
