"""Decode as one CUDA graph for each size of batch: static operands, one copy of the plan, one launch. Knows no ops.

The likeliest tokens are found within the graph, drawn ones by a second (engine/sampling/drawing.py). Where a step most
likely goes on with these tokens of the same sequences, the next one is queued before they are known here: the device
moves the plan on by itself. `run` takes what was queued if it is what is asked for, token by token, and computes anew
if it is not; what such a step then cached lies behind its sequences' ends, in blocks that were theirs when it was
queued, and whoever uses those next is queued behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.sampling.drawing import CapturedDraw, following
from engine.sampling.drawing import flat as asked_of
from engine.sampling.logits import Logits
from engine.sampling.sampler import Row
from kernels.operands import Ragged, Windows
from kernels.sampler import sampler_of
from kernels.staging import flat, remember, staged, views

_FILLERS = (("tokens", 0), ("positions", -1), ("context", 0), ("slots", -1))  # of rows that are nobody's


@runtime_checkable
class Decodes(Protocol):
    """What a family has besides whose decode step can be captured."""

    captures: bool  # whether its operators wait for nothing and allocate nothing of their own
    max_context_tokens: int

    def decodes(self, batch: RaggedBatch) -> bool:
        """Whether `decode` does for this batch of one row each what `forward` would."""

    def plan(self, batch: RaggedBatch, cache: CachePool) -> Ragged:
        """The batch as the operators read it. Raises ValueError if it does not fit the cache."""

    def decode(self, rows: Ragged, cache: CachePool) -> Tensor:
        """Logits fp32 [rows, vocabulary] of a batch of one row each.

        Only what is staged of `rows` is read, but for shapes. Rows whose position is negative touch nothing cached.
        """

    def likeliest(self, logits: Tensor) -> Tensor:
        """As kernels.likeliest.likeliest."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """One size: `host` is pinned memory that `plan` names piece by piece and `device` is copied from."""

    plan: Ragged
    host: Tensor
    device: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    best: Tensor
    found: Tensor  # pinned: `best` of the last run
    move_on: torch.cuda.CUDAGraph | None  # makes the plan the next step's; None where the device alone cannot know it
    draw: CapturedDraw | None  # None where nothing draws on the device


class DecodeGraphs:
    """Graphs for batches of up to `most` sequences, captured at once; what a run returns is valid until the next."""

    def __init__(self, family: Decodes, pool: CachePool, most: int) -> None:
        self._family, self._pool = family, pool
        self._width = min(pool.layout.blocks_for(family.max_context_tokens), pool.blocks.shape[0])
        self._memory = torch.cuda.graph_pool_handle()
        self._copied, self._found = torch.cuda.Event(), torch.cuda.Event()
        self._ahead: _Captured | None = None  # whose next step is queued, as its plan says
        self._asked: NDArray[np.int32] | None = None  # of drawn rows, what its draw takes
        self._sizes = {size: self._capture(size) for size in reversed(sizes_of(most))}  # the largest takes the memory

    def takes(self, batch: RaggedBatch) -> bool:
        """Whether the batch is one of decode alone that some graph has room for."""
        one_each = batch.images is None and batch.rows == batch.sequences == len(batch.logit_rows)
        return one_each and batch.rows <= max(self._sizes) and self._family.decodes(batch)

    def run(self, batch: RaggedBatch, asked: Sequence[Row], goes_on: bool = False) -> Logits:
        """The logits of a batch that `takes` admits, whose tokens are chosen as `asked`, one for each of its rows.

        Raises ValueError if it does not fit the cache. With `goes_on` only tokens may be asked of the logits, and the
        next step is queued where it has room.
        """
        rows = self._family.plan(batch, self._pool)
        captured = self._sizes[min(size for size in self._sizes if size >= batch.rows)]
        hot = any(row.drawn and row.plain for row in asked)
        draw = captured.draw if hot else None
        words = None if draw is None else asked_of(asked, len(captured.logits))
        if self._ahead is not captured or not holds(captured.plan, rows) or not _equal(words, self._asked):
            self._lay(rows, captured, draw, words)
            _replay(captured.graph, draw)
        self._ahead = self._asked = None
        captured.found.copy_(captured.best, non_blocking=True)
        self._found.record()
        chosen = draw is not None or not hot
        if goes_on and chosen and captured.move_on is not None and has_room(batch, self._pool.layout.block_tokens):
            captured.move_on.replay()
            _replay(captured.graph, draw)
            self._ahead, self._asked = captured, None if words is None else following(words, batch.rows)
        self._found.synchronize()
        if self._ahead is captured:
            move_on(captured.plan, captured.found[0].numpy())
        return Logits(captured.logits[: batch.rows], captured.found, draw is not None)

    def _lay(
        self, rows: Ragged, captured: _Captured, draw: CapturedDraw | None, words: NDArray[np.int32] | None
    ) -> None:
        """Queue the copies of what the next replay is to read."""
        self._copied.synchronize()  # of the run before, from the same memory
        lay(rows, captured.plan)
        captured.device.copy_(captured.host, non_blocking=True)
        if draw is not None and words is not None:
            draw.lay(words)
        self._copied.record()

    def replay_largest(self) -> None:
        """Queue the largest graph again with the operands of its last run: it computes and caches the same."""
        self._ahead = None
        self._sizes[max(self._sizes)].graph.replay()

    @torch.inference_mode()
    def replay_empty(self) -> None:
        """Queue every graph for a batch of nobody: nothing that is cached may change."""
        self._ahead = None
        for captured in self._sizes.values():
            for name, filler in _FILLERS:
                getattr(captured.plan, name)[:] = filler
            for windows in captured.plan.windows.values():
                windows.sequence[:] = -1
            captured.device.copy_(captured.host)
            captured.graph.replay()

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        shape = nobody(size, self._width, self._family.plan(_one(), self._pool).windows)
        host = torch.from_numpy(flat(shape)).pin_memory()
        device = host.to(self._pool.blocks.device)
        plan = mapped(host, shape)
        remember(plan, views(device, plan))
        self._family.likeliest(self._family.decode(plan, self._pool))  # compiles, and lets libraries allocate
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._family.decode(plan, self._pool)
            found = self._family.likeliest(logits)
        sample = sampler_of(device.device)
        draw = None if sample is None else CapturedDraw(sample, logits, found, self._memory)
        onward = None if plan.windows else self._capture_following(plan, found, draw)
        kept = torch.empty_like(found).cpu().pin_memory()
        return _Captured(plan, host, device, graph, logits, found, kept, onward, draw)

    def _capture_following(self, plan: Ragged, found: Tensor, draw: CapturedDraw | None) -> torch.cuda.CUDAGraph:
        on, graph = staged(plan, found.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            live = (on.positions >= 0).to(torch.int32)
            on.tokens.copy_(found[0] * live)
            on.positions.add_(live)
            on.context.add_(live)
            if draw is not None:
                draw.rows.draws.add_(1)
        return graph


def _replay(step: torch.cuda.CUDAGraph, draw: CapturedDraw | None) -> None:
    step.replay()
    if draw is not None:
        draw.replay()


def _equal(words: NDArray[np.int32] | None, others: NDArray[np.int32] | None) -> bool:
    """Whether both draw the same, or neither draws."""
    return words is others if words is None or others is None else np.array_equal(words, others)


def sizes_of(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(1 << bit for bit in range((most - 1).bit_length())), most]


def nobody(size: int, width: int, rates: dict[int, Windows]) -> Ragged:
    """A batch of `size` rows, each a sequence of `width` blocks at most, none of them live."""
    none, zeros = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    return Ragged(
        tokens=zeros,
        positions=none,
        sequences=np.arange(size, dtype=np.int32),
        starts=np.arange(size + 1, dtype=np.int32),
        context=zeros,
        slots=none,
        tables=np.zeros((size, width), np.int32),
        windows={rate: Windows(none, zeros) for rate in rates},
        floors=zeros,
    )


def lay(rows: Ragged, plan: Ragged) -> None:
    """Put `rows`, one a sequence, into the arrays of the larger `plan`, and nobody behind them."""
    count = rows.rows
    for name, filler in _FILLERS:
        _fill(getattr(plan, name), getattr(rows, name), filler)
    _fill(plan.floors, rows.window_floors, 0)
    plan.tables[:count, : rows.tables.shape[1]] = rows.tables
    for rate, windows in plan.windows.items():
        _fill(windows.sequence, rows.windows[rate].sequence, -1)
        _fill(windows.window, rows.windows[rate].window, 0)


def has_room(batch: RaggedBatch, block_tokens: int) -> bool:
    """Whether one more token of each sequence lies in a block it has."""
    return all(
        len(table) * block_tokens > context + 1
        for table, context in zip(batch.block_tables, batch.context.tolist(), strict=True)
    )


def move_on(plan: Ragged, tokens: np.ndarray) -> None:
    """Make `plan` the step that follows it with these tokens [rows of the plan]; nobody's rows stay as they are."""
    live = plan.positions >= 0
    plan.tokens[live] = tokens[live]
    for array in (plan.positions, plan.context):
        array[live] += 1


