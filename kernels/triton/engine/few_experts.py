"""Expert MLPs of few rows on a GPU: one launch chooses experts and opens them, one takes them out. Knows no batch.

In the first launch programs of the router come first, then those of experts that every row takes, whose weights are
asked for before the kernels ahead have ended, then those of chosen experts, which wait for the choice. Programs begin
in the order of their numbers, so nobody waits for one that cannot begin.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.operands import ExpertBank, GroupRouterSpec
from kernels.reference.linear import Dense
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.linear import FEW_ROWS, rounded
from kernels.triton.engine.routing import choice_of, choose_row

_ENTERING, _LEAVING = 1, 2  # outputs that one program has at a time
_PROGRAMS, _WARPS = 1056, 2  # that open experts, and of each: eight on each multiprocessor of an H200
_WORDS, _STAGES = 1024, 4  # of a line, that a program has at a time, and how often: met, or on their way
_counters = WeakTensorKeyDictionary()  # of a router's matrix: how many of its programs are done, for each row


def routed_rows(
    x: Tensor, router: GroupRouterSpec, bank: ExpertBank, norm: Tensor, eps: float, residual: Tensor
) -> Tensor:
    """The experts that `router` chooses for x normed with `norm`, and those that all rows take, plus `residual`."""
    rows, slots = len(x), router.topk + router.always
    chosen = torch.empty(rows, slots, dtype=torch.int32, device=x.device)
    return _run(x, chosen, x.new_empty(rows, slots), bank, norm, eps, residual, router)


def chosen_rows(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, norm: Tensor | None, eps: float,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """As reference.experts.experts of x normed with `norm`, plus `residual`, where they are given."""
    return _run(x, chosen, weights, bank, norm, eps, residual, None)


def _run(
    x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, norm: Tensor | None, eps: float,
    residual: Tensor | None, router: GroupRouterSpec | None,
) -> Tensor:  # fmt: skip
    (rows, hidden), slots, inner, rounds = x.shape, chosen.shape[1] + 1, bank.inner, bank.down.rounds
    known, routers = (1, 0) if router is None else (1 + router.always, router.experts)
    middle = torch.empty(rows, slots, inner, dtype=torch.bfloat16 if rounds else torch.float32, device=x.device)
    out, done = x.new_empty(rows, hidden), chosen if router is None else _counter(router.gate.matrix)
    gate, up = words_of(bank.gate), words_of(bank.up)
    logged = gate if router is None else words_of(router.gate)
    tile = min(triton.next_power_of_2(gate.shape[2]), _WORDS)
    turns = triton.cdiv(gate.shape[2], tile)
    lines = _ENTERING if turns == 1 else 1
    blocks = triton.cdiv(inner, lines)
    limited = math.isfinite(bank.limit)
    _entering[(routers + min(known * blocks, _PROGRAMS), rows)](
        x, x if norm is None else norm, gate, up, chosen, weights, done, middle,
        logged, x if router is None or router.bias is None else router.bias,
        x if router is None else x.new_empty(rows, router.experts), eps, bank.limit if limited else 0.0,
        0.0 if router is None else router.scaling, hidden, inner, ROUTERS=routers, SLOTS=slots,
        LANES=triton.next_power_of_2(slots), KNOWN=known, LAST=bank.experts, BLOCKS=blocks, LINES=lines, TILE=tile,
        TURNS=turns, NORM=norm is not None, LIMITED=limited, PAIRED=gate.dtype == torch.int32,
        ROUNDS=bank.gate.rounds, ROUTED=triton.cdiv(logged.shape[2], tile), NARROW=logged.dtype == torch.int32,
        STAGES=_STAGES if turns < 3 else 2, **choice_of(router), num_warps=_WARPS, **LAUNCH,
    )  # fmt: skip
    tile = min(triton.next_power_of_2(inner), 512)
    _leaving[(triton.cdiv(hidden, _LEAVING), rows)](
        middle, bank.down.matrix, chosen, weights, done, x if residual is None else residual, out, hidden, inner,
        SLOTS=slots, KNOWN=known, LANES=triton.next_power_of_2(slots), LAST=bank.experts, LINES=_LEAVING, TILE=tile,
        TURNS=triton.cdiv(inner, tile), ADD=residual is not None, COUNTED=router is not None, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def words_of(weight: Dense) -> Tensor:
    """The matrices as words of 32 bits: one fp32 weight each, or two bf16 weights."""
    return weight.matrix.view(torch.int32) if weight.matrix.dtype == torch.bfloat16 else weight.matrix


def _counter(matrix: Tensor) -> Tensor:
    """int32 [FEW_ROWS] of the router with this matrix: 0 between two layers."""
    if matrix not in _counters:
        _counters[matrix] = torch.zeros(FEW_ROWS, dtype=torch.int32, device=matrix.device)
    found: Tensor = _counters[matrix]
    return found


@triton.jit
def _entering(
    x, norm, gate, up, chosen, weights, done, middle, matrix, bias, logits, eps, limit, scaling, hidden, inner,
    ROUTERS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, KNOWN: tl.constexpr, LAST: tl.constexpr,
    BLOCKS: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr, NORM: tl.constexpr,
    LIMITED: tl.constexpr, PAIRED: tl.constexpr, ROUNDS: tl.constexpr, ROUTED: tl.constexpr, NARROW: tl.constexpr,
    STAGES: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, ALWAYS: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr, SIZED: tl.constexpr,
    CHOICES: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One logit of one row, by whose last program its experts are chosen; or item after item, each silu(gate x) * up x
    for LINES channels of the expert in one slot of one row, the weights of the next on their way."""
    row, program = tl.program_id(1).to(tl.int64), tl.program_id(0)
    source, words = x + row * hidden, hidden // (2 if PAIRED else 1)
    follow()
    if program < ROUTERS:
        _logit(
            source, norm, matrix, logits + row * EXPERTS, eps, hidden, program, TILE, ROUTED, NORM, NARROW, NARROW
        )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(done + row, 1, sem="acq_rel") == ROUTERS - 1:
            choose_row(
                logits, bias, chosen, weights, row, scaling, EXPERTS, TOPK, ALWAYS, GROUPS, KEPT, BEST, SIZE, GROUPED,
                SIZED, CHOICES, BIASED, SIGMOID, NORMALIZE,
            )  # fmt: skip
            tl.debug_barrier()
            tl.atomic_add(done + row, 1, sem="release")
    else:
        item, step, lane = program - ROUTERS, tl.num_programs(0) - ROUTERS, tl.arange(0, LANES)
        known = lane + (LAST + 1 - SLOTS)
        first, second = _weights(
            gate, up, item, known, lane, 0, inner, words, SLOTS - KNOWN, KNOWN, LINES, TILE
        )  # fmt: skip
        chain()
        scale = unit(source, eps, hidden, TILE, TURNS, NORM, PAIRED)
        even, odd = pair(source, norm, scale, 0, hidden, TILE, NORM, PAIRED, ROUNDS)
        middles = middle + row * SLOTS * inner
        _open(
            gate, up, source, norm, scale, first, second, even, odd, item, known, lane, hidden, inner, words, middles,
            limit, SLOTS - KNOWN, KNOWN, LINES, TILE, TURNS, NORM, LIMITED, PAIRED, ROUNDS,
        )  # fmt: skip
        for now in tl.range(item + step, KNOWN * BLOCKS, step, num_stages=STAGES):
            first, second = _weights(
                gate, up, now, known, lane, 0, inner, words, SLOTS - KNOWN, KNOWN, LINES, TILE
            )  # fmt: skip
            _open(
                gate, up, source, norm, scale, first, second, even, odd, now, known, lane, hidden, inner, words,
                middles, limit, SLOTS - KNOWN, KNOWN, LINES, TILE, TURNS, NORM, LIMITED, PAIRED, ROUNDS,
            )  # fmt: skip
        if SLOTS > KNOWN:
            if ROUTERS > 0:
                while tl.atomic_add(done + row, 0, sem="acquire") <= ROUTERS:
                    pass
            named = chosen + row * (SLOTS - 1) + lane
            experts = tl.load(named, mask=lane < SLOTS - 1, other=LAST, cache_modifier=".cg")
            item += tl.cdiv(KNOWN * BLOCKS - item, step) * step - KNOWN * BLOCKS
            for now in tl.range(item, (SLOTS - KNOWN) * BLOCKS, step, num_stages=STAGES):
                first, second = _weights(
                    gate, up, now, experts, lane, 0, inner, words, 0, SLOTS - KNOWN, LINES, TILE
                )  # fmt: skip
                _open(
                    gate, up, source, norm, scale, first, second, even, odd, now, experts, lane, hidden, inner, words,
                    middles, limit, 0, SLOTS - KNOWN, LINES, TILE, TURNS, NORM, LIMITED, PAIRED, ROUNDS,
                )  # fmt: skip


