"""Many copies in one call are those of the table, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.kvlink.mapped import copy_each
from kernels.host.scattered_copy import copy_scattered


@pytest.mark.parametrize("copy", [copy_scattered, copy_each])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_the_table_names_is_copied_and_nothing_else(copy, order):
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 256, 1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    rows = [(0, 300_000, 5), (400_000, 0, 200), (500_000, 700_000, 300_000), (7, 600_000, 0)]
    wanted = target.copy()
    for start, to, size in rows:
        wanted[to : to + size] = source[start : start + size]
    copy(source.ctypes.data, target.ctypes.data, np.array(rows, np.int64).T.copy(order=order))
    assert np.array_equal(target, wanted)
