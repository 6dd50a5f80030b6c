"""What each policy for window state costs at a full hit, on the nano model: bytes, tokens, first token, and error.

First tokens come from real workers and, unless said otherwise, from records that the kvstore held in DRAM: look up,
read, verify, compute the rest, push everything to decode. Logits are held against a cold run's along the answers to
questions about long texts, which is what the model was trained for.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.table import Row
from bench.window_workers import First, open_workers
from engine.batch import RaggedBatch, Replay
from engine.cache.pool import CachePool
from engine.families import Family, open_family
from engine.layout import Layout
from engine.windows import policy_of
from kernels import choose
from models.nano.config import HERE
from models.nano.data import recall
from models.nano.data.render import Renderer, Sample
from models.nano.tokenizer import load

POLICIES = ("exact", "replay", "recompute")
HIT_BAR = 0.05  # of a cold run's time to the first token, with exact anchors
SAME = 1e-4  # of a logit: what other orders of the same sums may differ by
QUESTIONS = 8
SHORTEST, LONGEST = 9 * 128, 8000  # of a prompt: more than recompute takes, and an answer fits the context
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Timed:
    """First tokens of one policy: cold, from the kvstore, from prefill's own cache; and bytes stored for one prompt."""

    cold: list[First]
    fetched: list[First]
    own: list[First]
    stored_bytes: int


def window_rows(tokens: int, repeat: int, threads: int, seed: int) -> Iterator[Row]:
    """The table. `tokens` of a prompt, `repeat` runs of each kind."""
    torch.set_num_threads(threads)
    family = open_family(HERE, torch.float32, False, choose("auto"))
    layout, prompts = family.layout, [text(tokens, seed + number) for number in range(repeat + 2)]
    yield Row("bytes of a block's entries", layout.block_bytes, "B")
    for policy in POLICIES:
        yield from _cost_rows(policy, asyncio.run(first_tokens(policy, threads, layout, prompts)), layout, tokens)
    cases = [Case(family, sample) for sample in questions(tokens, QUESTIONS, seed)]
    for policy in POLICIES:
        yield from _error_rows(policy, cases)


async def first_tokens(policy: str, threads: int, layout: Layout, prompts: Sequence[Sequence[int]]) -> Timed:
    """The first prompt is hit, the second warms up, every other one is a cold run that leaves the first nowhere else.

    Raises RuntimeError for a hit that was none, or whose first token is not the cold one's where that must be.
    """
    wanted, warm, *others = prompts
    timed = Timed([], [], [], 0)
    async with open_workers(HERE, policy, threads, layout, len(wanted)) as workers:
        await workers.first_token(warm)
        before = await workers.stored_bytes()
        timed.cold.append(await workers.first_token(wanted))
        timed = replace(timed, stored_bytes=await workers.stored_bytes() - before)
        for other in others:
            timed.cold.append(await workers.first_token(other))
            timed.fetched.append(await workers.first_token(wanted))
            timed.own.append(await workers.first_token(wanted))
        replayed = workers.layout.replay.tokens
    full = (len(wanted) - 1) // layout.block_tokens * layout.block_tokens - replayed
    for hit in (*timed.fetched, *timed.own):
        if hit.cached_tokens != full:
            raise RuntimeError(f"{policy}: {hit.cached_tokens} tokens were cached, not {full}")
        if policy != "replay" and hit.token != timed.cold[0].token:
            raise RuntimeError(f"{policy}: a hit's first token is {hit.token}, the cold run's {timed.cold[0].token}")
    return timed


