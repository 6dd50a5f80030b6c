"""What V4.1 caches is all it needs: resumed prefixes, rolled-back drafts, bounded replay, nothing of a neighbour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.families.v41.model import V41
from engine.families.v41.options import Options
from engine.layout import GroupKind
from tests.support.replays import replaying, resumed_rows
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, asking, opened

TOKENS = random_tokens(112, 21, vocabulary=511)
SAME = 1e-4


@pytest.fixture(scope="module")
def family() -> V41:
    return opened(DATA / "tiny-q")


@pytest.fixture(scope="module")
def clean(family: V41) -> torch.Tensor:
    return run_in_chunks(family, fresh_pool(family), TOKENS, len(TOKENS))


def resumed(family: V41, boundary: int, dropped: str) -> torch.Tensor:
    """Logits after `boundary` on another pool, in other blocks and another slot, with one group's bytes left out."""
    source, target = fresh_pool(family), CachePool(family.layout, 64, 8, torch.float32)
    run_in_chunks(family, source, TOKENS[:boundary], 16)
    for group in family.layout.groups:
        if group.name == dropped:
            continue
        if group.kind is GroupKind.GLOBAL:
            for block in range(family.layout.blocks_for(boundary)):
                target.block_extent(group.name, 30 + block)[:] = source.block_extent(group.name, block)
        else:
            target.slot_extent(group.name, 5)[:] = source.slot_extent(group.name, 0)
    return run_in_chunks(family, target, TOKENS, 16, boundary, first_block=30, slot=5)


@pytest.mark.parametrize("boundary", [1, 16, 63, 64, 65, 80, 81])
def test_a_resumed_prefix_continues_as_if_never_interrupted(boundary: int, family: V41, clean: torch.Tensor) -> None:
    assert torch.equal(resumed(family, boundary, "nothing"), clean[boundary:])


@pytest.mark.parametrize("dropped", ["entries_1", "entries_2", "index_1", "index_2", "window", "engram_classes"])
def test_a_prefix_without_any_one_group_shows(dropped: str, family: V41, clean: torch.Tensor) -> None:
    assert (resumed(family, 64, dropped) - clean[64:]).abs().max() > 0.05


@pytest.mark.parametrize(("boundary", "needed"), [(64, False), (81, True)])
def test_the_open_row_matters_only_inside_a_pair(boundary: int, needed: bool, family: V41, clean: torch.Tensor) -> None:
    worst = (resumed(family, boundary, "open_2") - clean[boundary:]).abs().max()
    assert worst > 0.05 if needed else worst == 0


@pytest.mark.parametrize("rejected", range(1, 9))
@pytest.mark.parametrize("position", [30, 47])
def test_rejected_drafts_leave_no_trace(rejected: int, position: int, family: V41, clean: torch.Tensor) -> None:
    pool = fresh_pool(family)
    run_in_chunks(family, pool, TOKENS[:position], 16)
    blocks = range(family.layout.blocks_for(len(TOKENS)))
    family.forward(batch_of([Piece(random_tokens(rejected, rejected), position, blocks, 0)]), pool)
    found = run_in_chunks(family, pool, TOKENS, 5, position)
    assert (found - clean[position:]).abs().max() <= SAME


def test_a_copied_slot_is_an_anchor(family: V41, clean: torch.Tensor) -> None:
    pool = fresh_pool(family)
    run_in_chunks(family, pool, TOKENS[:64], 64)
    pool.copy_slot(0, 3)
    run_in_chunks(family, pool, TOKENS, 16, 64)
    assert torch.equal(run_in_chunks(family, pool, TOKENS, 16, 64, slot=3), clean[64:])


def test_the_layout_counts_every_layer_and_row(family: V41) -> None:
    sizes = {group.name: (group.layers, group.entries, group.record_bytes) for group in family.layout.groups}
    assert sizes == {
        "entries_1": (1, 16, 64 * 4),
        "index_1": (1, 16, 32 * 4),
        "entries_2": (2, 8, 64 * 4),
        "index_2": (2, 8, 32 * 4),
        "window": (12, 16 + 8, 64 * 4),
        "open_2": (2, 2 + 8, 2 * 64 * 4),
        "engram_classes": (1, 3 + 8, 4),
    }


def test_every_choice_that_changes_what_is_cached_changes_the_fingerprint() -> None:
    choices = [
        {},
        *({name: True} for name in Options.__dataclass_fields__),
        {"fake_quantize": True, "decoder_replay": True},
    ]
    families = [opened(DATA / "tiny-q", options=Options(**choice)) for choice in choices]
    assert len({family.layout.fingerprint for family in families}) == len(choices)
    assert [family.layout.window_policy for family in families] == ["exact", "exact", *["replay"] * 4]


