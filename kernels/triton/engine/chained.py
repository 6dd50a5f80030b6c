"""Kernels that begin while the one before them ends (programmatic dependent launch). Knows no operator.

A chained kernel calls `chain` first: what it loads before is nobody's result (weights), what it loads and stores behind
it stands after everything that was launched earlier. Every launch of it is given `LAUNCH`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_ON_DEVICE = tl.constexpr(not _INTERPRETED)  # the interpreter knows no inline assembly, and runs in order anyway
LAUNCH: dict[str, Any] = {} if _INTERPRETED else {"launch_pdl": True}


@triton.jit
def follow():
    """Let the next kernel begin as soon as every program of this one runs."""
    if _ON_DEVICE:
        gdc_launch_dependents()


@triton.jit
def chain():
    """Wait until the kernel before this one has ended, and what it wrote can be read."""
    if _ON_DEVICE:
        gdc_wait()
