"""Latent attention on Hopper: all cached rows of a sequence by dense decode, chosen ones by name; over bf16 rows and
over records."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda import dense_decode as kernel
from kernels.cuda import dense_decode_fp8 as fp8
from kernels.cuda.engine import domain, named, records
from kernels.cuda.engine.runs import alike
from kernels.cuda.spans import Split, fast_split, workspace_for
from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.dense_decode import VALUE_WIDTH, WIDTH, PagedLatents, PagedRecords
from kernels.staging import staged
from kernels.triton.engine import invariant
from kernels.triton.engine import latent as by_triton
from kernels.triton.engine.chained import LAUNCH, chain, follow

_INVARIANT_SPAN = 2048  # keys
_LEAST_SPAN, _USUAL_KEYS = 512, 8192  # of a split: its shortest span, and the context it suits best


def attend_latent(
    absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None,
    rope: RopeTable,
) -> Tensor:  # fmt: skip
    """As reference.mla.attend_latent."""
    if pages.are_records and selection is not None:
        query = rotated(absorbed, turning, spec, ragged, rope)
        return records.attend_chosen(query, spec, ragged, pages, selection).flatten(1).to(torch.float32)
    takes = domain.attends_densely if selection is None else domain.attends_chosen
    if not takes(spec, pages, len(absorbed)):
        return by_triton.attend_latent(absorbed, turning, spec, ragged, pages, selection, rope)
    query = rotated(absorbed, turning, spec, ragged, rope)
    if selection is None:
        return attend_all(query, spec, ragged, pages).flatten(1).to(torch.float32)
    return named.attend(query, named.in_pages(ragged, pages, selection), spec.scale).values.flatten(1).to(torch.float32)


def rotated(absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, rope: RopeTable) -> Tensor:
    """absorbed [rows, heads * rank] and turning [rows, heads * rope] as bf16 [rows, heads, rank + rope]."""
    out = torch.empty(len(absorbed), spec.heads, WIDTH, dtype=torch.bfloat16, device=absorbed.device)
    _rotated[(len(absorbed), spec.heads)](
        absorbed, absorbed.stride(0), turning, turning.stride(0), staged(ragged, absorbed.device).positions, rope.cos,
        rope.sin, out, HEADS=spec.heads, RANK=spec.rank, PAIRS=spec.rope // 2, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


def attend_latent_invariant(
    absorbed: Tensor, turning: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None,
    rope: RopeTable,
) -> Tensor:  # fmt: skip
    """The same, with kernels and a split that do not depend on how many rows there are."""
    if pages.are_records:  # dense decode over them is another kernel for few rows than for many
        query = rotated(absorbed, turning, spec, ragged, rope)
        mixed = records.attend_chosen(query, spec, ragged, pages, selection, _INVARIANT_SPAN)
        return mixed.flatten(1).to(torch.float32)
    if not domain.is_latent(spec, pages):
        return invariant.attend_latent(absorbed, turning, spec, ragged, pages, selection, rope)
    query = rotated(absorbed, turning, spec, ragged, rope)
    if selection is None:
        longest = staged(ragged, query.device).tables.shape[1] * pages.entries
        split = Split(_INVARIANT_SPAN, max(1, -(-longest // _INVARIANT_SPAN)))
        return attend_all(query, spec, ragged, pages, split).flatten(1).to(torch.float32)
    return named.attend(query, named.in_pages(ragged, pages, selection), spec.scale).values.flatten(1).to(torch.float32)


def attend_all(query: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, split: Split | None = None) -> Tensor:
    """query bf16 [rows, heads, 576] over all cached rows up to each one's own: bf16 [rows, heads, 512]. `split`: of
    every sequence's keys, where it is not to be chosen by how many there are."""
    on, heads = staged(ragged, query.device), spec.heads
    held = records.extent(pages)
    out = query.new_empty(len(query), heads, VALUE_WIDTH)
    lse = torch.empty(len(query), heads, dtype=torch.float32, device=query.device)
    for sequences, rows in alike(ragged):
        count, new = len(sequences), len(rows) // len(sequences)
        part, own = slice(rows.start, rows.stop), slice(sequences.start, sequences.stop)
        # The last row's position, and not the context: rows that are nobody's must not attend.
        lengths = on.positions[part].view(count, new)[:, -1] + 1
        taken = split or split_of(count, new * heads, query.device)
        room = workspace_for(taken, count, new * heads, query.device)
        asked, into = query[part].view(count, new, heads, WIDTH), out[part].view(count, new, heads, VALUE_WIDTH)
        operands = (spec.scale, taken, room, into, lse[part].view(count, new, heads))
        if pages.are_records:
            fp8.dense_decode_fp8(asked, PagedRecords(held, pages.entries, on.tables[own], lengths), *operands)
        else:
            latents = PagedLatents(held.unflatten(1, (pages.entries, pages.width)), on.tables[own], lengths)
            kernel.dense_decode(asked, latents, *operands)
    return out


def split_of(sequences: int, rows: int, device: torch.device) -> Split:
    """The split for so many sequences of so many rows (tokens * heads) each, whatever their contexts."""
    return Split(_LEAST_SPAN, fast_split(sequences, rows, _USUAL_KEYS, _processors(device)).most)


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


@triton.jit
def _rotated(
    absorbed, absorbed_stride, turning, turning_stride, positions, cosine, sine, out, HEADS: tl.constexpr,
    RANK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, pair = tl.arange(0, RANK), tl.arange(0, PAIRS)
    target = out + (row * HEADS + head) * (RANK + 2 * PAIRS)
    still = tl.load(absorbed + row * absorbed_stride + head * RANK + channel)
    tl.store(target + channel, still.to(out.dtype.element_ty))
    source, at = turning + row * turning_stride + head * 2 * PAIRS, tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    even, odd = tl.load(source + 2 * pair), tl.load(source + 2 * pair + 1)
    c, s = tl.load(cosine + at * PAIRS + pair), tl.load(sine + at * PAIRS + pair)
    tl.store(target + RANK + 2 * pair, (even * c - odd * s).to(out.dtype.element_ty))
    tl.store(target + RANK + 2 * pair + 1, (even * s + odd * c).to(out.dtype.element_ty))
