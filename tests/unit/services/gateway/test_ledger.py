"""The account of an answer: dense over all its lives, and never more cached than there was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import Internal
from services.gateway.ledger import Ledger


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30))
def test_tokens_are_counted_once_however_often_the_newest_comes_again(lives: list[tuple[int, bool]]) -> None:
    ledger, due = Ledger(3), 0
    for count, moves in lives:
        if moves and due:
            ledger.resume(due - 1)
            ledger.take(due - 1, 1)
        ledger.take(due, count)
        due += count
    assert ledger.close(due).completion_tokens == due


def test_a_gap_is_refused() -> None:
    ledger = Ledger(3)
    ledger.take(0, 2)
    for wrong in (lambda: ledger.take(3, 1), lambda: ledger.take(1, 1), lambda: ledger.resume(3)):
        with pytest.raises(Internal):
            wrong()
    with pytest.raises(Internal):
        ledger.close(3)


def test_more_cached_than_sent_is_refused() -> None:
    with pytest.raises(Internal):
        Ledger(3).prefilled(4)
