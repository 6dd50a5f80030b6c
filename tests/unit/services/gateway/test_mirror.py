"""What a gateway believes of a worker's cache: exact is only said of what it holds at its newest told version."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from engine.journal import Journal
from protos.deepinfer.v1 import common_pb2
from services.gateway import mirror as mirroring
from services.gateway.mirror import Doubt, Knowledge, Mirror
from services.worker.history import KeyChange, KeyHistory
from tests.support.clock import FakeClock

KEYS = [bytes([number]) for number in range(6)]
STALE_S = 5.0
Steps = list[tuple[list[bytes], bool]]  # keys that come or go, and whether the watcher begins anew


def status(change: KeyChange, epoch: int = 1) -> common_pb2.WorkerStatus:
    return common_pb2.WorkerStatus(
        epoch=epoch,
        keys_added=change.added,
        keys_removed=change.removed,
        keys_reset=change.reset,
        keys_version=change.version,
        keys_base=change.base,
    )


class Told:
    """A mirror, the clock it reads, and why it was in doubt."""

    def __init__(self) -> None:
        self.clock, self.doubts = FakeClock(), Counter[Doubt]()
        self.mirror = Mirror(1, self.clock, lambda doubt: self.doubts.update([doubt]))

    def take(self, change: KeyChange, epoch: int = 1) -> Knowledge:
        self.mirror.take(status(change, epoch))
        return self.knowledge

    @property
    def knowledge(self) -> Knowledge:
        return self.mirror.knowledge(STALE_S)


WHOLE = KeyChange(3, 0, frozenset(KEYS[:2]), reset=True)


def worker_story(steps: Steps) -> tuple[list[common_pb2.WorkerStatus], dict[int, frozenset[bytes]]]:
    """Every status of a worker, some as the whole set as on a new stream, and its set at each version."""
    journal, now, sent = Journal(), set[bytes](), None
    history = KeyHistory((), journal.take().version)
    statuses, versions = [], {history.version: frozenset[bytes]()}
    for keys, anew in steps:
        for key in keys:
            (journal.removed if key in now else journal.stored)(key)
            now ^= {key}
        history.apply(journal.take())
        versions[history.version] = frozenset(now)
        change = history.since(None if anew else sent)
        statuses.append(status(change))
        sent = change.version
    return statuses, versions


STEPS = st.lists(st.tuples(st.lists(st.sampled_from(KEYS), max_size=4), st.booleans()), min_size=1, max_size=20)


@given(STEPS, st.data())
def test_exact_is_only_said_of_what_the_worker_holds(steps: Steps, data: st.DataObject) -> None:
    statuses, versions = worker_story(steps)
    told, newest = Told(), 0
    # Any statuses, in any order, as often as you like: losses, duplicates and reorderings.
    for index in data.draw(st.lists(st.integers(0, len(statuses) - 1), max_size=40)):
        newest = max(newest, statuses[index].keys_version)
        told.mirror.take(statuses[index])
        if told.knowledge is Knowledge.EXACT:
            event("exact")
            assert told.mirror.held == versions[newest]


@given(STEPS)
def test_a_stream_without_losses_is_followed_exactly(steps: Steps) -> None:
    statuses, versions = worker_story([([], True), *steps])
    told = Told()
    for each in statuses:
        told.mirror.take(each)
        assert (told.knowledge, told.mirror.held) == (Knowledge.EXACT, versions[each.keys_version])
    assert not told.doubts


def test_a_missed_version_is_doubt_until_the_whole_set_comes() -> None:
    told = Told()
    assert told.take(WHOLE) is Knowledge.EXACT
    told.clock.advance(2.0)
    assert told.take(KeyChange(5, 4, frozenset(KEYS[4:5]))) is Knowledge.DEGRADED
    assert told.mirror.wants_whole and KEYS[4] in told.mirror.held
    assert told.take(KeyChange(6, 5)) is Knowledge.DEGRADED
    assert told.take(KeyChange(6, 0, frozenset(KEYS[:1]), reset=True)) is Knowledge.EXACT
    assert told.doubts == {Doubt.GAP: 1}


def test_the_last_loss_shows_with_the_next_beat() -> None:
    told = Told()
    told.take(WHOLE)
    assert told.take(KeyChange(4, 4)) is Knowledge.DEGRADED


def test_a_status_of_another_life_is_doubt_and_changes_no_key() -> None:
    told = Told()
    told.take(WHOLE)
    assert told.take(KeyChange(4, 3, frozenset(KEYS[3:4])), epoch=2) is Knowledge.DEGRADED
    assert told.mirror.held == WHOLE.added
    assert told.doubts == {Doubt.INCARNATION: 1}


def test_a_worker_that_cannot_be_followed_is_not_asked_for_everything_all_the_time() -> None:
    told = Told()
    told.take(WHOLE)
    told.take(KeyChange(5, 4))
    assert not told.mirror.wants_whole
    told.clock.advance(1.5)
    assert told.mirror.wants_whole


def test_silence_is_doubt_until_the_stream_goes_on() -> None:
    told = Told()
    told.take(WHOLE)
    told.clock.advance(STALE_S + 1.0)
    assert told.knowledge is Knowledge.DEGRADED and not told.mirror.wants_whole
    assert told.take(KeyChange(3, 3)) is Knowledge.EXACT


def test_more_keys_than_are_mirrored_are_not_known_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "MAX_HELD_KEYS", 3)
    told = Told()
    told.take(WHOLE)
    assert told.take(KeyChange(4, 3, frozenset(KEYS[2:5]))) is Knowledge.DEGRADED
    assert len(told.mirror.held) == 3 and not told.mirror.wants_whole
    assert told.take(KeyChange(5, 0, frozenset(KEYS[:4]), reset=True)) is Knowledge.DEGRADED
    assert told.take(KeyChange(6, 0, frozenset(KEYS[:3]), reset=True)) is Knowledge.EXACT


def test_who_tells_nothing_of_keys_is_followed_without_end() -> None:
    told = Told()
    told.mirror.take(common_pb2.WorkerStatus(draining=True))  # a recipe
    told.clock.advance(60.0)
    assert not told.mirror.wants_whole and not told.doubts
