"""Equal keys are not believed: a record that stands for other tokens or another history is a miss, never an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from services.kvstore.records import Record, RecordKind
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack

BLOCK = 128
TOKENS = [3 + index % 400 for index in range(700)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def other_tokens(record: Record) -> Record:
    return replace(record, tokens=bytes(len(record.tokens)))


def other_history(record: Record) -> Record:
    return replace(record, parent=bytes(reversed(record.id.key)))


def other_weights(record: Record) -> Record:
    return replace(record, identity=record.identity._replace(model_revision="another"))


async def hit(stack: Stack, oracle: Oracle) -> int:
    """Cached tokens of a prefill worker that has nothing of its own; the answer is the true one."""
    await stack.restart("prefill")
    await stack.restart("decode")
    answer = await stack.ask(TOKENS, GREEDY)
    assert answer.tokens == oracle.answer(TOKENS, GREEDY)
    await stack.idle()
    assert answer.done is not None
    return int(answer.done.usage.cached_tokens)


@pytest.mark.parametrize("forged", [other_tokens, other_history, other_weights])
@pytest.mark.parametrize("first", [0, 3])
async def test_a_forged_collision_is_a_miss_from_its_block_on(
    model: Path, oracle: Oracle, forged: Callable[[Record], Record], first: int
) -> None:
    async with worker_stack(model) as stack:
        await stack.ask(TOKENS, GREEDY)
        await stack.idle()
        records = stack.running["kvstore"].servicer.store.tier._records
        blocks = {id_.key: record for id_, record in records.items() if id_.kind is RecordKind.BLOCK}
        assert len(blocks) == len(TOKENS) // BLOCK
        at = ordered(blocks)[first]
        records[at.id] = forged(at)
        assert await hit(stack, oracle) <= first * BLOCK
        assert records[at.id] == forged(at), "what is there is not overwritten either"


async def test_without_a_forgery_the_same_request_hits(model: Path, oracle: Oracle) -> None:
    async with worker_stack(model) as stack:
        await stack.ask(TOKENS, GREEDY)
        await stack.idle()
        assert await hit(stack, oracle) == len(TOKENS) // BLOCK * BLOCK


def ordered(blocks: dict[bytes, Record]) -> list[Record]:
    """From the start of the prefix on."""
    children = {record.parent: record for record in blocks.values()}
    found, parent = list[Record](), bytes(32)
    while parent in children:
        found.append(children[parent])
        parent = children[parent].id.key
    return found
