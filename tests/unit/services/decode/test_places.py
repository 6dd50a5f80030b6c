"""Where many extents go at once is where each of them goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.requests import HeldKV
from fabric.errors import InvalidArgument
from fabric.kvlink.extents import Extents, Row
from services.decode.places import Places
from services.worker.geometry import Handoff
from tests.support.fakefamily import BLOCK_TOKENS, LAYOUT

TOKENS = 3 * BLOCK_TOKENS + 5
HELD = BLOCK_TOKENS
TABLE, SLOT = (6, 2, 9, 4), 3


@pytest.fixture
def places() -> Places:
    return Places(
        CachePool(LAYOUT, 10, 4, torch.float32), Handoff(LAYOUT, TOKENS, HELD), HeldKV(TABLE, SLOT, TOKENS), HELD
    )


def rows() -> list[Row]:
    """Every extent of the handoff, the last first."""
    return [(p.group, p.block, 1, p.offset, p.size, 0) for p in Handoff(LAYOUT, TOKENS, HELD).places()][::-1]


def test_the_addresses_of_all_are_those_of_each(places):
    found = places.all(Extents.of(rows()))
    each = [places(group, block, size).ctypes.data for group, block, _, _, size, _ in rows()]
    assert found is not None and found.tolist() == each
    assert len(set(each)) == len(rows()) > 3


@pytest.mark.parametrize("change", ["group", "held block", "block beyond", "size", "window of a block"])
def test_what_was_not_asked_for_has_no_address(places, change):
    group, block, valid, offset, size, seal = rows()[-1]
    window = next(row for row in rows() if LAYOUT.group(row[0]).kind == "window")
    wrong: Row = {
        "group": ("unknown", block, valid, offset, size, seal),
        "held block": (group, 0, valid, offset, size, seal),
        "block beyond": (group, 2**32 - 1, valid, offset, size, seal),
        "size": (group, block, valid, offset, size + 1, seal),
        "window of a block": (window[0], 1, *window[2:]),
    }[change]
    assert places.all(Extents.of([*rows(), wrong])) is None
    with pytest.raises(InvalidArgument, match="not asked for"):
        places(wrong[0], wrong[1], wrong[4])


def test_nothing_at_all_has_no_addresses(places):
    found = places.all(Extents.of(()))
    assert found is not None and found.dtype == np.uint64 and not len(found)
