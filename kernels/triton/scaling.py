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
    ratio = tl.div_rn(value, LARGEST)
    if SCALE == FP32:
        stored, factor = ratio, tl.div_rn(LARGEST, value)
    elif SCALE == E8M0:
        byte = tl.minimum((ratio.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23, 255)
        stored, factor = byte.to(tl.uint8), ((254 - byte) << 23).to(tl.float32, bitcast=True)
    else:
        most = tl.where(largest < 0x7F800000, 448.0, float("nan"))
        stored = tl.where(ratio < 448.0, ratio, most).to(tl.float8e4nv)
        factor = stored.to(tl.float32)
    return stored, factor


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
