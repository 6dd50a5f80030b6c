"""The collector goes through what was made since the service is ready, and through nothing else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fabric import garbage


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def spared() -> Iterator[list[Node]]:
    before, stays = gc.get_threshold(), [Node()]
    garbage.spare_what_stays()
    yield stays
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_was_there_is_not_gone_through_again(spared: list[Node]) -> None:
    assert all(each is not spared[0] for each in gc.get_objects())
    assert gc.get_freeze_count() > 1000


def test_cycles_made_later_are_collected(spared: list[Node]) -> None:
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None and spared
