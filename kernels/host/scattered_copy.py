"""Many copies in one call, without the interpreter. Knows addresses alone."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
from numba import types

_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_word = np.uint64


@numba.njit("void(uint64, uint64, int64[:, :])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def copy_scattered(source: int, target: int, table: npt.NDArray[np.int64]) -> None:
    """Copies between memory at two addresses, which the caller keeps alive; nothing overlaps.

    table: int64 [3, n], of each copy its offset from `source`, its offset from `target`, its bytes.
    """
    for index in range(table.shape[1]):
        _memcpy(target + _word(table[1, index]), source + _word(table[0, index]), _word(table[2, index]))
