"""Tenants at the client's door: what one cached, no other one finds, unless their operator let them share its start."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from fabric.retention import RetentionClass
from services.kvstore.policy.budget import Owner
from tests.support.tenantstack import tenant_stack

BLOCK = 128
SYSTEM = "".join(Random(1).choices("abcdefgh ", k=300))
SECRET = "".join(Random(2).choices("abcdefgh ", k=400))
QUESTION = "".join(Random(3).choices("abcdefgh ", k=200))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("fields", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
async def test_another_tenants_exact_prompt_is_cold(model: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    """B knows all of A's prompt and sends it: nothing in B's answer tells that A did so before."""
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        cold, again = [await stack.chat("a", SECRET, SYSTEM, **fields) for _ in range(2)]
        assert cold.cached_tokens == 0
        assert again.cached_tokens == (cold.usage["prompt_tokens"] - 1) // BLOCK * BLOCK > 0
        stolen = await stack.chat("b", SECRET, SYSTEM, **fields)
        assert stolen.cached_tokens == 0
        assert stolen.text == cold.text
        assert shape(stolen.usage) == shape(cold.usage), "no field that a cold answer has not"
        assert (await stack.chat("b", SECRET, SYSTEM, **fields)).cached_tokens == again.cached_tokens
        assert (await stack.chat("a", SECRET, SYSTEM, **fields)).cached_tokens == again.cached_tokens


async def test_a_store_finds_a_tenants_blocks_for_that_tenant_alone(model: Path, tmp_path: Path) -> None:
    """The workers' own caches are emptied, so that only the store could tell."""
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        await stack.chat("a", SECRET)
        assert len(stack.tier) > 0
        await stack.forget()
        assert (await stack.chat("b", SECRET)).cached_tokens == 0
        await stack.forget()
        assert (await stack.chat("a", SECRET)).cached_tokens > 0


async def test_a_prefetch_tells_a_tenant_of_its_own_blocks_alone(model: Path, tmp_path: Path) -> None:
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        await stack.chat("a", SECRET)
        assert (await stack.prefetched("b", SECRET))["held_tokens"] == 0
        assert (await stack.prefetched("a", SECRET))["held_tokens"] > 0


async def test_no_answer_shows_what_keys_and_owners_are_made_of(model: Path, tmp_path: Path) -> None:
    async with tenant_stack(model, tmp_path, ("a",)) as stack:
        told = await stack.chat("a", SECRET)
        tenant = stack.servicers["gateway"]._front.tenants.identify("Bearer key-a")
        for hidden in (tenant.salt, tenant.owner):
            assert hidden not in told.raw and hidden.hex().encode() not in told.raw
            assert hidden.hex() not in json.dumps(told.headers)


async def test_a_shared_region_hits_for_those_who_share_it_and_ends_where_it_ends(model: Path, tmp_path: Path) -> None:
    desk = {"name": "desk", "tenants": ["a", "b"], "system": SYSTEM}
    async with tenant_stack(model, tmp_path, ("a", "b", "c"), [desk]) as stack:
        cold = await stack.chat("a", SECRET, SYSTEM)
        assert cold.cached_tokens == 0
        inside = (cold.usage["prompt_tokens"] - len(SECRET)) // BLOCK * BLOCK  # a byte is a token here
        assert inside >= len(SYSTEM) // BLOCK * BLOCK
        shared = await stack.chat("b", SECRET, SYSTEM)
        assert shared.cached_tokens == inside, "the system message, not the question although it is the same"
        assert shared.text == cold.text
        assert (await stack.chat("b", QUESTION, SYSTEM)).cached_tokens == inside
        assert (await stack.chat("c", SECRET, SYSTEM)).cached_tokens == 0, "not asked to take part"
        assert (await stack.chat("a", SECRET, SYSTEM)).cached_tokens > inside


async def test_a_region_of_text_or_tokens_is_shared_over_grpc(model: Path, tmp_path: Path) -> None:
    tokens = [3 + 7 * index % 250 for index in range(300)]
    desk = {"name": "desk", "tenants": ["a", "b"], "token_ids": tokens[:256]}
    async with tenant_stack(model, tmp_path, ("a", "b"), [desk]) as stack:
        first, usage = await stack.generate("a", tokens, GREEDY)
        assert usage.cached_tokens == 0
        second, usage = await stack.generate("b", tokens, GREEDY)
        assert (second, usage.cached_tokens) == (first, 256)


async def test_without_regions_nothing_is_shared_however_often_it_is_said(model: Path, tmp_path: Path) -> None:
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        for _ in range(2):
            await stack.chat("a", QUESTION, SYSTEM)
        assert (await stack.chat("b", SECRET, SYSTEM)).cached_tokens == 0


async def test_classes_and_owners_reach_the_stores_budgets(model: Path, tmp_path: Path) -> None:
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        await stack.chat("a", SECRET)
        await stack.chat("b", QUESTION, retention="agent")
        await stack.generate("b", [5] * 200, GREEDY)
        identify = stack.servicers["gateway"]._front.tenants.identify
        a, b = (identify(f"Bearer key-{name}").owner.hex() for name in "ab")
        budgets = stack.tier._budgets
        kept = {owner: budgets.of(owner) for owner in budgets._promised}
        assert set(kept) == {
            Owner(a, RetentionClass.CHAT),
            Owner(b, RetentionClass.AGENT),
            Owner(b, RetentionClass.DEFAULT),
        }
        assert min(kept.values()) > 0 and sum(kept.values()) == stack.tier.promised


async def test_usage_counts_cached_tokens_once_whatever_fails(model: Path, tmp_path: Path) -> None:
    """Prompts that share starts, half of them disturbed: cached tokens are the whole blocks that were there before."""
    random, seen = Random(7), set[tuple[int, ...]]()
    specs = [
        "decode.token=error@2",
        "decode.verified=error:data_loss@1",
        "prefill.pushed=error@1",
        "prefill.chunk=error@2",
    ]
    starts = [[3 + random.randrange(250) for _ in range(400)] for _ in range(2)]
    async with tenant_stack(model, tmp_path, ("a",)) as stack:
        for number in range(12):
            tokens = random.choice(starts)[: random.randrange(130, 400)] + [
                3 + random.randrange(250) for _ in range(40)
            ]
            before = [
                blocks for blocks in range(1, (len(tokens) - 1) // BLOCK + 1) if tuple(tokens[: blocks * BLOCK]) in seen
            ]
            with failpoints.armed(specs[number % 4] if number % 2 else ""):
                answer, usage = await stack.generate("a", tokens, GREEDY)
            assert len(answer) == usage.completion_tokens == GREEDY.max_tokens
            assert usage.prompt_tokens == len(tokens)
            assert usage.cached_tokens == BLOCK * max(before, default=0), specs[number % 4]
            seen |= {tuple(tokens[: blocks * BLOCK]) for blocks in range(1, len(tokens) // BLOCK + 1)}


def shape(usage: dict[str, object]) -> object:
    """Names of all fields, however deep."""
    return {name: shape(value) if isinstance(value, dict) else None for name, value in usage.items()}
