"""A layout that crosses the network is the same layout, or it is refused."""

from __future__ import annotations

import pytest

from engine.layout import CacheGroup, GroupKind, Layout, ReplayPolicy
from fabric import wire
from fabric.errors import InvalidArgument
from services.worker.layouts import unpack_layout

GROUPS = (
    CacheGroup("csa", GroupKind.GLOBAL, 2, 4, 4, 8, "float32", "csa-1"),
    CacheGroup("window", GroupKind.WINDOW, 3, 10, 1, 8, "float32", "window-1"),
)
POLICIES = [
    ReplayPolicy(),
    ReplayPolicy(8),
    ReplayPolicy(8, decoder=True),
    ReplayPolicy(8, True, True),
    ReplayPolicy(8, stacked=True),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layout_comes_back_as_it_was(policy: ReplayPolicy) -> None:
    layout = Layout(16, 2, GROUPS, policy)
    assert unpack_layout(wire.pack_layout(layout), "layout") == layout


def test_another_replay_policy_is_another_layout() -> None:
    assert len({Layout(16, 2, GROUPS, policy).fingerprint for policy in POLICIES}) == len(POLICIES)
    message = wire.pack_layout(Layout(16, 2, GROUPS, ReplayPolicy(8)))
    message.replay.handoff = True
    with pytest.raises(InvalidArgument, match="fingerprint"):
        unpack_layout(message, "layout")


def test_a_replay_of_nothing_is_refused() -> None:
    message = wire.pack_layout(Layout(16, 2, GROUPS))
    message.replay.decoder = True
    with pytest.raises(InvalidArgument, match="cannot be replayed"):
        unpack_layout(message, "layout")
