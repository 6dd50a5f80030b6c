"""What a request sealed outlives it until a store has it, within bounds, and gives way to requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.engine import Engine
from engine.events import Failed, Finished, Preempted
from engine.offers import Offer, OfferPolicy
from engine.requests import GenerateRequest, PrefillRequest
from tests.support.driving import GREEDY, handoff, of, run, tokens_of, whole
from tests.support.fakefamily import LAYOUT, NAN_TOKEN, fake_engine

PROMPT = tuple(2 + (13 * place) % 53 for place in range(45))  # 5 full blocks of 8, anchor at 40
LONG = replace(GREEDY, max_tokens=30)


def prefilled(engine: Engine, name: str = "p", prompt: tuple[int, ...] = PROMPT) -> None:
    engine.submit_prefill(PrefillRequest(name, prompt, GREEDY, offer_as="label"))
    run(engine)
    engine.release(name)


def taken(engine: Engine) -> Offer:
    offer = engine.offers.take()
    assert offer is not None
    return offer


def decoded(engine: Engine, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """A handoff to `engine` that ends there; its tokens, the prompt's included."""
    request = PrefillRequest("d", prompt, LONG, offer_as="label")
    first, _ = handoff(fake_engine(), engine, request)
    return (*prompt, first.token, *tokens_of(run(engine), "d"))


def test_a_prefill_offers_its_blocks_and_its_anchor_and_they_outlive_it() -> None:
    engine = fake_engine()
    prefilled(engine)
    assert engine.stats().held == 0 and engine.stats().blocks_held == 5 and engine.stats().slots_held == 1
    offer = taken(engine)
    assert (offer.request_id, offer.label, offer.first_new) == ("p", "label", 0)
    assert [block.tokens for block in offer.blocks] == [PROMPT[at : at + 8] for at in range(0, 40, 8)]
    assert [(anchor.tokens, anchor.key) for anchor in offer.anchors] == [(40, offer.blocks[-1].key)]
    engine.offers.drop(offer.offer_id)
    engine.offers.drop(offer.offer_id)
    engine.memory.check_idle()


def test_a_decode_offers_what_it_sealed_with_the_anchor_of_the_last_block() -> None:
    engine = fake_engine()
    tokens = decoded(engine)
    offer = taken(engine)
    assert offer.first_new == 5, "the prompt's blocks are prefill's to offer"
    assert len(offer.blocks) == (len(tokens) - 1) // 8 == 9
    assert [block.tokens for block in offer.blocks] == [tokens[at : at + 8] for at in range(0, 72, 8)]
    assert [block.key for block in offer.blocks] == list(engine.lookup(tokens).keys[:9])
    assert [(anchor.tokens, anchor.key) for anchor in offer.anchors] == [(72, offer.blocks[-1].key)]


def test_the_anchor_of_a_decode_is_the_window_of_a_prefill_of_the_same_tokens() -> None:
    engine, fresh = fake_engine(), fake_engine()
    tokens = decoded(engine)
    offer = taken(engine)
    fresh.submit_prefill(PrefillRequest("p", (*tokens[:72], 3), GREEDY))
    run(fresh)
    sealed = fresh.sealed("p")
    assert sealed.anchor is not None and sealed.anchor.tokens == 72
    for group in LAYOUT.windows:
        mine = bytes(engine.pool.slot_extent(group.name, offer.anchors[0].slot))
        assert mine == bytes(fresh.pool.slot_extent(group.name, sealed.anchor.slot))
    for here, there in zip(offer.blocks, sealed.blocks, strict=True):
        assert here.key == there.key
        for group in LAYOUT.globals:
            mine = bytes(engine.pool.block_extent(group.name, here.block))
            assert mine == bytes(fresh.pool.block_extent(group.name, there.block))


@pytest.mark.parametrize("fields", [{"cache": False, "offer_as": "label"}, {}])
def test_nothing_is_offered_without_a_label_or_a_cache(fields: dict[str, object]) -> None:
    engine = fake_engine()
    engine.submit(GenerateRequest("r", PROMPT, GREEDY, **fields))
    run(engine)
    assert len(engine.offers) == 0


def test_nothing_is_offered_where_all_was_here_already() -> None:
    engine = fake_engine()
    prefilled(engine)
    engine.offers.drop(taken(engine).offer_id)
    prefilled(engine, "again")
    assert len(engine.offers) == 0


def test_a_cancelled_request_offers_what_it_has() -> None:
    engine = fake_engine()
    engine.submit(GenerateRequest("r", PROMPT, LONG, offer_as="label"))
    for _ in range(4):
        engine.step()
    engine.cancel("r")
    assert len(taken(engine).blocks) == 5