def holds(plan: Ragged, rows: Ragged) -> bool:
    """Whether `plan` is `rows`, one a sequence, and nobody behind them; of a family without windows."""
    count, width = rows.tables.shape
    return (
        not bool((plan.positions[count:] >= 0).any())
        and all(np.array_equal(getattr(plan, name)[:count], getattr(rows, name)) for name, _ in _FILLERS)
        and np.array_equal(plan.window_floors[:count], rows.window_floors)
        and np.array_equal(plan.tables[:count, :width], rows.tables)
    )


def _fill(target: np.ndarray, values: np.ndarray, filler: int) -> None:
    target[: len(values)], target[len(values) :] = values, filler


def mapped(host: Tensor, shape: Ragged) -> Ragged:
    """The batch of this shape whose arrays are the host's buffer."""
    found = views(host, shape)
    windows = {rate: Windows(first.numpy(), second.numpy()) for rate, (first, second) in found.windows.items()}
    names = ("tokens", "positions", "sequences", "starts", "context", "slots", "tables", "floors")
    return Ragged(**{name: getattr(found, name).numpy() for name in names}, windows=windows)


def _one() -> RaggedBatch:
    """The smallest batch: it is planned only, to learn which windows a family wants."""
    none = np.zeros(1, np.int64)
    return RaggedBatch(none, none, np.array([0, 1], np.int32), np.zeros(1, np.int32), ((0,),), none, none)
