"""Cache layout."""

from dataclasses import replace

import pytest

from engine.layout import CacheGroup, GroupKind, Layout, ReplayPolicy

ENTRIES = CacheGroup("csa", GroupKind.GLOBAL, 3, 32, 4, 64, "float32", "v1")
RING = CacheGroup("window", GroupKind.WINDOW, 8, 136, 1, 64, "float32", "v1")
LAYOUT = Layout(128, 8, (ENTRIES, RING))


def test_sizes_are_sums_of_contiguous_extents() -> None:
    assert (LAYOUT.block_bytes, LAYOUT.window_bytes) == (3 * 32 * 64, 8 * 136 * 64)
    assert LAYOUT.globals == (ENTRIES,) and LAYOUT.windows == (RING,)
    assert [LAYOUT.blocks_for(tokens) for tokens in (0, 1, 128, 129)] == [0, 1, 1, 2]


def test_windows_need_anchors_unless_they_are_replayed() -> None:
    replaying = replace(LAYOUT, replay=ReplayPolicy(128))
    assert (LAYOUT.anchored, LAYOUT.window_policy) == (True, "exact")
    assert (replaying.anchored, replaying.window_policy) == (False, "replay")
    stacked = replace(LAYOUT, replay=ReplayPolicy(1024, stacked=True))
    assert (stacked.anchored, stacked.window_policy) == (False, "recompute")
    assert not Layout(128, 8, (ENTRIES,)).anchored
    assert [replaying.replay.start(hit) for hit in (0, 100, 129, 1000)] == [0, 0, 1, 872]


@pytest.mark.parametrize("fields", [{"stacked": True}, {"tokens": 16, "stacked": True, "decoder": True}])
def test_stacked_windows_of_nothing_or_of_some_rows_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="replay policy"):
        ReplayPolicy(**fields)


def test_valid_entries_count_only_complete_windows_and_never_exceed_the_extent() -> None:
    assert [ENTRIES.valid_entries(tokens) for tokens in (0, 3, 4, 127, 128, 999)] == [0, 0, 1, 31, 32, 32]
    assert [RING.valid_entries(tokens) for tokens in (0, 5, 136, 5000)] == [0, 5, 136, 136]


@pytest.mark.parametrize(
    "change", [{"record_bytes": 32}, {"dtype": "bfloat16"}, {"record_version": "v2"}, {"layers": 4}]
)
def test_any_change_of_a_record_changes_the_fingerprint(change: dict[str, object]) -> None:
    other = Layout(128, 8, (replace(ENTRIES, **change), RING))
    assert other.fingerprint != LAYOUT.fingerprint
    assert Layout(128, 8, (ENTRIES, RING)).fingerprint == LAYOUT.fingerprint


def test_contradictions_are_refused_with_the_group_named() -> None:
    with pytest.raises(ValueError, match="csa"):
        Layout(64, 0, (ENTRIES,))
    with pytest.raises(ValueError, match="differ"):
        Layout(128, 0, (ENTRIES, ENTRIES))
    with pytest.raises(ValueError, match="record_bytes"):
        replace(RING, record_bytes=0)
    with pytest.raises(KeyError, match="csa"):
        LAYOUT.group("hca")
