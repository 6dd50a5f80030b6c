"""Key histories: any watcher, however late, makes the newest set out of the one it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.journal import Changes, Journal
from services.gateway.mirror import MAX_HELD_KEYS
from services.worker import history as histories
from services.worker.history import MAX_KEPT, MAX_TOLD, KeyChange, KeyHistory

KEYS = [bytes([number]) for number in range(6)]


def applied(held: frozenset[bytes], change: KeyChange) -> frozenset[bytes]:
    return change.added if change.reset else (held - change.removed) | change.added


@given(st.lists(st.lists(st.sampled_from(KEYS), max_size=6), max_size=30), st.data())
def test_every_version_leads_to_the_newest(steps: list[list[bytes]], data: st.DataObject) -> None:
    journal, now = Journal(), set[bytes]()
    history = KeyHistory((), journal.take().version)
    versions = {history.version: frozenset[bytes]()}
    for step in steps:
        for key in step:  # each key named comes, or goes where it was there
            (journal.removed if key in now else journal.stored)(key)
            now ^= {key}
        assert history.apply(journal.take())
        versions[history.version] = frozenset(now)
    seen = data.draw(st.sampled_from(sorted(versions)))
    change = history.since(seen)
    assert (change.base, change.version, change.reset) == (seen, history.version, False)
    assert applied(versions[seen], change) == now
    assert not change.added & versions[seen] and change.removed <= versions[seen]


def test_a_version_that_is_missing_is_not_passed_over() -> None:
    history = KeyHistory(KEYS[:1], 4)
    assert not history.apply(Changes(6, frozenset(KEYS[1:2])))
    assert history.since(4) == KeyChange(4, 4)


def test_who_knows_nothing_or_too_little_gets_the_whole_set() -> None:
    history = KeyHistory((), 0)
    for version in range(1, MAX_KEPT + 10):
        history.apply(Changes(version, frozenset([version.to_bytes(2, "little")])))
    for version in (None, 0, 8, history.version + 1):
        assert history.since(version).reset and len(history.since(version).added) == MAX_KEPT + 9
    assert not history.since(history.version - MAX_KEPT).reset


def test_a_set_too_large_for_a_message_says_that_it_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TOLD > MAX_HELD_KEYS  # what a gateway takes for doubt
    monkeypatch.setattr(histories, "MAX_TOLD", 3)
    history = KeyHistory(KEYS[:2], 0)
    history.apply(Changes(1, frozenset(KEYS[2:5])))
    assert not history.since(0).reset
    history.apply(Changes(2, frozenset(KEYS[5:])))
    for version in (None, 0):
        assert history.since(version).reset and len(history.since(version).added) == 3


def test_a_journal_tells_what_differs_from_the_last_reading_alone() -> None:
    journal = Journal()
    journal.stored(KEYS[0])
    assert journal.take() == Changes(1, frozenset(KEYS[:1]))
    journal.removed(KEYS[0])
    journal.stored(KEYS[0])
    journal.stored(KEYS[1])
    journal.removed(KEYS[1])
    assert journal.take() == Changes(1)
