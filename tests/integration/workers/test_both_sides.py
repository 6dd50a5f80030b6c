"""Decode stores what it seals: the next turn hits the answer too, at workers that have never seen this conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from tests.support.oracle import Oracle
from tests.support.stack import Answer, Stack, worker_stack

PROMPT = [3 + index % 400 for index in range(200)]
FOLLOWS = [5 + (7 * index) % 390 for index in range(60)]
TURN = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
BLOCK = 128


def metric(stack: Stack, role: str, name: str, **labels: str) -> float:
    registry = stack.running[role].servicer.core.metrics.registry
    return registry.get_sample_value(f"deepinfer_{role}_{name}", labels) or 0.0


async def turn(stack: Stack, oracle: Oracle, tokens: list[int]) -> Answer:
    """One request whose answer must be the oracle's, until everything of it is stored."""
    answer = await stack.ask(tokens, TURN)
    assert answer.tokens == oracle.answer(tokens, TURN)
    await stack.idle()
    return answer


def cached(answer: Answer) -> int:
    assert answer.done is not None
    return int(answer.done.usage.cached_tokens)


@pytest.mark.parametrize("transport", ["inproc://", "tcp://127.0.0.1:0", "ucx://"])
async def test_a_second_turn_hits_the_first_ones_answer_at_other_workers(
    model: Path, oracle: Oracle, transport: str
) -> None:
    async with worker_stack(model, transport=transport) as stack:
        first = await turn(stack, oracle, PROMPT)
        assert metric(stack, "decode", "store_records_total", result="stored") == 3  # blocks 1 and 2, and an anchor
        for role in ("prefill", "decode"):
            await stack.restart(role)
        spoken = [*PROMPT, *first.tokens]
        second = await turn(stack, oracle, [*spoken, *FOLLOWS])
        assert cached(second) == (len(spoken) - 1) // BLOCK * BLOCK == 384
        for role in ("prefill", "decode"):
            await stack.restart(role)
        spoken = [*spoken, *FOLLOWS, *second.tokens]
        third = await turn(stack, oracle, [*spoken, *FOLLOWS])
        assert cached(third) == (len(spoken) - 1) // BLOCK * BLOCK == 640


async def test_without_decodes_blocks_the_second_turn_hits_the_prompt_alone(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model, decode={"kvstore": False}) as stack:
        first = await turn(stack, oracle, PROMPT)
        await stack.restart("prefill")
        second = await turn(stack, oracle, [*PROMPT, *first.tokens, *FOLLOWS])
        assert cached(second) == 128
        assert metric(stack, "decode", "store_offers_total", result="absent") == 2


async def test_a_second_turn_needs_no_handoff_of_what_decode_sealed(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        first = await turn(stack, oracle, PROMPT)
        second = await turn(stack, oracle, [*PROMPT, *first.tokens, *FOLLOWS])
        assert second.ticket is not None and second.ticket.held_tokens == 384


async def test_what_decode_wrote_over_what_prefill_could_not_is_the_whole_prefix(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model, prefill={"kvstore": False}) as stack:
        first = await turn(stack, oracle, PROMPT)
        assert metric(stack, "decode", "store_records_total", result="stored") == 4
        tier = stack.running["kvstore"].servicer.store.tier
        assert len(tier) == 4
        del first


async def test_no_answer_is_stored_where_the_request_wants_no_cache(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await stack.ask(PROMPT, TURN, use_cache=False)
        await stack.idle()
        assert len(stack.running["kvstore"].servicer.store.tier) == 0


async def test_blocks_of_another_size_than_prefills_are_not_stored(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model, decode={"block_tokens": 256}) as stack:
        await turn(stack, oracle, PROMPT)
        assert metric(stack, "decode", "store_offers_total", result="stored") == 0
        assert metric(stack, "prefill", "store_offers_total", result="stored") == 1


async def test_more_than_a_store_has_landing_for_goes_in_several_visits(model: Path, oracle: Oracle) -> None:
    tokens = [3 + (3 * index) % 400 for index in range(1800)]
    async with worker_stack(model, store={"landing_mb": 1}) as stack:
        await turn(stack, oracle, tokens)
        await stack.restart("prefill")
        assert cached(await turn(stack, oracle, tokens)) == (len(tokens) - 1) // BLOCK * BLOCK


async def test_a_session_hits_what_it_shares_with_another_up_to_the_grid_of_anchors(
    model: Path, oracle: Oracle
) -> None:
    common = [3 + (3 * index) % 400 for index in range(1100)]
    few = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    async with worker_stack(model) as stack:
        stack.engine("prefill")._sealer._offer_every = 8  # the model's own grid is wider than its context
        await stack.ask([*common, *FOLLOWS], few)
        await stack.idle()
        await stack.restart("prefill")
        other = [*common, *reversed(FOLLOWS)]
        answer = await stack.ask(other, few)
        assert answer.tokens == oracle.answer(other, few)
        assert cached(answer) == 8 * BLOCK
