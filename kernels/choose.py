"""Choice of the kernels, made once at start. Knows which backends exist and what each needs; imports one on demand."""

from __future__ import annotations

import platform
from importlib import import_module
from importlib.util import find_spec

from kernels.errors import KernelError
from kernels.ops import Ops

BACKENDS = ("reference", "cpu")


def choose_name(name: str = "auto", device: str = "cpu") -> str:
    """The backend that `choose` would take, without loading it. Raises KernelError as `choose` does."""
    if name != "auto" and name not in BACKENDS:
        raise KernelError(f"no kernels called {name!r}", fix=f"choose one of auto, {', '.join(BACKENDS)}")
    missing = _missing_for_cpu(device)
    if name == "cpu" and missing:
        raise KernelError(f"the cpu kernels cannot run here: {missing}", fix="choose kernels=reference or auto")
    return name if name != "auto" else "reference" if missing else "cpu"


def choose(name: str = "auto", device: str = "cpu", batch_invariant: bool = False) -> Ops:
    """The operators called `name`; `auto` takes cpu where it runs, else reference (the record's `name` says which).

    Raises KernelError for an unknown name, a backend this machine cannot run, or one that is not batch invariant
    although `batch_invariant` asks for it. Never falls back from an explicit choice.
    """
    taken = choose_name(name, device)
    ops: Ops = import_module(f"kernels.{taken}").OPS
    if batch_invariant and not ops.batch_invariant:
        raise KernelError(
            f"the {taken} kernels are not batch invariant", fix="choose kernels=cpu or batch_invariant=False"
        )
    return ops


def _missing_for_cpu(device: str) -> str:
    """Why the cpu kernels cannot run, or an empty string."""
    if device != "cpu":
        return f"the device is {device}"
    if find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    machine = platform.machine()
    if machine in ("arm64", "aarch64"):
        return ""
    features = import_module("llvmlite.binding").get_host_cpu_features()
    return "" if features.get("fma") else f"this {machine} processor has no fused multiply-add"
