"""Scalar mathematics that vectorizes: bf16 conversion, exp, and helpers on them. Knows no operator."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from kernels.cpu.compile import serial


@intrinsic  # type: ignore[untyped-decorator]
def bits_to_float(_context, value):  # type: ignore[no-untyped-def]
    """uint32 bits read as fp32."""

    def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_to_bits(_context, value):  # type: ignore[no-untyped-def]
    """fp32 read as uint32 bits."""

    def generate(context, builder, _signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def fma(_context, x, y, z):  # type: ignore[no-untyped-def]
    """x * y + z in fp32, rounded once."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        given = [context.cast(builder, one, of, types.float32) for one, of in zip(args, signature.args, strict=True)]
        return builder.fma(*given)

    return types.float32(types.float32, types.float32, types.float32), generate


@serial(inline="always")
def to_bf16(value):  # type: ignore[no-untyped-def]
    """fp32 -> bf16 bits, nearest, ties to even; NaN stays NaN."""
    bits = float_to_bits(np.float32(value))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)
    return np.uint16(quiet if value != value else rounded)


@serial(inline="always")
def round_bf16(value):  # type: ignore[no-untyped-def]
    """fp32 rounded to the nearest bf16 value."""
    return bits_to_float(np.uint32(to_bf16(value)) << np.uint32(16))


def widen(value):  # type: ignore[no-untyped-def]
    """A stored element (fp32, or bf16 bits as uint16) as fp32. Kernels compile the overload below."""
    return (np.uint32(value) << np.uint32(16)).view(np.float32) if isinstance(value, np.uint16) else np.float32(value)


@overload(widen, inline="always")  # type: ignore[untyped-decorator]
def _widen(value):  # type: ignore[no-untyped-def]
    if value == types.uint16:
        return lambda value: bits_to_float(np.uint32(value) << np.uint32(16))
    return lambda value: value


def narrow_into(target, row, column, value):  # type: ignore[no-untyped-def]
    """Store fp32 `value` at target[row, column] in the target's own format. Kernels compile the overload below."""
    target[row, column] = to_bf16(value) if target.dtype == np.uint16 else value


@overload(narrow_into, inline="always")  # type: ignore[untyped-decorator]
def _narrow_into(target, row, column, value):  # type: ignore[no-untyped-def]
    if target.dtype == types.uint16:

        def store_bf16(target, row, column, value):  # type: ignore[no-untyped-def]
            target[row, column] = to_bf16(value)

        return store_bf16

    def store(target, row, column, value):  # type: ignore[no-untyped-def]
        target[row, column] = value

    return store


@serial
def exp(value):  # type: ignore[no-untyped-def]
    """e**value in fp32 within 2 ulp, as straight-line code so that loops over it vectorize; underflows to 0."""
    x = min(max(np.float32(value), np.float32(-87.0)), np.float32(88.0))
    whole = np.float32(np.floor(fma(x, np.float32(1.44269504), np.float32(0.5))))
    # ln 2 in two parts (Cody and Waite)
    r = fma(whole, np.float32(2.12194440e-4), fma(whole, np.float32(-0.693359375), x))
    p = np.float32(1.9875691500e-4)
    p = fma(p, r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, np.float32(5.0000001201e-1))
    p = fma(p * r, r, r) + np.float32(1.0)
    scale = bits_to_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return np.float32(0.0) if value < np.float32(-87.0) else p * scale


@serial
def sigmoid(value):  # type: ignore[no-untyped-def]
    """1 / (1 + e**-value) in fp32."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-value))


@serial
def ordered_bits(value):  # type: ignore[no-untyped-def]
    """uint32 keys in the order of their fp32 values; both zeros have one key, NaN stands above infinity."""
    bits = float_to_bits(np.float32(value))
    sign = np.uint32(0x80000000)
    if bits & np.uint32(0x7FFFFFFF) == np.uint32(0):
        return sign
    return ~bits if bits & sign else bits | sign


@serial
def rotate(values, row, first, cosine, sine, sign):  # type: ignore[no-untyped-def]
    """Rotate interleaved pairs of values[row, first:] in place by one position's angles; sign -1 undoes it."""
    for i in range(cosine.shape[0]):
        even, odd = values[row, first + 2 * i], values[row, first + 2 * i + 1]
        turn = sign * sine[i]
        values[row, first + 2 * i] = fma(even, cosine[i], -(odd * turn))
        values[row, first + 2 * i + 1] = fma(odd, cosine[i], even * turn)
