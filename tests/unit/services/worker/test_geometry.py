"""Both sides of a handoff compute the same places, and a receipt must name every one of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.layout import CacheGroup, GroupKind, Layout, ReplayPolicy
from engine.sampling.params import SamplingState
from fabric.errors import DataLoss, InvalidArgument
from services.worker.geometry import Handoff
from services.worker.receipts import Receipt, require_complete

LAYOUT = Layout(
    block_tokens=16,
    max_rollback=2,
    groups=(
        CacheGroup("csa", GroupKind.GLOBAL, 2, 4, 4, 8, "float32", "csa-1"),
        CacheGroup("hca", GroupKind.GLOBAL, 1, 1, 16, 8, "float32", "hca-1"),
        CacheGroup("window", GroupKind.WINDOW, 3, 10, 1, 8, "float32", "window-1"),
    ),
)


def receipt(handoff: Handoff) -> Receipt:
    extents = tuple(place.sealed(number) for number, place in enumerate(handoff.places()))
    return Receipt("t", "r", 1, "rev", LAYOUT.fingerprint, handoff.tokens, extents, 5, SamplingState(0, 1))


@pytest.mark.parametrize(("tokens", "held"), [(1, 0), (16, 0), (17, 0), (40, 16), (32, 32)])
def test_places_fill_the_landing_without_gap_or_overlap(tokens: int, held: int) -> None:
    handoff = Handoff(LAYOUT, tokens, held)
    end = 0
    for place in handoff.places():
        assert place.offset == end
        end += place.size
    assert end == handoff.landing_bytes


def test_a_tail_is_only_as_full_as_its_tokens() -> None:
    places = {(place.group, place.block): place for place in Handoff(LAYOUT, 16 + 9).places()}
    assert places["csa", 0].valid_entries == 4
    assert places["csa", 1].valid_entries == 2
    assert places["hca", 1].valid_entries == 0
    assert places["window", 0].valid_entries == 10


def test_held_tokens_are_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        Handoff(LAYOUT, 40, 8)


def test_a_complete_receipt_is_accepted_in_any_order() -> None:
    handoff = Handoff(LAYOUT, 40, 16)
    complete = receipt(handoff)
    require_complete(complete, handoff)
    require_complete(replace(complete, extents=complete.extents[::-1]), handoff)


def test_a_receipt_that_lacks_any_extent_is_refused() -> None:
    handoff = Handoff(LAYOUT, 40, 16)
    complete = receipt(handoff)
    for missing in range(len(complete.extents)):
        extents = complete.extents[:missing] + complete.extents[missing + 1 :]
        with pytest.raises(DataLoss):
            require_complete(replace(complete, extents=extents), handoff)
        doubled = (*extents, extents[0])
        with pytest.raises(DataLoss):
            require_complete(replace(complete, extents=doubled), handoff)


@pytest.mark.parametrize("field", ["valid_entries", "offset", "size"])
def test_a_receipt_that_describes_an_extent_otherwise_is_refused(field: str) -> None:
    handoff = Handoff(LAYOUT, 40, 16)
    complete = receipt(handoff)
    first = complete.extents[0]
    changed = replace(first, **{field: getattr(first, field) - 1})
    with pytest.raises(DataLoss):
        require_complete(replace(complete, extents=(changed, *complete.extents[1:])), handoff)


def test_a_replay_needs_the_blocks_and_no_window() -> None:
    layout = replace(LAYOUT, replay=ReplayPolicy(10, handoff=True))
    handoff = Handoff(layout, 40, 16)
    entries = replace(handoff, windows=False)
    assert handoff.landing_bytes - entries.landing_bytes == layout.window_bytes
    complete = replace(receipt(entries), first_token=None, replay_from=30)
    require_complete(complete, handoff)
    with pytest.raises(DataLoss):
        require_complete(replace(receipt(handoff), first_token=None, replay_from=30), handoff)
    with pytest.raises(DataLoss):
        require_complete(replace(complete, extents=complete.extents[1:]), handoff)


@pytest.mark.parametrize(("policy", "position"), [(ReplayPolicy(10), 30), (ReplayPolicy(10, handoff=True), 31)])
def test_a_replay_that_the_layout_does_not_have_is_refused(policy: ReplayPolicy, position: int) -> None:
    handoff = Handoff(replace(LAYOUT, replay=policy), 40, 16)
    entries = receipt(replace(handoff, windows=False))
    with pytest.raises(InvalidArgument, match="replay"):
        require_complete(replace(entries, first_token=None, replay_from=position), handoff)


def test_a_receipt_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="41 tokens"):
        require_complete(receipt(Handoff(LAYOUT, 41)), Handoff(LAYOUT, 40))