def prefilled(family: V41, pool: CachePool, tokens: list[int], chunk: int, upper: int) -> torch.Tensor:
    """Logits of the last row of a prefill whose rows below `upper` stay below the upper layers."""
    blocks = range(family.layout.blocks_for(len(tokens)))
    found = torch.empty(0)
    for at in range(0, len(tokens), chunk):
        piece = Piece(tokens[at : at + chunk], at, blocks, 0)
        last = [len(piece.tokens) - 1] if at + chunk >= len(tokens) else []
        found = family.forward(replaying(asking(batch_of([piece]), last), tokens, 0, upper), pool)
    return found


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 96, 100])
def test_decoder_replay_does_not_depend_on_the_chunks(chunk: int, family: V41) -> None:
    whole, pool = prefilled(family, fresh_pool(family), TOKENS, 112, 96), fresh_pool(family)  # full of NaN
    assert torch.equal(prefilled(family, pool, TOKENS, chunk, 96), whole)
    assert torch.isfinite(run_in_chunks(family, pool, [*TOKENS, *TOKENS[:20]], 1, 112)).all(), "reads what was left out"


def test_decoder_replay_of_everything_is_exact(family: V41, clean: torch.Tensor) -> None:
    assert torch.equal(prefilled(family, fresh_pool(family), TOKENS, 16, 0), clean[-1:])


@pytest.mark.parametrize(
    ("chunk", "upper", "rows"), [(112, 96, [16]), (64, 96, [0, 16]), (112, 112, [0]), (50, 40, [10, 50, 12])]
)
def test_the_upper_layers_run_on_the_last_rows_alone(chunk: int, upper: int, rows: list[int], family: V41) -> None:
    told: list[tuple[int, int]] = []
    family.probe = lambda what, layer, value: told.append((layer, len(value))) if what == "streams" else None
    try:
        if upper < len(TOKENS):
            prefilled(family, fresh_pool(family), TOKENS, chunk, upper)
        else:
            batch = replaying(asking(batch_of([Piece(TOKENS, 0, range(7), 0)]), []), TOKENS, 0, upper)
            assert family.forward(batch, fresh_pool(family)).shape == (0, family.vocab_size)
    finally:
        family.probe = None
    assert [count for layer, count in told if layer == 5] == [min(chunk, 112 - at) for at in range(0, 112, chunk)]
    for layer in range(6, 12):
        assert [count for at, count in told if at == layer] == [count for count in rows if count]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_entries_alone_are_those_of_a_whole_prefill(kernels: str) -> None:
    """Nothing above the last entry source takes part in them, so prefill needs none of it."""
    family = opened(DATA / "tiny-q", kernels)
    whole, entries = (CachePool(family.layout, 8, 2, torch.float32) for _ in range(2))
    run_in_chunks(family, whole, TOKENS, 64)
    for at in (0, 64):
        batch = asking(batch_of([Piece(TOKENS[at : at + 64], at, range(7), 0)]), [])
        family.forward(replaying(batch, TOKENS, 0, 112), entries)
    assert torch.equal(whole.blocks, entries.blocks)


def test_a_sequence_is_trimmed_and_its_neighbour_whole(family: V41) -> None:
    """One sequence asks for an early row; the other is trimmed and neither is harmed."""
    pieces = [Piece(TOKENS[:60], 0, range(4), 0), Piece(TOKENS[:60], 0, range(4, 8), 1)]
    batch = asking(batch_of(pieces), [10, 59, 119])
    whole = family.forward(batch, fresh_pool(family))
    mixed = replaying(batch, TOKENS)
    mixed.replay.upper[:] = 0, 44
    found = family.forward(mixed, fresh_pool(family))
    assert torch.equal(found[:2], whole[:2])
    assert torch.equal(found[2:], prefilled(family, fresh_pool(family), TOKENS[:60], 60, 44))


def test_replays_and_decodes_share_a_batch(family: V41, clean: torch.Tensor) -> None:
    pool, other = fresh_pool(family), fresh_pool(family)
    run_in_chunks(family, other, TOKENS[:64], 64)
    alone = resumed_rows(family, other, TOKENS[:90], 64, 100)
    run_in_chunks(family, pool, TOKENS[:80], 80)
    run_in_chunks(family, pool, TOKENS[:64], 64, first_block=8, slot=1)
    start = 64 - family.config.window
    pieces = [Piece(TOKENS[80:81], 80, range(8), 0), Piece(TOKENS[start:90], start, range(8, 16), 2)]
    batch = replaying(batch_of(pieces), TOKENS)
    batch.replay.hits[:] = 0, 64
    found = family.forward(batch, pool)
    assert torch.equal(found[0], clean[80])
    assert torch.equal(found[1:], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": [64, 64]}, "one prefix for each"),
        ({"hits": [-1]}, "one prefix for each"),
        ({"hits": [100]}, "begin before the replay"),
        ({"upper": [1, 1]}, "name one for each"),
        ({"upper": [60]}, "stay below the upper layers"),
        ({"before": [[1, 2]]}, "3 are needed"),
    ],
)
def test_replays_that_do_not_fit_the_batch_are_refused(change: dict, message: str, family: V41) -> None:
    batch = replaying(batch_of([Piece(TOKENS[:20], 48, range(8), 0)]), TOKENS)
    wrong = replace(batch.replay, **{name: np.array(value) for name, value in change.items()})
    with pytest.raises(ValueError, match=message):
        family.forward(replace(batch, replay=wrong), fresh_pool(family))
