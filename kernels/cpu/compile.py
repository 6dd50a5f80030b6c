"""How CPU kernels are compiled: numba options, the cache folder and the thread layer. Knows no operator."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

import numba
import numpy as np

Array = np.ndarray


def cache_folder() -> str:
    """A folder named by the kernels' sources: a kernel inlines others, and numba alone would miss that they changed."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(root / "deepinfer" / f"kernels-{digest.hexdigest()}")


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = cache_folder()

# OpenMP alone may be entered from several threads at once; numba's own workqueue aborts the process then.
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# No arithmetic is left to the compiler. It makes several versions of a loop, and another compilation others; which one
# runs depends on where operands lie. Where it may regroup sums, contract products or take a reciprocal for a division,
# versions differ in the last bits. So kernels write out their sums (cpu/sums.py) and say `fma` where they mean it.
_COMMON = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": False}
parallel = partial(numba.njit, parallel=True, **_COMMON)
serial = partial(numba.njit, **_COMMON)
