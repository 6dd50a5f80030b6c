"""Kernels compiled ahead of time, with registers and spills: `python -m kernels.report`.

The engine's Triton kernels are built for each compute capability in shapes of published models, the CUDA product of
many tokens for Hopper in every tile, on any machine. Exit code 1 where a kernel keeps more bytes of a thread in memory
than it is allowed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from kernels.ahead import Compiled, compiling
from kernels.cuda.resources import large_products
from kernels.testing.engine_launches import launch_all

HOPPER = 90
CAPABILITIES = (HOPPER, 100)
# Bytes of a thread's registers that may lie in memory, by kernel and compute type; 0 for all others.
# fp32 is what tiny models are checked in: products of 512 channels in three tf32 passes do not fit.
ALLOWED = {
    ("_attend", "bfloat16"): 128,
    ("_attend", "float32"): 8192,
}


def main(argv: list[str] | None = None) -> int:
    """Compile, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="default: all")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="default: both")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"argument --json: {options.json.parent} is not a folder")
    figures, passed = [], True
    for capability in options.capability or CAPABILITIES:
        for dtype in options.dtype or ("bfloat16", "float32"):
            with compiling(capability) as found:
                launch_all(getattr(torch, dtype))
            for one in found.values():
                fits = one.stack_bytes <= ALLOWED.get((one.name, dtype), 0)
                passed = passed and fits
                print(_line(one, capability, dtype) + ("" if fits else "  SPILLS"), flush=True)
                figures.append(_figure(one, capability, dtype))
        if capability == HOPPER:
            for one in large_products():
                passed = passed and one.stack_bytes == 0
                print(_line(one, capability, "fp8") + ("  SPILLS" if one.stack_bytes else ""), flush=True)
                figures.append(_figure(one, capability, "fp8"))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if passed else 1


def _line(one: Compiled, capability: int, dtype: str) -> str:
    return (
        f"sm_{capability} {dtype:8} {one.name:26} registers {one.registers:3}  stack {one.stack_bytes:4} bytes  "
        f"shared {one.shared_bytes:6} bytes  threads {one.threads}"
    )


def _figure(one: Compiled, capability: int, dtype: str) -> dict[str, object]:
    return {
        "capability": capability, "dtype": dtype, "name": one.name, "registers": one.registers,
        "stack_bytes": one.stack_bytes, "shared_bytes": one.shared_bytes, "threads": one.threads,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
