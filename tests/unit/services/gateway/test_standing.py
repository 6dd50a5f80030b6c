"""A worker's standing: reports, silence, and what was sent in between."""

from __future__ import annotations

import pytest

from protos.deepinfer.v1 import common_pb2
from services.gateway.mirror import Knowledge
from services.gateway.standing import Limits, Standing


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def standing(clock: Clock) -> Standing:
    model = common_pb2.ModelInfo(name="m", revision="r", layout=common_pb2.Layout(fingerprint="f", block_tokens=128))
    return Standing("w@1", Limits(model, 1, 8192, 16), clock)


def status(sequence: int, **fields: object) -> common_pb2.WorkerStatus:
    return common_pb2.WorkerStatus(sequence=sequence, **fields)  # type: ignore[arg-type]


def test_a_report_replaces_what_was_sent_before_it(standing: Standing, clock: Clock) -> None:
    standing.send(500)
    assert standing.view().sent_tokens == 500
    clock.now += 1.0
    standing.report(status(1, queued_tokens=500, running_requests=1))
    assert (standing.view().sent_tokens, standing.view().queued_tokens, standing.view().requests) == (0, 500, 1)


def test_a_report_made_as_the_request_left_does_not_hide_it(standing: Standing) -> None:
    standing.send(500)
    standing.report(status(1))
    assert standing.view().sent_tokens == 500 and standing.view().requests == 1


def test_how_a_worker_restores_windows_follows_from_its_layout(standing: Standing, clock: Clock) -> None:
    assert standing.view().window_policy == "exact"
    for stacked, policy in ((False, "replay"), (True, "recompute")):
        replay = common_pb2.ReplayPolicy(tokens=128, stacked=stacked)
        layout = common_pb2.Layout(fingerprint="f", block_tokens=128, replay=replay)
        model = common_pb2.ModelInfo(name="m", revision="r", layout=layout)
        assert Standing("w@2", Limits(model, 1, 8192, 16), clock).view().window_policy == policy


def test_settled_work_is_no_load_but_stays_recent(standing: Standing, clock: Clock) -> None:
    standing.settle(standing.send(500))
    assert standing.view().sent_tokens == 0
    assert standing.view().recent_tokens == 500
    clock.now += 20.0
    assert standing.view().recent_tokens < 1


def test_an_overtaken_report_changes_nothing(standing: Standing) -> None:
    standing.report(status(5, blocks_free=7))
    standing.report(status(4, blocks_free=1))
    assert standing.view().blocks_free == 7


def test_held_keys_follow_the_differences(standing: Standing) -> None:
    standing.report(status(1, epoch=1, keys_reset=True, keys_added=[b"a", b"b"], keys_version=7))
    standing.report(status(2, epoch=1, keys_added=[b"c"], keys_removed=[b"a"], keys_base=7, keys_version=9))
    assert set(standing.view().held) == {b"b", b"c"}
    standing.report(status(3, epoch=1, keys_reset=True, keys_added=[b"z"], keys_version=9))
    assert set(standing.view().held) == {b"z"}


def test_keys_are_known_exactly_while_the_worker_reports(standing: Standing, clock: Clock) -> None:
    assert standing.view(6.0).knowledge is Knowledge.DEGRADED
    standing.report(status(1, epoch=1, keys_reset=True, keys_added=[b"a"], keys_version=7))
    assert standing.view(6.0).knowledge is Knowledge.EXACT
    clock.now += 6.5
    standing.seen()  # it answers a probe: it lives, but nobody knows what it caches now
    assert standing.usable(6.0) and standing.view(6.0).knowledge is Knowledge.DEGRADED
    standing.report(status(1, epoch=1, keys_base=7, keys_version=7))
    assert standing.view(6.0).knowledge is Knowledge.EXACT


def test_silence_draining_and_a_lost_connection_end_its_use(standing: Standing, clock: Clock) -> None:
    assert standing.usable(2.5)
    clock.now += 3.0
    assert not standing.usable(2.5)
    standing.seen()
    assert standing.usable(2.5)
    standing.lost()
    assert not standing.usable(2.5)
    standing.report(status(1))
    assert standing.usable(2.5)
    standing.report(status(2, draining=True))
    assert not standing.usable(2.5)
