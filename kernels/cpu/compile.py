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

# Sums may be regrouped by the compiler (the same way at every call); infinities and NaN keep their meaning.
_REGROUPED = {"reassoc", "contract", "nsz", "arcp"}
_ORDERED = {"contract"}
_COMMON = {"nogil": True, "cache": True, "error_model": "numpy"}
parallel = partial(numba.njit, parallel=True, fastmath=_REGROUPED, **_COMMON)
serial = partial(numba.njit, fastmath=_REGROUPED, **_COMMON)
# For sums whose order is part of the contract, and for arithmetic that regrouping would spoil.
parallel_ordered = partial(numba.njit, parallel=True, fastmath=_ORDERED, **_COMMON)
serial_ordered = partial(numba.njit, fastmath=_ORDERED, **_COMMON)
