"""Choice of the kernels, made once at start. Knows which backends exist and what each needs; imports one on demand."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kernels.errors import DeviceError, KernelError
from kernels.ops import Ops

BACKENDS = ("reference", "cpu", "triton", "cuda")
_MODULES = {
    "triton": "kernels.triton.engine.ops",
    "cuda": "kernels.cuda.engine.ops",
}  # where a backend is not a package of its own name
_KEEPERS = {"reference": "kernels.reference.scaled", "cuda": "kernels.cuda.engine.scaled"}  # of stored weights
_RECORDS = ("reference", "cuda")  # backends that read and write published records
_HOPPER = 9
_PREFERRED = ("cuda", "triton", "cpu", "reference")


def choose_name(name: str = "auto", device: str = "cpu") -> str:
    """The backend that `choose` would take, without loading it. Raises KernelError as `choose` does."""
    if name != "auto" and name not in BACKENDS:
        raise KernelError(f"no kernels called {name!r}", fix=f"choose one of auto, {', '.join(BACKENDS)}")
    _require_device(device)
    if name == "auto":
        return next(backend for backend in _PREFERRED if not missing_for(backend, device))
    if missing := missing_for(name, device):
        message = f"the {name} kernels cannot run here: {missing}"
        raise KernelError(message, fix="choose kernels=reference or auto")
    return name


def choose(
    name: str = "auto", device: str = "cpu", batch_invariant: bool = False, stored: bool = False, records: bool = False
) -> Ops:
    """The operators called `name` on `device` (cpu, cuda or cuda:N); the record's `name` and `device` say which.

    `auto` takes cuda on a Hopper GPU, triton on others and cpu elsewhere, where they run, else reference. Raises
    KernelError for an unknown name or device, a backend this machine cannot run, or one that is not batch invariant
    although `batch_invariant` asks for it. Never falls back from an explicit choice. With `stored` the record keeps
    weights as they are published, with `records` caches; KernelError where a backend cannot. What they write into
    besides their results is the record's own: take one for each engine.
    """
    taken = choose_name(name, device)
    module = import_module(_MODULES.get(taken, f"kernels.{taken}"))
    ops: Ops = getattr(module, "INVARIANT", module.OPS) if batch_invariant else module.OPS
    if batch_invariant and not ops.batch_invariant:
        others = "cuda on a Hopper GPU" if records else "cpu, or triton or cuda on a GPU"
        fix = f"choose kernels={others}, or batch_invariant=False"
        raise KernelError(f"the {taken} kernels are not batch invariant", fix=fix)
    if records and taken not in _RECORDS:
        message = f"the {taken} kernels read and write no published records"
        raise KernelError(message, fix="choose kv_cache=rows, or kernels=cuda on a Hopper GPU, or kernels=reference")
    if batch_invariant and stored:
        fix = "choose weights=dequantized or batch_invariant=False"
        raise KernelError("products of stored weights are not batch invariant", fix=fix)
    if hasattr(module, "of_one_engine"):
        ops = module.of_one_engine(ops)
    if device != "cpu" or records:
        ops = replace(ops, device=torch.device(device), records=records)
    return replace(ops, keep=_keeping(taken)) if stored else ops


def _keeping(taken: str) -> Callable[..., Any]:
    """How the backend keeps stored weights."""
    if taken not in _KEEPERS:
        message = f"the {taken} kernels multiply with no weights in FP8 or FP4"
        raise KernelError(message, fix="choose weights=dequantized, or kernels=cuda on a Hopper GPU")
    keep: Callable[..., Any] = import_module(_KEEPERS[taken]).keep
    return keep


def _require_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if device not in ("cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise DeviceError(f"no device called {device!r}", fix="choose cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count()} CUDA devices"
        raise DeviceError(
            f"the device is {device}, and this machine has {found}", fix="choose device=cpu, or install a CUDA torch"
        )


def missing_for(backend: str, device: str) -> str:
    """Why the kernels called `backend` cannot run on `device`, or an empty string."""
    return _MISSING[backend](device)


def _missing_for_triton(device: str) -> str:
    if not device.startswith("cuda"):
        return f"the device is {device}"
    return "" if find_spec("triton") else "triton is not installed (pip install triton)"


def _missing_for_cuda(device: str) -> str:
    """CUDA C++ is compiled for Hopper where it is used; what it does not take, triton does."""
    if missing := _missing_for_triton(device):
        return missing
    found = torch.cuda.get_device_capability(device)
    if found[0] != _HOPPER:
        return f"{device} is of compute capability {found[0]}.{found[1]}, and they are for {_HOPPER}.0 (Hopper)"
    compiles = import_module("kernels.cuda.driver").has_nvrtc()
    return "" if compiles else "NVRTC, which compiles them, is not installed (pip install nvidia-cuda-nvrtc)"


def _missing_for_cpu(device: str) -> str:
    if device != "cpu":
        return f"the device is {device}"
    if find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    machine = platform.machine()
    if machine in ("arm64", "aarch64"):
        return ""
    features = import_module("llvmlite.binding").get_host_cpu_features()
    return "" if features.get("fma") else f"this {machine} processor has no fused multiply-add"


_MISSING = {
    "reference": lambda _device: "",
    "cpu": _missing_for_cpu,
    "triton": _missing_for_triton,
    "cuda": _missing_for_cuda,
}
