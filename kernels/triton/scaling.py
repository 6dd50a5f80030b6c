"""Scales and codes inside Triton kernels: what kernels/reference/cast.py defines, for registers. Launches nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference.cast import CastSpec, Code

FP32 = tl.constexpr(0)
E8M0 = tl.constexpr(1)
E4M3 = tl.constexpr(2)


def constants(spec: CastSpec) -> dict[str, object]:
    """What a kernel that casts is compiled with."""
    return {
        "GROUP": spec.group, "SCALE": spec.scale.value, "LARGEST": spec.code.value, "FLOOR": spec.floor,
        "PACKED": spec.code is Code.E2M1,
    }  # fmt: skip


@triton.jit
def magnitude(x):
    """|x| of fp32 as an int32 of the same order, NaN above infinity: a maximum of these keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """From `magnitude` of a group: the scale as stored, and what its numbers are multiplied by (E4M3: divided)."""
    value = largest.to(tl.float32, bitcast=True)
    value = tl.where(value < FLOOR, FLOOR, value)  # keeps NaN
    if SCALE == FP32:
        stored, factor = tl.div_rn(value, LARGEST), tl.div_rn(LARGEST, value)
    elif SCALE == E8M0:  # 448 and 6 are 7 and 3 times a power of two: the least power above a share needs no division
        bits = value.to(tl.uint32, bitcast=True)
        above = ((bits + 0x1FFFFF) >> 23) - 8 if LARGEST == 448.0 else ((bits + 0x3FFFFF) >> 23) - 2
        byte = tl.where(bits < 0x7F800000, above, 255)
        stored, factor = byte.to(tl.uint8), ((254 - byte) << 23).to(tl.float32, bitcast=True)
    else:
        ratio = tl.div_rn(value, LARGEST)
        most = tl.where(largest < 0x7F800000, 448.0, float("nan"))
        stored = tl.where(ratio < 448.0, ratio, most).to(tl.float8e4nv)
        factor = stored.to(tl.float32)
    return stored, factor


@triton.jit
def tile_of(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """This program's ROWS rows by GROUPS groups of WIDTH columns; neighbours take neighbouring columns.

    Its first row, its first group; columns, and which rows there are, to be taken with three dimensions.
    """
    parts: tl.constexpr = WIDTH // (GROUPS * GROUP)
    first = (tl.program_id(0) // parts).to(tl.int64) * ROWS
    start = tl.program_id(0) % parts * GROUPS
    column = (start + tl.arange(0, GROUPS)[None, :, None]) * GROUP + tl.arange(0, GROUP)[None, None, :]
    return first, start, column, tl.arange(0, ROWS)[:, None, None] < rows - first


@triton.jit
def put_tile(
    value, codes, scales, first, start, rows, code_stride, scale_stride, scale_step,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Codes and scales of fp32 [ROWS, GROUPS, GROUP], from row `first` and group `start` on."""
    stored, factor = scale_of(tl.max(magnitude(value), 2), SCALE, LARGEST, FLOOR)
    row, group = tl.arange(0, ROWS)[:, None], start + tl.arange(0, GROUPS)[None, :]
    place = scales + first * scale_stride + (row * scale_stride + group * scale_step)
    tl.store(place, stored, mask=row < rows - first)
    factor = tl.expand_dims(factor, 2)
    scaled = tl.div_rn(value, factor) if SCALE == E4M3 else value * factor
    size: tl.constexpr = GROUP // 2 if PACKED else GROUP
    row, group = tl.arange(0, ROWS)[:, None, None], start + tl.arange(0, GROUPS)[None, :, None]
    place = codes + first * code_stride + (row * code_stride + group * size + tl.arange(0, size)[None, None, :])
    if PACKED:
        low, high = tl.split(tl.reshape(e2m1(scaled), (ROWS, GROUPS, GROUP // 2, 2)))
        tl.store(place, (low | (high << 4)).to(tl.uint8), mask=row < rows - first)
    else:
        tl.store(place, scaled.to(tl.float8e4nv), mask=row < rows - first)


@triton.jit
def e2m1(x):
    """Code 0 .. 15 of fp32 numbers, int32."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Adding 2**22 times its own power of two rounds a number to one binary place, counted in its lowest bits.
    power = (tl.maximum(size, 1.0)).to(tl.int32, bitcast=True) & 0x7F800000
    magic = power + (22 << 23)
    count = (size + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    code = count + ((power >> 22) - 254)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_values(code):
    """fp32 of codes 0 .. 15, int32."""
    size = code & 7
    bits = tl.where(size < 2, (size * 126) << 23, (size + 252) << 22)  # 0 and a half have no leading one
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
