"""What V4.1 caches is all it needs: resumed prefixes, rolled-back drafts, bounded replay, nothing of a neighbour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.families.v41.model import V41
from engine.families.v41.options import Options
from engine.families.v41.replay import Resume
from engine.layout import GroupKind
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, asking, opened, resumed_rows

TOKENS = random_tokens(112, 21, vocabulary=511)
SAME = 1e-4


@pytest.fixture(scope="module")
def family() -> V41:
    return opened(DATA / "tiny-q")


@pytest.fixture(scope="module")
def trimming() -> V41:
    return opened(DATA / "tiny-q", options=Options(decoder_replay=True))


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


def test_every_choice_that_changes_what_is_cached_changes_the_fingerprint(family: V41, trimming: V41) -> None:
    quantizing = opened(DATA / "tiny-q", options=Options(fake_quantize=True))
    both = opened(DATA / "tiny-q", options=Options(fake_quantize=True, decoder_replay=True))
    assert len({model.layout.fingerprint for model in (family, trimming, quantizing, both)}) == 4


def last_rows(family: V41, pool: CachePool, tokens: list[int], chunk: int, start: int = 0) -> torch.Tensor:
    """Logits of the last row of each chunk, as a prefill asks for them."""
    blocks, found = range(family.layout.blocks_for(len(tokens))), []
    for at in range(start, len(tokens), chunk):
        piece = Piece(tokens[at : at + chunk], at, blocks, 0)
        found.append(family.forward(asking(batch_of([piece]), [len(piece.tokens) - 1]), pool))
    return torch.cat(found)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_decoder_replay_changes_nothing_in_chunks_within_the_window(chunk: int, family: V41, trimming: V41) -> None:
    exact = last_rows(family, fresh_pool(family), TOKENS, chunk)
    assert torch.equal(last_rows(trimming, fresh_pool(trimming), TOKENS, chunk), exact)


def test_decoding_after_a_trimmed_prefill_reads_no_row_that_was_left_out(trimming: V41) -> None:
    pool = fresh_pool(trimming)  # full of NaN
    for chunk in (50, 17, 1):
        assert torch.isfinite(last_rows(trimming, pool, TOKENS, chunk)).all()
    last_rows(trimming, pool, TOKENS[:70], 70)
    assert torch.isfinite(last_rows(trimming, pool, TOKENS, 1, 70)).all()


def test_a_trimmed_prefill_runs_the_upper_layers_on_one_window(trimming: V41) -> None:
    rows = {}
    trimming.probe = lambda what, layer, value: rows.__setitem__(layer, len(value)) if what == "streams" else None
    try:
        last_rows(trimming, fresh_pool(trimming), TOKENS, 112)
    finally:
        trimming.probe = None
    assert [rows[layer] for layer in range(12)] == [112] * 6 + [16] * 6


def test_earlier_rows_that_are_asked_for_keep_their_sequence_whole(family: V41, trimming: V41) -> None:
    """One sequence wants an early row; its neighbour is trimmed all the same and unharmed."""
    pieces = [Piece(TOKENS[:60], 0, range(4), 0), Piece(TOKENS[:60], 0, range(4, 8), 1)]
    batch = batch_of(pieces)
    whole = family.forward(asking(batch, [10, 59]), fresh_pool(family))
    found = trimming.forward(asking(batch, [10, 59, 119]), fresh_pool(trimming))
    assert torch.equal(found[:2], whole)
    alone = trimming.forward(asking(batch_of(pieces[:1]), [59]), fresh_pool(trimming))
    assert torch.equal(found[2:], alone)


def test_replays_and_decodes_share_a_batch(family: V41, clean: torch.Tensor) -> None:
    pool, other = fresh_pool(family), fresh_pool(family)
    run_in_chunks(family, other, TOKENS[:64], 64)
    alone = resumed_rows(family, other, TOKENS[:90], 64, 100)
    run_in_chunks(family, pool, TOKENS[:80], 80)
    run_in_chunks(family, pool, TOKENS[:64], 64, first_block=8, slot=1)
    start = 64 - family.config.window
    pieces = [Piece(TOKENS[80:81], 80, range(8), 0), Piece(TOKENS[start:90], start, range(8, 16), 2)]
    before = np.array([[-1, -1, -1], [TOKENS[start - back] for back in (1, 2, 3)]])
    found = family.forward(batch_of(pieces), pool, Resume(np.array([0, 64], np.int32), before))
    assert torch.equal(found[0], clean[80])
    assert torch.equal(found[1:], alone)


@pytest.mark.parametrize(
    ("hits", "before", "message"),
    [([64, 64], 2, "hits"), ([-1], 1, "hits"), ([100], 1, "begin before the replay")],
)
def test_hits_that_do_not_fit_the_batch_are_refused(hits: list[int], before: int, message: str, family: V41) -> None:
    resume = Resume(np.array(hits, np.int32), np.full((before, 3), -1))
    with pytest.raises(ValueError, match=message):
        family.forward(batch_of([Piece(TOKENS[:20], 48, range(8), 0)]), fresh_pool(family), resume)