def test_a_long_prompt_offers_at_a_grid_and_waiting_offers_of_one_request_join() -> None:
    policy = OfferPolicy(anchor_share=1.0, least_every_blocks=2)
    every = policy.every_blocks(LAYOUT, 2)
    assert every == 2 and LAYOUT.window_bytes <= every * LAYOUT.block_bytes
    engine = fake_engine(offers=policy)
    engine.submit_prefill(PrefillRequest("p", PROMPT, GREEDY, offer_as="label"))
    engine.step()
    early = taken(engine)
    assert len(early.blocks) == 2 and [anchor.tokens for anchor in early.anchors] == [16]
    run(engine)
    engine.release("p")
    offer = taken(engine)
    assert (len(offer.blocks), offer.first_new) == (5, 2)
    assert [anchor.tokens for anchor in offer.anchors] == [32, 40]
    assert engine.offers.take() is None


def test_a_long_generation_offers_at_the_same_grid() -> None:
    engine = fake_engine(offers=OfferPolicy(anchor_share=0.5, least_every_blocks=4))
    decoded(engine)
    offer = taken(engine)
    assert [anchor.tokens for anchor in offer.anchors] == [64, 72]


def test_anchors_of_the_grid_stay_within_their_share_of_bytes() -> None:
    for share in (0.05, 0.125, 1.0):
        every = OfferPolicy(anchor_share=share, least_every_blocks=1).every_blocks(LAYOUT, 2)
        assert every % 2 == 0 and LAYOUT.window_bytes <= share * every * LAYOUT.block_bytes * 1.05
    assert OfferPolicy(anchor_share=0).every_blocks(LAYOUT, 2) == 0


def test_more_than_may_wait_are_refused_and_counted() -> None:
    engine = fake_engine(offers=OfferPolicy(most=2, anchor_share=0))
    for index in range(3):
        prefilled(engine, f"p{index}", PROMPT[index:])
    assert len(engine.offers) == 2 and engine.stats().offers_refused == 1


def test_bytes_that_wait_are_bounded_but_for_a_lone_offer() -> None:
    engine = fake_engine(offers=OfferPolicy(most_bytes=LAYOUT.block_bytes, anchor_share=0))
    prefilled(engine)
    assert len(engine.offers) == 1
    prefilled(engine, "other", PROMPT[1:])
    assert len(engine.offers) == 1 and engine.stats().offers_refused == 1


def test_an_offer_that_nobody_takes_in_time_is_dropped() -> None:
    engine = fake_engine(offers=OfferPolicy(hold_s=2.0))
    prefilled(engine)
    engine.offers._clock = lambda: 2.0
    assert engine.offers.take() is None
    assert engine.stats().offers_late == 1
    engine.memory.check_idle()


def test_a_request_takes_memory_from_waiting_offers_and_nobody_is_preempted() -> None:
    engine = fake_engine(num_blocks=12)
    prefilled(engine)
    prefilled(engine, "other", PROMPT[5:])
    assert engine.stats().blocks_held == 10
    engine.submit(GenerateRequest("r", PROMPT[::-1], GREEDY))
    events = run(engine)
    assert tokens_of(events, "r") == whole(fake_engine(), PROMPT[::-1])
    assert not of(events, Preempted)
    assert engine.stats().offers_taken_back >= 1


def test_a_running_request_grows_into_memory_of_waiting_offers() -> None:
    engine = fake_engine(num_blocks=12)
    engine.submit(GenerateRequest("r", PROMPT[:9], replace(GREEDY, max_tokens=60)))
    engine.step()
    prefilled(engine)
    events = run(engine)
    assert len(of(events, Finished)) == 1 and not of(events, Preempted)
    assert engine.stats().offers_taken_back == 1


def test_what_is_being_written_is_not_taken_back() -> None:
    engine = fake_engine(num_blocks=8)
    prefilled(engine)
    offer = taken(engine)
    before = [bytes(engine.pool.block_extent("entry", block.block)) for block in offer.blocks]
    engine.submit(GenerateRequest("r", PROMPT[::-1], GREEDY))
    run(engine)
    assert engine.stats().waiting == 1, "it waits for the writer"
    assert [bytes(engine.pool.block_extent("entry", block.block)) for block in offer.blocks] == before
    engine.offers.drop(offer.offer_id)
    assert tokens_of(run(engine), "r") == whole(fake_engine(), PROMPT[::-1])


def test_blocks_of_a_failed_request_are_offered_to_nobody() -> None:
    engine = fake_engine(offers=OfferPolicy(anchor_share=1.0, least_every_blocks=2))
    engine.submit(GenerateRequest("r", (*PROMPT[:20], NAN_TOKEN), GREEDY, offer_as="label"))
    assert of(run(engine), Failed)
    assert engine.offers.take() is None
    engine.memory.check_idle()
