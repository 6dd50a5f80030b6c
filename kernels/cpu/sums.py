"""Sums whose order is written down: 32 interleaved chains, then 8, added in pairs. Knows no operator.

A compiler that may regroup a sum chooses another grouping for every version it makes of a loop, and which version runs
depends on where operands lie. These leave it no choice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from kernels.cpu.compile import serial
from kernels.cpu.numbers import fma

_LANES, _VECTORS = 8, 4  # of one vector; vectors, so that additions do not wait for each other
_STEP = _LANES * _VECTORS
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, _LANES)


def _load(builder: Any, data: Any, at: Any) -> Any:
    return builder.load(builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer()), align=4)


def _folded(builder: Any, sums: list[Any]) -> Any:
    """One total of all lanes: vectors in pairs, then halves of what is left."""
    while len(sums) > 1:
        sums = [builder.fadd(one, other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    total, lanes, word = sums[0], _LANES, ir.IntType(32)
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(total, total, ir.Constant(ir.VectorType(word, lanes), list(range(at, at + lanes))))
            for at in (0, lanes)
        ]
        total = builder.fadd(*halves)
    return builder.extract_element(total, ir.Constant(word, 0))


def _chains(vectors: int, relu: bool, weighted: bool) -> Any:
    """An intrinsic: sum of x[i] * y[i], of x[i] * max(y[i], 0) or of x[i] from `first` up to `end`, in whole steps."""

    @intrinsic  # type: ignore[untyped-decorator]
    def chains(_context, x, y, first, end):  # type: ignore[no-untyped-def]
        if any(array.ndim != 1 or array.layout != "C" or array.dtype != types.float32 for array in (x, y)):
            raise TypingError("sums are over contiguous rows of fp32")

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            left, right = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 1))
            first, end = args[2:]
            index, entry = first.type, builder.block
            fma_of = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{_LANES}f32"
            )
            zero, loop, done = ir.Constant(_VECTOR, [0.0] * _LANES), *map(builder.append_basic_block, ("add", "fold"))
            builder.branch(loop)
            builder.position_at_end(loop)
            i = builder.phi(index)
            i.add_incoming(first, entry)
            sums, results = [builder.phi(_VECTOR) for _ in range(vectors)], []
            for n, total in enumerate(sums):
                at = builder.add(i, ir.Constant(index, n * _LANES))
                value = _load(builder, left, at)
                if weighted:
                    other = _load(builder, right, at)
                    if relu:
                        other = builder.select(builder.fcmp_ordered("<", other, zero), zero, other)  # NaN stays
                    results.append(builder.call(fma_of, [value, other, total]))
                else:
                    results.append(builder.fadd(value, total))
                total.add_incoming(zero, entry)
                total.add_incoming(results[-1], loop)
            following = builder.add(i, ir.Constant(index, vectors * _LANES))
            i.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
            builder.position_at_end(done)
            return _folded(builder, results)

        return types.float32(x, y, types.intp, types.intp), generate

    return chains


_products, _few_products = (_chains(vectors, False, True) for vectors in (_VECTORS, 1))
_kept, _few_kept = (_chains(vectors, True, True) for vectors in (_VECTORS, 1))
_values, _few_values = (_chains(vectors, False, False) for vectors in (_VECTORS, 1))


@serial(inline="always")
def dot(x, y):  # type: ignore[no-untyped-def]
    """Sum of x[i] * y[i] of two contiguous fp32 rows of one length."""
    steps, whole, total = len(x) // _STEP * _STEP, len(x) // _LANES * _LANES, np.float32(0.0)
    if steps > 0:
        total = _products(x, y, 0, steps)
    if whole > steps:
        total += _few_products(x, y, steps, whole)
    for i in range(whole, len(x)):
        total = fma(x[i], y[i], total)
    return total


@serial(inline="always")
def relu_dot(x, y):  # type: ignore[no-untyped-def]
    """Sum of x[i] * max(y[i], 0) of two contiguous fp32 rows of one length."""
    steps, whole, total = len(x) // _STEP * _STEP, len(x) // _LANES * _LANES, np.float32(0.0)
    if steps > 0:
        total = _kept(x, y, 0, steps)
    if whole > steps:
        total += _few_kept(x, y, steps, whole)
    for i in range(whole, len(x)):
        total = fma(x[i], max(y[i], np.float32(0.0)), total)
    return total


@serial(inline="always")
def row_sum(x):  # type: ignore[no-untyped-def]
    """Sum of a contiguous fp32 row."""
    steps, whole, found = len(x) // _STEP * _STEP, len(x) // _LANES * _LANES, np.float32(0.0)
    if steps > 0:
        found = _values(x, x, 0, steps)
    if whole > steps:
        found += _few_values(x, x, steps, whole)
    for i in range(whole, len(x)):
        found += x[i]
    return found


@serial
def inverse_rms(values, row, first, count, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean of squares + eps) of values[row, first : first + count]."""
    part = values[row, first : first + count]
    return np.float32(1.0) / np.float32(np.sqrt(dot(part, part) / np.float32(count) + np.float32(eps)))
