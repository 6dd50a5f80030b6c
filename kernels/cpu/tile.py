"""The register tile all CPU products are made of: R rows times 16 columns, one fused multiply-add chain per output.

Every output is `((0 + x0*w0) + x1*w1) + ...` in index order, each step rounded once. Its bits therefore depend on its
own row and column alone: not on R, the rows beside it, or how many rows there are. Batch invariance rests on this.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compile import serial

LANES = 16
_ROW_CHOICES = (6, 4, 2, 1)


def _lanes(value: Any) -> Any:
    return ir.VectorType(value, LANES)


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    empty = ir.Constant(vector, ir.Undefined)
    index = ir.IntType(32)
    first = builder.insert_element(empty, scalar, ir.Constant(index, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_lanes(index), [0] * LANES))


def _load(builder: Any, pointer: Any, is_bf16: bool) -> Any:
    """16 weights as fp32; bf16 is the upper half of fp32, so a shift widens it exactly."""
    vector, wide = _lanes(ir.FloatType()), _lanes(ir.IntType(32))
    if not is_bf16:
        loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
        loaded.align = 4
        return loaded
    halves = builder.load(builder.bitcast(pointer, _lanes(ir.IntType(16)).as_pointer()))
    halves.align = 2
    return builder.bitcast(builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * LANES)), vector)


def _load_one(builder: Any, pointer: Any, is_bf16: bool) -> Any:
    """One factor as fp32."""
    loaded, word = builder.load(pointer), ir.IntType(32)
    if not is_bf16:
        return loaded
    return builder.bitcast(builder.shl(builder.zext(loaded, word), ir.Constant(word, 16)), ir.FloatType())


def _tile(rows: int) -> Any:
    """An intrinsic: out[o + r*os + l] = sum_k x[a + r*xs + k*xk] * w[b + k*wk + l] for r < rows, l < 16; k >= 1."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context, x, a, xs, xk, w, b, wk, count, out, o, os):  # type: ignore[no-untyped-def]
        number = types.intp
        signature = types.void(x, number, number, number, w, number, number, number, out, number, number)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            data = {i: context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 8)}
            a, xs, xk, b, wk, count, o, os = (args[i] for i in (1, 2, 3, 5, 6, 7, 9, 10))
            index, vector = a.type, _lanes(ir.FloatType())
            x_rows = [
                builder.gep(data[0], [builder.add(a, builder.mul(xs, ir.Constant(index, r)))]) for r in range(rows)
            ]
            weights, entry = builder.gep(data[4], [b]), builder.block
            loop, done = builder.append_basic_block("multiply"), builder.append_basic_block("store")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(index)
            k.add_incoming(ir.Constant(index, 0), entry)
            sums = [builder.phi(vector) for _ in range(rows)]
            panel = builder.gep(weights, [builder.mul(k, wk)])
            x_bf16, w_bf16 = (signature.args[i].dtype == types.uint16 for i in (0, 4))
            column = _load(builder, panel, w_bf16)
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
            )
            results = []
            for row, total in zip(x_rows, sums, strict=True):
                factor = _splat(builder, _load_one(builder, builder.gep(row, [builder.mul(k, xk)]), x_bf16), vector)
                results.append(builder.call(fma, [factor, column, total]))
                total.add_incoming(ir.Constant(vector, [0.0] * LANES), entry)
                total.add_incoming(results[-1], loop)
            following = builder.add(k, ir.Constant(index, 1))
            k.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
            builder.position_at_end(done)
            for r, result in enumerate(results):
                target = builder.gep(data[8], [builder.add(o, builder.mul(os, ir.Constant(index, r)))])
                builder.store(result, builder.bitcast(target, vector.as_pointer())).align = 4
            return context.get_dummy_value()

        return signature, generate

    return tile


_tile6, _tile4, _tile2, _tile1 = (_tile(rows) for rows in _ROW_CHOICES)


@serial
def panel_product(x, a, xs, xk, rows, w, b, wk, count, out, o, os):  # type: ignore[no-untyped-def]
    """16 columns of a product for `rows` rows, in tiles of 6, 4, 2 and 1; operands as in `_tile`."""
    row = 0
    while row + 6 <= rows and rows - row != 8:  # 4 + 4 keeps more chains in flight than 6 + 2
        _tile6(x, a + row * xs, xs, xk, w, b, wk, count, out, o + row * os, os)
        row += 6
    while row + 4 <= rows:
        _tile4(x, a + row * xs, xs, xk, w, b, wk, count, out, o + row * os, os)
        row += 4
    if row + 2 <= rows:
        _tile2(x, a + row * xs, xs, xk, w, b, wk, count, out, o + row * os, os)
        row += 2
    if row < rows:
        _tile1(x, a + row * xs, xs, xk, w, b, wk, count, out, o + row * os, os)
