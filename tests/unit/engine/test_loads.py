"""Blocks and anchors that come from a store: filled by the caller, cached only once verified."""

import pytest

from engine.engine import Engine
from engine.errors import Exhausted, InvalidParameter
from engine.events import FirstToken
from engine.requests import GenerateRequest, Load, PrefillRequest
from tests.support.driving import GREEDY, of, run, tokens_of, whole
from tests.support.fakefamily import fake_engine

PROMPT = tuple(2 + (13 * place) % 53 for place in range(45))  # 5 full blocks of 8, anchor at 40


def stored(source: Engine) -> tuple[dict[bytes, dict[str, bytes]], dict[bytes, dict[str, bytes]]]:
    """What a prefill service would put into a store: records of every sealed block, and of the anchor, by key."""
    source.submit_prefill(PrefillRequest("store", PROMPT, GREEDY, b"tenant"))
    run(source)
    sealed = source.sealed("store")
    assert [block.index for block in sealed.blocks] == list(range(5)) and sealed.cached_blocks == 0
    assert [block.parent for block in sealed.blocks[1:]] == [block.key for block in sealed.blocks[:-1]]
    assert sealed.blocks[2].tokens == PROMPT[16:24]
    assert sealed.anchor is not None and (sealed.anchor.tokens, sealed.anchor.key) == (40, sealed.blocks[-1].key)
    layout, pool = source.model.layout, source.pool
    blocks = {
        block.key: {group.name: bytes(pool.block_extent(group.name, block.block)) for group in layout.globals}
        for block in sealed.blocks
    }
    anchor = {group.name: bytes(pool.slot_extent(group.name, sealed.anchor.slot)) for group in layout.windows}
    source.release("store")
    return blocks, {sealed.anchor.key: anchor}


def fill(engine: Engine, load: Load, blocks: dict, anchors: dict) -> None:
    for block, key in zip(load.blocks, load.keys, strict=True):
        for group, record in blocks[key].items():
            engine.pool.block_extent(group, block)[:] = memoryview(record)
    for group, record in anchors.get(load.keys[-1], {}).items():
        engine.pool.slot_extent(group, load.slot)[:] = memoryview(record)


def test_loaded_blocks_are_a_hit_and_give_the_same_tokens() -> None:
    blocks, anchors = stored(fake_engine())
    engine = fake_engine()
    local = engine.lookup(PROMPT, b"tenant")
    assert (len(local.keys), local.matched_blocks, local.hit_tokens) == (5, 0, 0)
    load = engine.begin_load(PROMPT, b"tenant", 0, 5)
    fill(engine, load, blocks, anchors)
    assert engine.finish_load(load, 5).hit_tokens == 40
    engine.submit(GenerateRequest("r", PROMPT, GREEDY, b"tenant"))
    events = run(engine)
    assert of(events, FirstToken)[0].cached_tokens == 40
    assert tokens_of(events, "r") == whole(fake_engine(), PROMPT)
    assert engine.lookup(PROMPT, b"other").matched_blocks == 0


def test_only_the_blocks_that_were_verified_are_cached() -> None:
    blocks, anchors = stored(fake_engine())
    engine = fake_engine()
    load = engine.begin_load(PROMPT, b"tenant", 0, 5)
    fill(engine, load, blocks, anchors)
    local = engine.finish_load(load, 3)
    assert (local.matched_blocks, local.hit_tokens) == (3, 0), "the anchor stands behind blocks that are missing"
    rest = engine.begin_load(PROMPT, b"tenant", 3, 5)
    fill(engine, rest, blocks, anchors)
    assert engine.finish_load(rest, 2, anchor_ok=False).hit_tokens == 0
    assert engine.stats().blocks_cached == 5 and engine.stats().slots_held == 0
    assert whole(engine, PROMPT, salt=b"tenant") == whole(fake_engine(), PROMPT)


def test_an_abandoned_load_leaves_nothing_and_may_be_abandoned_again() -> None:
    engine = fake_engine()
    load = engine.begin_load(PROMPT, b"", 0, 4)
    assert engine.stats().loading == 1 and engine.stats().blocks_held == 4
    engine.abandon_load(load)
    engine.abandon_load(load)
    engine.memory.check_idle()
    with pytest.raises(InvalidParameter, match="not open"):
        engine.finish_load(load, 4)


def test_the_blocks_before_a_load_stay_while_it_lasts() -> None:
    blocks, anchors = stored(fake_engine())
    engine = fake_engine(num_blocks=7)
    first = engine.begin_load(PROMPT, b"tenant", 0, 2)
    fill(engine, first, blocks, anchors)
    engine.finish_load(first, 2)
    second = engine.begin_load(PROMPT, b"tenant", 2, 5)
    with pytest.raises(Exhausted):
        engine.begin_load(tuple(reversed(PROMPT)), b"tenant", 0, 5)
    fill(engine, second, blocks, anchors)
    assert engine.finish_load(second, 3).hit_tokens == 40


@pytest.mark.parametrize(
    ("first", "last", "field"), [(0, 6, "to_block"), (2, 2, "to_block"), (-1, 2, "to_block"), (1, 2, "from_block")]
)
def test_a_wrong_range_is_refused_by_field(first: int, last: int, field: str) -> None:
    engine = fake_engine()
    with pytest.raises(InvalidParameter) as refusal:
        engine.begin_load(PROMPT, b"", first, last)
    assert refusal.value.field == field
    engine.memory.check_idle()


def test_a_prefill_that_hits_reports_its_cached_blocks_and_holds_the_anchor() -> None:
    engine = fake_engine()
    whole(engine, PROMPT)
    engine.submit_prefill(PrefillRequest("r", (*PROMPT[:40], 3), GREEDY))
    run(engine)
    sealed = engine.sealed("r")
    assert sealed.cached_blocks == 5 == len(sealed.blocks)
    assert sealed.anchor is not None and sealed.anchor.tokens == 40
    engine.release("r")
    engine.memory.check_idle()


def test_what_was_found_stays_told_after_a_preemption_that_took_it() -> None:
    engine = fake_engine()
    whole(engine, PROMPT)
    engine.submit_prefill(PrefillRequest("r", (*PROMPT[:40], *range(2, 40)), GREEDY))
    engine.step()
    engine._scheduler.preempt(engine._sequences["r"])
    sealed = engine.sealed("r")
    assert (sealed.cached_blocks, sealed.blocks) == (5, ())
    run(engine)
    assert engine.sealed("r").cached_blocks == 5
    engine.release("r")
    engine.memory.check_idle()
