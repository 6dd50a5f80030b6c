"""KV records and index keys on a GPU: norm, rope, cast and store of a row at once; formats: reference/kv_record.py.

One launch into pages that are there, no workspace: it captures into a CUDA graph. A record's bits depend on its row
alone; bytes of slots that no row names stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.kv_record import Norm, Packed, Paged, Turn, check_pack
from kernels.triton.scaling import constants, e2m1, magnitude, scale_of

_SCALE_VIEWS = {0: torch.float32, 1: torch.uint8, 2: torch.float8_e4m3fn}


def pack(
    kind: Packed, x: Tensor, slots: Tensor | Paged, pages: Tensor, page_tokens: int, norm: Norm | None,
    turn: Turn | None, apart: Tensor | None = None, rows: int | None = None,
) -> None:  # fmt: skip
    """As the definition; `rows` of a program, a warp for each. Raises KernelError for operands it does not take."""
    check_pack(kind, x, slots, pages, page_tokens, norm, turn, apart)
    layout = kind.value
    if not x.shape[0]:
        return
    scales = pages.view(_SCALE_VIEWS[layout.spec.scale.value])
    behind = page_tokens * layout.row if apart is None else apart.data_ptr() - pages.data_ptr()
    taken = rows or (1 if layout.width == 512 else 4)
    paged = isinstance(slots, Paged)
    at, sequences, tables = (slots.positions, slots.sequences, slots.tables) if paged else (slots, slots, slots)
    _pack[(triton.cdiv(x.shape[0], taken),)](
        x, at, sequences, tables, tables.stride(0), pages, scales, pages.view(torch.bfloat16),
        pages if norm is None else norm.weight,
        pages if turn is None else turn.positions, pages if turn is None else turn.cosine,
        pages if turn is None else turn.sine, x.shape[0], x.stride(0), pages.stride(0), page_tokens, behind,
        0.0 if norm is None else norm.eps,
        PAGED=paged, ROWS=taken, WIDTH=min(layout.width, 512), CAST=layout.cast, ROW=layout.row,
        SCALE_BYTES=layout.scale_bytes,
        SCALE_AT=-1 if layout.scale_at is None else layout.scale_at, PLAIN=layout.plain, PLAIN_AT=layout.plain_at,
        APART=layout.width > 512, NORMED=norm is not None, PAIRS=0 if turn is None else turn.cosine.shape[1],
        **constants(layout.spec), num_warps=taken,
    )  # fmt: skip


@triton.jit
def turned_rows(
    value, positions, cosine, sine, row, inside, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """value [ROWS, WIDTH] with its last PAIRS pairs turned to their rows' positions."""
    pair = tl.arange(0, WIDTH // 2)[None, :] - (WIDTH // 2 - PAIRS)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.int64)
    place, there = position[:, None] * PAIRS + pair, inside[:, None] & (pair >= 0)
    cos = tl.load(cosine + place, mask=there, other=1.0)
    sin = tl.load(sine + place, mask=there, other=0.0)
    even, odd = tl.split(tl.reshape(value, (ROWS, WIDTH // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, WIDTH))


@triton.jit
def _pack(
    x, slots, sequences, tables, table_stride, pages, scales, plains, weight, positions, cosine, sine, rows, x_stride,
    page_stride, page_tokens, scales_at, eps, PAGED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CAST: tl.constexpr, ROW: tl.constexpr, SCALE_BYTES: tl.constexpr,
    SCALE_AT: tl.constexpr, PLAIN: tl.constexpr, PLAIN_AT: tl.constexpr, APART: tl.constexpr, NORMED: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """ROWS rows. `scales` and `plains` are the pages as scales and as bf16."""
    groups: tl.constexpr = WIDTH // GROUP
    scale_size: tl.constexpr = 4 if SCALE == 0 else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=-1)
    kept = inside & (slot >= 0)
    page, place = slot // page_tokens, slot % page_tokens
    if PAGED:  # `slots` are positions
        sequence = tl.load(sequences + row, mask=kept, other=-1).to(tl.int64)
        kept = kept & (sequence >= 0)
        page = tl.load(tables + sequence * table_stride + page, mask=kept, other=0).to(tl.int64)
    at = page * page_stride + place * ROW
    channel = tl.arange(0, WIDTH)[None, :]
    value = tl.load(x + row[:, None] * x_stride + channel, mask=kept[:, None], other=0.0).to(tl.float32)
    if NORMED:
        unit = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
        value = value * unit[:, None] * tl.load(weight + channel)
    if PAIRS > 0 and not APART:
        value = turned_rows(value, positions, cosine, sine, row, kept, ROWS, WIDTH, PAIRS)
    if APART:
        lane = tl.arange(0, PLAIN)[None, :]
        rest = tl.load(x + row[:, None] * x_stride + WIDTH + lane, mask=kept[:, None], other=0.0).to(tl.float32)
        if PAIRS > 0:
            rest = turned_rows(rest, positions, cosine, sine, row, kept, ROWS, PLAIN, PAIRS)
        tl.store(plains + at[:, None] // 2 + (PLAIN_AT // 2 + lane), rest.to(tl.bfloat16), mask=kept[:, None])
    elif PLAIN > 0:
        there = kept[:, None] & (channel >= CAST)
        beside = plains + at[:, None] // 2 + (PLAIN_AT // 2 + channel - CAST)
        tl.store(beside, value.to(tl.bfloat16), mask=there)
    value = tl.reshape(value, (ROWS, groups, GROUP))
    stored, factor = scale_of(tl.max(magnitude(value), 2), SCALE, LARGEST, FLOOR)
    group = tl.arange(0, groups)[None, :]
    behind = page * page_stride + scales_at + place * SCALE_BYTES
    first = at + SCALE_AT if SCALE_AT >= 0 else behind
    if CAST < WIDTH:  # V4: the last group is not cast; its scale is the record's padding
        stored = tl.where(group < CAST // GROUP, stored, 0)
    tl.store(scales + first[:, None] // scale_size + group, stored.to(scales.dtype.element_ty), mask=kept[:, None])
    factor = tl.expand_dims(factor, 2)
    scaled = tl.div_rn(value, factor) if SCALE == 2 else value * factor
    if PACKED:
        low, high = tl.split(tl.reshape(e2m1(scaled), (ROWS, WIDTH // 2, 2)))
        tl.store(
            pages + at[:, None] + tl.arange(0, WIDTH // 2)[None, :],
            (low | (high << 4)).to(tl.uint8),
            mask=kept[:, None],
        )
    else:
        code = tl.reshape(scaled, (ROWS, WIDTH)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(pages + at[:, None] + channel, code, mask=kept[:, None] & (channel < CAST))