@triton.jit
def _weights(
    gate, up, item, experts, lane, turn, inner, words, FIRST: tl.constexpr, COUNT: tl.constexpr, LINES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A tile of either matrix of an item's expert, which is that of one of COUNT slots from FIRST on: neighbours are at
    different experts, and do not all come to a new one, whose addresses nobody has met, at the same time."""
    line, place = item // COUNT * LINES + tl.arange(0, LINES), turn * TILE + tl.arange(0, TILE)
    expert = tl.sum(tl.where(lane == FIRST + item % COUNT, experts, 0), 0).to(tl.int64)
    begin = (expert * inner + line[:, None]) * words + place[None, :]
    inside = (line < inner)[:, None] & (place < words)[None, :]
    return tl.load(gate + begin, mask=inside, other=0), tl.load(up + begin, mask=inside, other=0)


@triton.jit
def _open(
    gate, up, source, norm, scale, first, second, even, odd, item, experts, lane, hidden, inner, words, middles, limit,
    FIRST: tl.constexpr, COUNT: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
    NORM: tl.constexpr, LIMITED: tl.constexpr, PAIRED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """An item's channels, whose first tiles and what they meet are given."""
    opened, raised = product(first, even, odd, PAIRED), product(second, even, odd, PAIRED)
    for turn in tl.static_range(1, TURNS):
        first, second = _weights(gate, up, item, experts, lane, turn, inner, words, FIRST, COUNT, LINES, TILE)
        even, odd = pair(source, norm, scale, turn * TILE, hidden, TILE, NORM, PAIRED, ROUNDS)
        opened += product(first, even, odd, PAIRED)
        raised += product(second, even, odd, PAIRED)
    result = gated(tl.sum(opened, 1), tl.sum(raised, 1), limit, LIMITED)
    line = item // COUNT * LINES + tl.arange(0, LINES)
    target = middles + (FIRST + item % COUNT) * inner + line
    tl.store(target, result.to(middles.dtype.element_ty), mask=line < inner)


@triton.jit
def _logit(
    source, norm, matrix, logits, eps, hidden, expert, TILE: tl.constexpr, TURNS: tl.constexpr, NORM: tl.constexpr,
    PAIRED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    at, words = tl.arange(0, TILE), hidden // (2 if PAIRED else 1)
    begin = matrix + expert.to(tl.int64) * words
    weight = tl.load(begin + at, mask=at < words, other=0)
    chain()
    scale, total = unit(source, eps, hidden, TILE, TURNS, NORM, PAIRED), tl.zeros((TILE,), tl.float32)
    for turn in tl.static_range(TURNS):
        if turn > 0:
            weight = tl.load(begin + turn * TILE + at, mask=turn * TILE + at < words, other=0)
        even, odd = pair(source, norm, scale, turn * TILE, hidden, TILE, NORM, PAIRED, ROUNDS)
        if PAIRED:
            total += _low(weight) * even + _high(weight) * odd
        else:
            total += weight * even
    tl.store(logits + expert, tl.sum(total, 0))


@triton.jit
def unit(
    source, eps, width, TILE: tl.constexpr, TURNS: tl.constexpr, NORM: tl.constexpr, PAIRED: tl.constexpr
):  # fmt: skip
    """What a row is multiplied with so that its root mean square is 1; 1 where it is not normed."""
    scale = 1.0
    if NORM:
        squares = tl.zeros((TILE,), tl.float32)
        for turn in tl.static_range(TURNS * (2 if PAIRED else 1)):
            at = turn * TILE + tl.arange(0, TILE)
            value = tl.load(source + at, mask=at < width, other=0.0)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    return scale


@triton.jit
def pair(
    source, norm, scale, first, width, TILE: tl.constexpr, NORM: tl.constexpr, PAIRED: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Channels of a row as TILE words of weights from `first` on meet them: even and odd ones apart where a word holds
    two weights, else each twice."""
    at = first + tl.arange(0, TILE)
    if PAIRED:
        even = _channel(source, norm, scale, 2 * at, width, NORM, ROUNDS)
        odd = _channel(source, norm, scale, 2 * at + 1, width, NORM, ROUNDS)
    else:
        even = _channel(source, norm, scale, at, width, NORM, ROUNDS)
        odd = even
    return even, odd


@triton.jit
def _channel(source, norm, scale, at, width, NORM: tl.constexpr, ROUNDS: tl.constexpr):
    value = tl.load(source + at, mask=at < width, other=0.0)
    if NORM:
        value *= scale * tl.load(norm + at, mask=at < width, other=0.0)
    return rounded(value, ROUNDS)


@triton.jit
def product(weight, even, odd, PAIRED: tl.constexpr):
    """Words of weights [lines, TILE] times the channels they meet."""
    if PAIRED:
        result = _low(weight) * even[None, :]
        result += _high(weight) * odd[None, :]
    else:
        result = weight * even[None, :]
    return result


@triton.jit
def _low(word):
    """The first of two bf16 weights."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def gated(opened, raised, limit, LIMITED: tl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    if LIMITED:
        opened, raised = tl.minimum(opened, limit), tl.minimum(tl.maximum(raised, -limit), limit)
    return opened / (1 + tl.exp(-opened)) * raised


@triton.jit
def _leaving(
    middle, down, chosen, weights, done, residual, out, hidden, inner, SLOTS: tl.constexpr, KNOWN: tl.constexpr,
    LANES: tl.constexpr, LAST: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
    ADD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """LINES outputs of one row: the weighted sum over its slots, beginning with the last, whose expert is known."""
    row = tl.program_id(1).to(tl.int64)
    line, at = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.arange(0, TILE)
    slot, total = tl.arange(0, LANES), tl.zeros((LINES, TILE), tl.float32)
    begin = (LAST * hidden + line[:, None]).to(tl.int64) * inner + at[None, :]
    follow()
    ahead = tl.load(down + begin, mask=(line < hidden)[:, None] & (at < inner)[None, :], other=0.0)
    chain()
    target, before = row * hidden + line, tl.zeros((LINES,), tl.float32)
    if ADD:
        before = tl.load(residual + target, mask=line < hidden, other=0.0)
    experts = tl.load(chosen + row * (SLOTS - 1) + slot, mask=slot < SLOTS - 1, other=LAST)
    shares = tl.load(weights + row * (SLOTS - 1) + slot, mask=slot < SLOTS - 1, other=1.0)
    if COUNTED:
        tl.store(done + row, 0, mask=tl.program_id(0) == 0)
    for back in tl.static_range(SLOTS):
        one = SLOTS - 1 - back
        weight = tl.sum(tl.where(slot == one, shares, 0.0), 0)
        expert = tl.sum(tl.where(slot == one, experts, 0), 0)
        if back < KNOWN:
            expert = tl.full((), LAST - back, tl.int32)
        begin = expert.to(tl.int64) * hidden * inner + line[:, None].to(tl.int64) * inner
        for turn in tl.static_range(TURNS):
            place = turn * TILE + at
            inside = (line < hidden)[:, None] & (place < inner)[None, :]
            if back == 0 and turn == 0:
                matrix = ahead
            else:
                matrix = tl.load(down + begin + place[None, :], mask=inside, other=0.0)
            # As a tile like the matrix: a vector would be laid out anew behind two barriers, with no load beyond them.
            source = middle + (row * SLOTS + one) * inner + place[None, :] + tl.zeros_like(line)[:, None]
            value = tl.load(source, mask=inside, other=0.0)
            total += matrix.to(tl.float32) * (value.to(tl.float32) * weight)
    tl.store(out + target, tl.sum(total, 1) + before, mask=line < hidden)
