"""Which kernels run on which device here, and which operators the fastest take: `python -m kernels.available`.

Prints one JSON object. Loads torch, and no model; compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kernels.choose import BACKENDS, choose_name, missing_for


def available() -> dict[str, Any]:
    """`devices`: each with its `name`, what `auto` takes there, and why others are `missing`; `rules`: where the cuda
    kernels are used, elsewhere it is triton's, and none where triton is not installed; `torch`: its version."""
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    return {"torch": torch.__version__, "devices": {name: _device(name) for name in names}, "rules": _rules()}


def _device(device: str) -> dict[str, Any]:
    missing = {backend: missing_for(backend, device) for backend in BACKENDS}
    name = torch.cuda.get_device_name(device) if device != "cpu" else "CPU"
    return {"name": name, "auto": choose_name("auto", device), "missing": {k: v for k, v in missing.items() if v}}


def _rules() -> list[dict[str, str]]:
    if find_spec("triton") is None:
        return []
    return [asdict(rule) for rule in import_module("kernels.cuda.engine.domain").RULES]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m kernels.available", description=__doc__).parse_args()
    json.dump(available(), sys.stdout, indent=1)
