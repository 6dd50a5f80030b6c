"""Workers whose blocks have different sizes hand KV to each other: records are the same, paging is each side's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.families.mla import tiny
from engine.sampling.params import SamplingParams
from tests.support.oracle import Oracle
from tests.support.stack import worker_stack
from tests.support.tiny import random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = random_tokens(700, seed=5)


@pytest.mark.parametrize(("writes", "reads"), [(64, 128), (128, 64), (48, 80)])
async def test_blocks_of_another_size_are_cut_anew_and_answers_stay(
    model: Path, oracle: Oracle, writes: int, reads: int
) -> None:
    sides = {"prefill": {"block_tokens": writes}, "decode": {"block_tokens": reads, "window_mb": 0.1}}
    async with worker_stack(model, kvstore=False, **sides) as stack:
        assert [stack.engine(side).model.layout.block_tokens for side in ("prefill", "decode")] == [writes, reads]
        for length in (1, writes - 1, reads, reads + 1, 333, 700):
            prompt = PROMPT[:length]
            assert (await stack.ask(prompt, GREEDY)).tokens == oracle.answer(prompt, GREEDY)
        await stack.idle()


async def test_what_decode_holds_in_its_own_blocks_is_left_as_it_is(model: Path, oracle: Oracle) -> None:
    """48 tokens a block here, 128 there: the first block that prefill sends covers tokens that decode shares."""
    sides = {"prefill": {"block_tokens": 128}, "decode": {"block_tokens": 48}}
    other = [*PROMPT[:500], *PROMPT[100:150]]
    async with worker_stack(model, kvstore=False, **sides) as stack:
        await stack.ask(PROMPT[:600], GREEDY)
        ticket = await stack.reserve("r", other, len(other) + 6)
        assert ticket.held_tokens > 128 and ticket.held_tokens % 128 >= 48
        shared = list(stack.desk._holdings[ticket.id].reservation.blocks[: ticket.held_tokens // 48])
        pool = stack.engine("decode").pool
        before = pool.blocks[shared].clone()
        pool.blocks[shared] ^= 1  # whoever wrote the same bytes anew would undo this
        done = await stack.prefilled("r", other, GREEDY, ticket)
        assert (pool.blocks[shared] == before ^ 1).all()
        pool.blocks[shared] = before
        tokens = [
            token
            async for reply in stack.generate("r", other, GREEDY, ticket, done.receipt)
            for token in reply.token_ids
        ]
        assert tokens == oracle.answer(other, GREEDY)
        await stack.idle()


async def test_the_same_holds_for_a_model_without_windows(tmp_path: Path) -> None:
    tiny.write_tiny(tmp_path, tiny.TinySpec())
    sides = {"prefill": {"block_tokens": 32}, "decode": {"block_tokens": 100}}
    async with worker_stack(tmp_path, kvstore=False, **sides) as stack:
        for length in (33, 250):
            prompt = PROMPT[:length]
            assert (await stack.ask(prompt, GREEDY)).tokens == Oracle(tmp_path).answer(prompt, GREEDY)
        await stack.idle()
