"""Index scores over V4.1's published keys on a GPU: 128 E2M1 codes and a power of two for 32 of them, in 68 bytes.

Queries are rounded to the same numbers. Of either, bf16 holds every one exactly, so that products are exact. A key is
16 words of eight codes: the first codes of all words are one product of 16 channels, and so on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import Pages, Ragged
from kernels.reference.kv_record import Packed
from kernels.staging import staged
from kernels.triton.scaling import E8M0, e2m1, e2m1_values, magnitude, scale_of

_KEYS, _TILES, _PROGRAMS = 128, 4, 264  # of a program: keys at a time, and how often where that keeps a GPU busy
_WIDTH, _WORDS, _SHARED, _RECORD = tl.constexpr(128), tl.constexpr(16), tl.constexpr(32), tl.constexpr(17)


def score_records(heads: Tensor, weights: Tensor, count: int, ragged: Ragged, pages: Pages, scores: Tensor) -> None:
    """Fill scores fp32 [rows, most entries], as `index.score_entries` has them."""
    rows, on = len(heads), staged(ragged, heads.device)
    tiles = _TILES if rows * triton.cdiv(scores.shape[1], _KEYS * _TILES) >= _PROGRAMS else 1
    words = pages.storage.view(torch.int32)
    _score[(rows, triton.cdiv(scores.shape[1], _KEYS * tiles))](
        heads, weights, weights.stride(0), on.positions, on.sequences, on.tables, on.tables.stride(0), words,
        words.stride(0), pages.offset // 4, scores, scores.stride(0), 128**-0.5, count**-0.5, HEADS=count,
        ENTRIES=pages.entries, RATE=pages.rate, KEYS=_KEYS, TILES=tiles, BLOCK=max(16, triton.next_power_of_2(count)),
        FLOOR=Packed.V41_INDEX.value.spec.floor, num_warps=4,
    )  # fmt: skip


@triton.jit
def _codes(word, scale):
    """The numbers that the lowest codes of words stand for."""
    return (e2m1_values(word & 15) * scale).to(tl.bfloat16)


@triton.jit
def _score(
    heads, weights, stride, positions, sequences, tables, table_stride, storage, page_stride, offset, scores,
    score_stride, key_scale, head_scale, HEADS: tl.constexpr, ENTRIES: tl.constexpr, RATE: tl.constexpr,
    KEYS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Scores of TILES times KEYS entries for one row; those it cannot see are left as they are."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * KEYS * TILES
    visible = (tl.load(positions + row) + 1) // RATE
    if begin < visible:
        head, channel, place = tl.arange(0, BLOCK), tl.arange(0, _WIDTH), tl.arange(0, _WORDS)
        source = heads + (row * HEADS + head)[:, None] * _WIDTH + channel[None, :]
        asked = tl.load(source, mask=(head < HEADS)[:, None], other=0.0)
        groups = tl.reshape(asked, (BLOCK, _WIDTH // _SHARED, _SHARED))
        _, factor = scale_of(tl.max(magnitude(groups), 2), E8M0, 6.0, FLOOR)
        factor = tl.expand_dims(factor, 2)
        asked = (e2m1_values(e2m1(groups * factor)) * tl.div_rn(1.0, factor)).to(tl.bfloat16)
        even, odd = tl.split(tl.reshape(asked, (BLOCK, _WORDS, 4, 2)))
        fourth, second = tl.split(tl.reshape(even, (BLOCK, _WORDS, 2, 2)))
        fifth, third = tl.split(tl.reshape(odd, (BLOCK, _WORDS, 2, 2)))
        q0, q4 = tl.split(fourth)
        q2, q6 = tl.split(second)
        q1, q5 = tl.split(fifth)
        q3, q7 = tl.split(third)
        share = tl.load(weights + row * stride + head, mask=head < HEADS, other=0.0) * head_scale
        table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
        for first in range(begin, tl.minimum(begin + KEYS * TILES, visible), KEYS):
            entry = first + tl.arange(0, KEYS)
            inside = entry < visible
            page = tl.load(table + entry // ENTRIES, mask=inside, other=0).to(tl.int64)
            record = storage + page * page_stride + offset + (entry % ENTRIES) * _RECORD
            word = tl.load(record[:, None] + place[None, :], mask=inside[:, None], other=0)
            stored = tl.load(record + _WORDS, mask=inside, other=0)
            stored = (stored[:, None] >> (place // 4 * 8)[None, :]) & 255  # four words share a scale
            scale = (stored << 23).to(tl.float32, bitcast=True)
            dots = tl.dot(q0, tl.trans(_codes(word, scale)))
            dots = tl.dot(q1, tl.trans(_codes(word >> 4, scale)), dots)
            dots = tl.dot(q2, tl.trans(_codes(word >> 8, scale)), dots)
            dots = tl.dot(q3, tl.trans(_codes(word >> 12, scale)), dots)
            dots = tl.dot(q4, tl.trans(_codes(word >> 16, scale)), dots)
            dots = tl.dot(q5, tl.trans(_codes(word >> 20, scale)), dots)
            dots = tl.dot(q6, tl.trans(_codes(word >> 24, scale)), dots)
            dots = tl.dot(q7, tl.trans(_codes(word >> 28, scale)), dots) * key_scale
            found = tl.sum(tl.maximum(dots, 0.0) * share[:, None], 0)
            tl.store(scores + row * score_stride + entry, found, mask=inside)
