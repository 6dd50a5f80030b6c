"""Latent attention on a GPU: rows that are cached, queries over the paged latents split over keys, and their mixture.

A row with a negative position belongs to nobody: nothing of it is cached and its mixture is 0. Cached rows are numbers
of one type, or published records.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.linear import Dense
from kernels.staging import staged
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.latent_records import RECORD, get_latents, put_latent
from kernels.triton.engine.linear import rounded

_PROGRAMS = 264  # two for each multiprocessor of an H200
_HEADS = 16  # that one program takes
_LEFT, _LEAVE_WARPS = 128, 4  # of a program that joins parts, channels of the latent
_TILE_KEYS, _WARPS = 32, 8  # of a program, keys that it holds at a time
_LEAST_KEYS = 32  # that one program takes: fewer are not worth their partial result


def store_latent(projected: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_latent."""
    on = staged(ragged, projected.device)
    _store_latent[(len(projected),)](
        projected, projected.stride(0), spec.norm, on.positions, on.sequences, on.tables, on.tables.stride(0),
        pages.storage, pages.storage.stride(0), pages.offset, rope.cos, rope.sin, spec.norm_eps, COLUMN=spec.column,
        ENTRIES=pages.entries, RANK=spec.rank, PAIRS=spec.rope // 2, WIDE=triton.next_power_of_2(spec.rank),
        PAIRED=triton.next_power_of_2(spec.rope // 2), num_warps=4, **LAUNCH,
    )  # fmt: skip


def absorb(queries: Tensor, projected: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> Tensor:
    """`store_latent` of `projected`, and queries [rows, >= heads * (nope + rope)] -> [rows, heads, rank + rope]: in the
    latents' space, and rotated, in the cache's type; bf16 over records."""
    rows, on = len(queries), staged(ragged, queries.device)
    out = torch.empty(rows, spec.heads, spec.rank + spec.rope, dtype=_mixed_type(pages), device=queries.device)
    tile = min(triton.next_power_of_2(spec.rank), 128)
    _absorb[(triton.cdiv(spec.rank, tile), spec.heads + 1, rows)](
        queries, queries.stride(0), spec.absorb.matrix, projected, projected.stride(0), spec.norm, on.positions,
        on.sequences, on.tables, on.tables.stride(0), pages.storage, pages.storage.stride(0), pages.offset, rope.cos,
        rope.sin, spec.norm_eps, out, HEADS=spec.heads, NOPE=spec.nope, RANK=spec.rank, PAIRS=spec.rope // 2,
        COLUMN=spec.column, ENTRIES=pages.entries, TILE=tile, STILL=triton.next_power_of_2(spec.nope),
        WIDE=triton.next_power_of_2(spec.rank), PAIRED=triton.next_power_of_2(spec.rope // 2),
        ROUNDS=spec.absorb.rounds, RECORDS=pages.are_records, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def _mixed_type(pages: Pages) -> torch.dtype:
    return torch.bfloat16 if pages.are_records else pages.storage.dtype


def rotated(absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, rope: RopeTable) -> Tensor:
    """[rows, heads, rank + rope] of absorbed [rows, heads * rank] and turning [rows, heads * rope]."""
    rows = len(absorbed)
    out = absorbed.new_empty(rows, spec.heads, spec.rank + spec.rope)
    out[..., : spec.rank] = absorbed.view(rows, spec.heads, spec.rank)
    _rotate[(rows, spec.heads)](
        turning, turning.stride(0), staged(ragged, turning.device).positions, rope.cos, rope.sin, out,
        HEADS=spec.heads, RANK=spec.rank, PAIRS=spec.rope // 2, PAIRED=triton.next_power_of_2(spec.rope // 2),
        num_warps=1, **LAUNCH,
    )  # fmt: skip
    return out


def splits_of(rows: int, heads: int, keys: int, least: int = 64) -> int:
    """Programs that share one row's keys, `keys` at most, and take at least so many each."""
    wanted = max(1, _PROGRAMS // (rows * triton.cdiv(heads, _HEADS)))
    return max(1, min(wanted, triton.cdiv(keys, least)))


def attend(
    query: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None, parts: int = 0
) -> tuple[Tensor, Tensor]:
    """query [rows, heads, rank + rope] over the cached rows -> a mixture for each part of a row's keys, in the cache's
    type [rows, heads, parts, rank], and how much it weighs, the logarithm to base 2, fp32 [rows, heads, parts]."""
    rows, on = len(query), staged(ragged, query.device)
    keys = on.tables.shape[1] * pages.entries if selection is None else selection.entries.shape[1]
    parts = parts or splits_of(rows, spec.heads, keys, _LEAST_KEYS)
    narrow = _mixed_type(pages) == torch.bfloat16
    mixed = torch.empty(rows, spec.heads, parts, spec.rank, dtype=_mixed_type(pages), device=query.device)
    weights = torch.empty(rows, spec.heads, parts, device=query.device)
    chosen = on.positions if selection is None else selection.entries
    _attend[(rows, parts, triton.cdiv(spec.heads, _HEADS))](
        query, on.positions, on.context, on.sequences, on.tables, on.tables.stride(0), pages.storage,
        pages.storage.stride(0), pages.offset, chosen, on.positions if selection is None else selection.counts,
        chosen.stride(0), mixed, weights, spec.scale * 1.4426950408889634, HEADS=spec.heads, RANK=spec.rank,
        TURNED=spec.rope, ENTRIES=pages.entries, BLOCK=_HEADS, KEYS=_TILE_KEYS if narrow else 16,
        WIDE=triton.next_power_of_2(spec.rank), ROPED=max(16, triton.next_power_of_2(spec.rope)),
        SELECTED=selection is not None, NARROW=narrow, RECORDS=pages.are_records, num_warps=_WARPS,
        num_stages=2, **LAUNCH,
    )  # fmt: skip
    return mixed, weights


def mix(mixed: Tensor, weights: Tensor) -> Tensor:
    """The whole mixture fp32 [rows, heads * rank] of its parts."""
    rows, heads, parts, rank = mixed.shape
    out = weights.new_empty(rows, heads * rank)
    _mix[(rows, heads)](
        mixed, weights, out, HEADS=heads, PARTS=parts, RANK=rank, WIDE=triton.next_power_of_2(rank), num_warps=4,
        **LAUNCH,
    )  # fmt: skip
    return out


def leave(mixed: Tensor, weights: Tensor, output: Dense) -> Tensor:
    """The whole mixture taken to the heads' values: fp32 [rows, cuts, heads * value], what each cut of the latent adds
    to them."""
    (rows, heads, parts, rank), value = mixed.shape, output.matrix.shape[1]
    wide = min(triton.next_power_of_2(rank), _LEFT)
    out = weights.new_empty(rows, triton.cdiv(rank, wide), heads * value)
    _leave[(out.shape[1], heads, rows)](
        mixed, weights, output.matrix, out, HEADS=heads, PARTS=parts, RANK=rank, VALUE=value,
        TILE=triton.next_power_of_2(value), WIDE=wide, ROUNDS=output.rounds, num_warps=_LEAVE_WARPS, **LAUNCH,
    )  # fmt: skip
    return out


def attend_latent(
    absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None,
    rope: RopeTable,
) -> Tensor:  # fmt: skip
    """As reference.mla.attend_latent."""
    return mix(*attend(rotated(absorbed, turning, spec, ragged, rope), spec, ragged, pages, selection))


def read_rows(s: int, ragged: Ragged, pages: Pages, count: int) -> Tensor:
    """As reference.mla.read_rows."""
    blocks = staged(ragged, pages.storage.device).tables[s, : triton.cdiv(count, pages.entries)]
    held = pages.storage[:, pages.offset : pages.offset + pages.entries * pages.width]
    return held.unflatten(1, (pages.entries, pages.width))[blocks].flatten(0, 1)[:count].to(torch.float32)


@triton.jit
def _store_latent(
    projected, stride, norm, positions, sequences, tables, table_stride, storage, page_stride, offset, cosine, sine,
    eps, COLUMN: tl.constexpr, ENTRIES: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    row = tl.program_id(0).to(tl.int64)
    _store_row(
        projected + row * stride + COLUMN, norm, tl.load(positions + row), sequences + row, tables, table_stride,
        storage, page_stride, offset, cosine, sine, eps, ENTRIES, RANK, PAIRS, WIDE, PAIRED, False,
    )  # fmt: skip


@triton.jit
def _store_row(
    source, norm, at, sequence, tables, table_stride, storage, page_stride, offset, cosine, sine, eps,
    ENTRIES: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr,
    RECORDS: tl.constexpr,
):  # fmt: skip
    """One row's latent, normed, and its key, rotated, to their place."""
    if at >= 0:
        page = tl.load(tables + tl.load(sequence).to(tl.int64) * table_stride + at // ENTRIES).to(tl.int64)
        begin = storage + page * page_stride + offset
        channel, pair = tl.arange(0, WIDE), tl.arange(0, PAIRED)
        value = tl.load(source + channel, mask=channel < RANK, other=0.0)
        value *= tl.rsqrt(tl.sum(value * value, 0) / RANK + eps)
        value *= tl.load(norm + channel, mask=channel < RANK, other=0.0)
        if RECORDS:
            key = put_latent(begin + (at % ENTRIES) * RECORD, value) + 2 * pair
        else:
            target = begin + (at % ENTRIES) * (RANK + 2 * PAIRS)
            tl.store(target + channel, value.to(storage.dtype.element_ty), mask=channel < RANK)
            key = target + RANK + 2 * pair
        even = tl.load(source + RANK + 2 * pair, mask=pair < PAIRS, other=0.0)
        odd = tl.load(source + RANK + 2 * pair + 1, mask=pair < PAIRS, other=0.0)
        c = tl.load(cosine + at.to(tl.int64) * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        s = tl.load(sine + at.to(tl.int64) * PAIRS + pair, mask=pair < PAIRS, other=0.0)
        tl.store(key, (even * c - odd * s).to(key.dtype.element_ty), mask=pair < PAIRS)
        tl.store(key + 1, (even * s + odd * c).to(key.dtype.element_ty), mask=pair < PAIRS)


@triton.jit
def _turn(source, target, at, cosine, sine, PAIRS: tl.constexpr, PAIRED: tl.constexpr):
    """The pairs at `source`, turned to position `at`, to `target`."""
    pair = tl.arange(0, PAIRED)
    even = tl.load(source + 2 * pair, mask=pair < PAIRS, other=0.0)
    odd = tl.load(source + 2 * pair + 1, mask=pair < PAIRS, other=0.0)
    c = tl.load(cosine + at * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sine + at * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    kind = target.dtype.element_ty
    tl.store(target + 2 * pair, (even * c - odd * s).to(kind), mask=pair < PAIRS)
    tl.store(target + 2 * pair + 1, (even * s + odd * c).to(kind), mask=pair < PAIRS)


@triton.jit
def _rotate(
    turning, stride, positions, cosine, sine, out, HEADS: tl.constexpr, RANK: tl.constexpr, PAIRS: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    target = out + (row * HEADS + head) * (RANK + 2 * PAIRS) + RANK
    _turn(turning + row * stride + head * 2 * PAIRS, target, at, cosine, sine, PAIRS, PAIRED)


@triton.jit
def _absorb(
    queries, stride, matrix, projected, projected_stride, norm, positions, sequences, tables, table_stride, storage,
    page_stride, offset, cosine, sine, eps, out, HEADS: tl.constexpr, NOPE: tl.constexpr,
    RANK: tl.constexpr, PAIRS: tl.constexpr, COLUMN: tl.constexpr, ENTRIES: tl.constexpr, TILE: tl.constexpr,
    STILL: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr, ROUNDS: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """TILE channels of one head's query in the latents' space; a head's first program also rotates its rest. The first
    program behind the heads caches the row."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, still = tile * TILE + tl.arange(0, TILE), tl.arange(0, STILL)
    place = (head * RANK + channel)[:, None] * NOPE + still[None, :]
    inside = (channel < RANK)[:, None] & (still < NOPE)[None, :] & (head < HEADS)
    follow()
    weight = tl.load(matrix + place, mask=inside, other=0.0)
    at = tl.load(positions + row)
    chain()
    if head < HEADS:
        query = tl.load(queries + row * stride + head * NOPE + still, mask=still < NOPE, other=0.0)
        target = out + (row * HEADS + head) * (RANK + 2 * PAIRS)
        result = tl.sum(weight.to(tl.float32) * rounded(query, ROUNDS)[None, :], 1)
        tl.store(target + channel, result.to(out.dtype.element_ty), mask=channel < RANK)
        if tile == 0:
            source = queries + row * stride + HEADS * NOPE + head * 2 * PAIRS
            _turn(source, target + RANK, tl.maximum(at, 0).to(tl.int64), cosine, sine, PAIRS, PAIRED)
    elif tile == 0:
        _store_row(
            projected + row * projected_stride + COLUMN, norm, at, sequences + row, tables, table_stride, storage,
            page_stride, offset, cosine, sine, eps, ENTRIES, RANK, PAIRS, WIDE, PAIRED, RECORDS,
        )  # fmt: skip


@triton.jit
def _tile(
    storage, table, page_stride, offset, number, inside, channel, turned, other, roped, ENTRIES: tl.constexpr,
    RANK: tl.constexpr, TURNED: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Latents and keys of the rows `number` that are `inside`; `other` and `roped` of the others."""
    page = tl.load(table + number // ENTRIES, mask=inside, other=0).to(tl.int64)
    begin = storage + page * page_stride + offset
    narrow = inside[:, None] & (turned < TURNED)[None, :]
    if RECORDS:
        cached, key = get_latents(begin + (number % ENTRIES) * RECORD, inside, other)
    else:
        places = begin + (number % ENTRIES) * (RANK + TURNED)
        wide = inside[:, None] & (channel < RANK)[None, :]
        cached, key = tl.load(places[:, None] + channel[None, :], mask=wide, other=other), places + RANK
    return cached, tl.load(key[:, None] + turned[None, :], mask=narrow, other=roped)


@triton.jit
def _fold(most, total, sums, latent, key, cached, roped, inside, scale):
    """Go on with a softmax over one tile of keys."""
    scores = tl.dot(latent, tl.trans(cached), input_precision="tf32x3")
    scores = tl.dot(key, tl.trans(roped), scores, input_precision="tf32x3") * scale
    scores = tl.where(inside[None, :], scores, -float("inf"))
    peak = tl.maximum(most, tl.max(scores, 1))
    shrink, weight = tl.exp2(most - peak), tl.exp2(scores - peak[:, None])
    total = total * shrink + tl.sum(weight, 1)
    sums = tl.dot(weight.to(cached.dtype), cached, sums * shrink[:, None], input_precision="tf32x3")
    return peak, total, sums


@triton.jit
def _attend(
    query, positions, contexts, sequences, tables, table_stride, storage, page_stride, offset, chosen, counts,
    chosen_stride, mixed, weights, scale, HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr, ROPED: tl.constexpr,
    SELECTED: tl.constexpr, NARROW: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of one row over one part of its keys. The plan of the batch and rows cached before it are nobody's
    result: the first tile of them is asked for before the kernels ahead have ended."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    channel, turned, lane = tl.arange(0, WIDE), tl.arange(0, ROPED), tl.arange(0, KEYS)
    follow()
    at = tl.load(positions + row)
    sequence = tl.maximum(tl.load(sequences + row), 0)
    table = tables + sequence.to(tl.int64) * table_stride
    count = at + 1
    if SELECTED:
        chain()
        count = tl.where(at >= 0, tl.load(counts + row), 0)
    each = tl.cdiv(tl.cdiv(count, KEYS), parts) * KEYS
    begin, end = part * each, tl.minimum((part + 1) * each, count)
    number = begin + lane
    inside = number < end
    if SELECTED:
        number = tl.load(chosen + row * chosen_stride + number, mask=inside, other=0)
        cached, roped = _tile(
            storage, table, page_stride, offset, number, inside, channel, turned, 0.0, 0.0, ENTRIES, RANK,
            TURNED, RECORDS,
        )  # fmt: skip
    else:
        context = tl.load(contexts + sequence)
        old = inside & (number < context)
        cached, roped = _tile(
            storage, table, page_stride, offset, number, old, channel, turned, 0.0, 0.0, ENTRIES, RANK, TURNED, RECORDS
        )  # fmt: skip
        chain()
        new = (tl.minimum(begin + KEYS, end) > context) | (not RECORDS)  # records are decoded once, where they are old
        if new:
            cached, roped = _tile(
                storage, table, page_stride, offset, number, inside & ~old, channel, turned, cached, roped, ENTRIES,
                RANK, TURNED, RECORDS,
            )  # fmt: skip
    start = query + (row * HEADS + head[:, None]) * (RANK + TURNED)
    present = (head < HEADS)[:, None]
    latent = tl.load(start + channel[None, :], mask=present & (channel < RANK)[None, :], other=0.0)
    key = tl.load(start + RANK + turned[None, :], mask=present & (turned < TURNED)[None, :], other=0.0)
    if NARROW:
        latent, key = latent.to(tl.bfloat16), key.to(tl.bfloat16)
    most = tl.full((BLOCK,), -1e30, tl.float32)
    total, sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK, WIDE), tl.float32)
    most, total, sums = _fold(most, total, sums, latent, key, cached, roped, inside, scale)
    for first in range(begin + KEYS, end, KEYS):
        number = first + lane
        inside = number < end
        if SELECTED:
            number = tl.load(chosen + row * chosen_stride + number, mask=inside, other=0)
        cached, roped = _tile(
            storage, table, page_stride, offset, number, inside, channel, turned, 0.0, 0.0, ENTRIES, RANK,
            TURNED, RECORDS,
        )  # fmt: skip
        most, total, sums = _fold(most, total, sums, latent, key, cached, roped, inside, scale)
    found = total > 0
    sums /= tl.where(found, total, 1.0)[:, None]
    place = (row * HEADS + head) * parts + part
    target = mixed + place[:, None] * RANK + channel[None, :]
    tl.store(target, sums.to(mixed.dtype.element_ty), mask=present & (channel < RANK)[None, :])
    tl.store(weights + place, tl.where(found, most + tl.log2(total), -float("inf")), mask=head < HEADS)


@triton.jit
def _joined(mixed, weights, place, channel, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr):
    """The mixture [WIDE] of the parts that begin at `place` in these channels; 0 where every part is empty."""
    lane = tl.arange(0, 16)
    most = tl.full((16,), -1e30, tl.float32)  # each lane its own, so that no load waits for what all have in common
    total, sums = tl.zeros((16,), tl.float32), tl.zeros((16, WIDE), tl.float32)
    for first in tl.range(0, PARTS, 16, num_stages=4):
        part = first + lane
        weight = tl.load(weights + place + part, mask=part < PARTS, other=-float("inf"))
        inside = (part < PARTS)[:, None] & (channel < RANK)[None, :]
        value = tl.load(mixed + (place + part)[:, None] * RANK + channel[None, :], mask=inside, other=0.0)
        peak = tl.maximum(most, weight)
        shrink, share = tl.exp2(most - peak), tl.exp2(weight - peak)
        total = total * shrink + share
        sums = sums * shrink[:, None] + value.to(tl.float32) * share[:, None]
        most = peak
    share = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(total * share, 0)
    return tl.sum(sums * share[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def _mix(
    mixed, weights, out, HEADS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    channel = tl.arange(0, WIDE)
    result = _joined(mixed, weights, place * PARTS, channel, PARTS, RANK, WIDE)
    tl.store(out + place * RANK + channel, result, mask=channel < RANK)


@triton.jit
def _leave(
    mixed, weights, matrix, out, HEADS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    VALUE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """What WIDE channels of the latent add to one head's values."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    value, channel = tl.arange(0, TILE), tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = (value < VALUE)[:, None] & (channel < RANK)[None, :]
    follow()
    weight = tl.load(matrix + (head * VALUE + value)[:, None] * RANK + channel[None, :], mask=inside, other=0.0)
    place = row * HEADS + head
    chain()
    whole = rounded(_joined(mixed, weights, place * PARTS, channel, PARTS, RANK, WIDE), ROUNDS)
    result = tl.sum(weight.to(tl.float32) * whole[None, :], 1)
    target = (row * tl.num_programs(0) + tl.program_id(0)) * HEADS + head
    tl.store(out + target * VALUE + value, result, mask=value < VALUE)