def _cost_rows(policy: str, timed: Timed, layout: Layout, tokens: int) -> Iterator[Row]:
    blocks = (tokens - 1) // layout.block_tokens
    stored = blocks * layout.block_tokens
    anchors = timed.stored_bytes - (tokens // layout.block_tokens) * layout.block_bytes
    cold, fetched, own = (
        statistics.median(first.seconds for first in firsts) for firsts in (timed.cold, timed.fetched, timed.own)
    )
    rest = tokens - stored
    yield Row(f"{policy}: anchor bytes per stored token", anchors / stored, "B")
    yield Row(f"{policy}: anchor bytes per block", anchors / blocks, "B")
    yield Row(f"{policy}: tokens recomputed at a full hit of {stored}", timed.fetched[0].computed_tokens - rest)
    yield Row(f"{policy}: first token, cold", cold * 1e3, "ms")
    yield Row(f"{policy}: first token, full hit in the kvstore's DRAM", fetched * 1e3, "ms")
    yield Row(f"{policy}: the same / cold", fetched / cold, "x", HIT_BAR if policy == "exact" else None)
    yield Row(f"{policy}: full hit in prefill's own cache / cold", own / cold, "x")


class Case:
    """One question, computed cold; its entries stay, and the window at the end of the block before the answer."""

    def __init__(self, family: Family, sample: Sample) -> None:
        self._family, self._tokens, layout = family, sample.ids[:-1], family.layout
        self._answer = slice(sample.prompt_length - 1, None)  # rows that choose the tokens of the answer
        self._hit = (sample.prompt_length - 1) // layout.block_tokens * layout.block_tokens
        self._pool = CachePool(layout, layout.blocks_for(len(self._tokens)), 3, torch.float32)
        _run(family, self._pool, self._tokens[: self._hit], 0, 0)
        self._pool.copy_slot(0, 1)
        self.cold = self._rows(_run(family, self._pool, self._tokens, self._hit, 0), self._hit)

    def after(self, policy: str) -> torch.Tensor:
        """Logits along the answer, after a hit."""
        replay = policy_of(self._family.layout, policy)
        self._pool.copy_slot(1, 2)
        if not replay.tokens:
            return self._rows(_run(self._family, self._pool, self._tokens, self._hit, 2), self._hit)
        self._pool.slots[2].fill_(0xFF)  # NaN: what is not recomputed must not be read
        start = replay.start(self._hit)
        return self._rows(_run(self._family, self._pool, self._tokens, start, 2, self._hit, replay.tokens), start)

    def _rows(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        return logits[self._answer.start - start :]


def _error_rows(policy: str, cases: Sequence[Case]) -> Iterator[Row]:
    """Along the right answers."""
    cold, found = (torch.cat(rows) for rows in ([c.cold for c in cases], [c.after(policy) for c in cases]))
    old, new = cold.log_softmax(-1), found.log_softmax(-1)
    divergence = (old.exp() * (old - new)).sum(1)
    where = f"{policy}: {len(cold)} tokens of {len(cases)} answers"
    exact = policy != "replay"
    yield Row(f"{where}, largest move of a logit", float((cold - found).abs().max()), "", SAME if exact else None)
    yield Row(f"{where}, mean divergence", float(divergence.mean()), "nats")
    yield Row(f"{where}, same first choice", float((cold.argmax(1) == found.argmax(1)).float().mean() * 100), "%")


def _run(
    family: Family, pool: CachePool, tokens: Sequence[int], start: int, slot: int, hit: int = 0, replayed: int = 0
) -> torch.Tensor:
    """Logits of tokens[start:], a chunk at a time."""
    return torch.cat(
        [
            family.forward(_batch(family.layout, tokens[at : at + _CHUNK], at, slot, hit, replayed), pool)
            for at in range(start, len(tokens), _CHUNK)
        ]
    )


def _batch(layout: Layout, tokens: Sequence[int], at: int, slot: int, hit: int, replayed: int) -> RaggedBatch:
    batch = RaggedBatch(
        tokens=np.array(tokens, np.int64),
        positions=np.arange(at, at + len(tokens), dtype=np.int64),
        starts=np.array([0, len(tokens)], np.int32),
        context=np.array([at], np.int32),
        block_tables=(tuple(range(layout.blocks_for(at + len(tokens)))),),
        slots=np.array([slot], np.int64),
        logit_rows=np.arange(len(tokens), dtype=np.int64),
    )
    if not replayed:
        return batch
    none = np.full((1, 8), -1, np.int64)  # nano has no n-grams
    return replace(batch, replay=Replay(np.array([hit], np.int32), none, np.zeros(1, np.int32), replayed))


def text(tokens: int, seed: int) -> list[int]:
    """Seeded text of exactly so many tokens."""
    count = Renderer(load()).count
    sentences = recall.fill(random.Random(seed), 2 * tokens, count)
    ids: list[int] = load().encode(" ".join(sentences), add_special_tokens=False).ids
    return ids[:tokens]


def questions(tokens: int, number: int, seed: int) -> list[Sample]:
    """Seeded questions about texts that make prompts of at most `tokens` tokens, and not much less."""
    renderer, rng = Renderer(load()), random.Random(seed)
    found: list[Sample] = []
    while len(found) < number:
        sample = renderer.sample(recall.generate(rng, renderer.count, tokens))
        if 0.8 * tokens <= sample.prompt_length <= tokens:
            found.append(sample)
    return found
