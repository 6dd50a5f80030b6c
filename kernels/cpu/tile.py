"""The register tile all CPU products are made of: R rows times P panels of 16 columns, one chain per output.

Every output is `((0 + x0*w0) + x1*w1) + ...` in index order, each step rounded once. Its bits therefore depend on its
own row and column alone: not on R or P, the rows beside it, or how many rows there are. Batch invariance rests on this.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compile import serial

LANES = 16
WIDE = 4  # panels that one row takes at once: fewer chains than 8 would wait for each other
_SHAPES = ((6, 1), (4, 1), (2, 1), (1, 1), (3, 2), (2, 2), (1, WIDE))  # (rows, panels)
_FEW = 4  # rows up to which weights are read about as fast as memory gives them
_AHEAD = 1024  # elements between what is read and what is asked for


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


def prefetch(builder: Any, pointer: Any) -> None:
    """Ask for the line to be read; any address is allowed."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    ask = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
    builder.call(ask, [builder.bitcast(pointer, byte), *(ir.Constant(word, i) for i in (0, 3, 1))])


def _tile(rows: int, panels: int) -> Any:
    """An intrinsic: out[o + r*os + 16*p + l] = sum_k x[a + r*xs + k*xk] * w[b + p*wp + k*wk + l] for l < 16; k >= 1."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context, x, a, xs, xk, w, b, wk, wp, count, out, o, os):  # type: ignore[no-untyped-def]
        number = types.intp
        signature = types.void(x, *[number] * 3, w, *[number] * 4, out, number, number)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            data = {i: context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 4, 9)}
            a, xs, xk, b, wk, wp, count, o, os = (args[i] for i in (1, 2, 3, 5, 6, 7, 8, 10, 11))
            index, vector = a.type, _lanes(ir.FloatType())
            x_rows = [
                builder.gep(data[0], [builder.add(a, builder.mul(xs, ir.Constant(index, r)))]) for r in range(rows)
            ]
            firsts = [builder.add(b, builder.mul(wp, ir.Constant(index, p))) for p in range(panels)]
            weights, entry = [builder.gep(data[4], [first]) for first in firsts], builder.block
            loop, done = builder.append_basic_block("multiply"), builder.append_basic_block("store")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(index)
            k.add_incoming(ir.Constant(index, 0), entry)
            sums = [builder.phi(vector) for _ in range(rows * panels)]
            step = builder.mul(k, wk)
            x_bf16, w_bf16 = (signature.args[i].dtype == types.uint16 for i in (0, 4))
            columns = [_load(builder, builder.gep(panel, [step]), w_bf16) for panel in weights]
            if rows <= _FEW:
                for panel in weights:
                    prefetch(builder, builder.gep(panel, [builder.add(step, ir.Constant(index, _AHEAD))]))
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
            )
            results = []
            for r, row in enumerate(x_rows):
                factor = _splat(builder, _load_one(builder, builder.gep(row, [builder.mul(k, xk)]), x_bf16), vector)
                for column, total in zip(columns, sums[r * panels : (r + 1) * panels], strict=True):
                    results.append(builder.call(fma, [factor, column, total]))
                    total.add_incoming(ir.Constant(vector, [0.0] * LANES), entry)
                    total.add_incoming(results[-1], loop)
            following = builder.add(k, ir.Constant(index, 1))
            k.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
            builder.position_at_end(done)
            for i, result in enumerate(results):
                first = builder.add(o, builder.mul(os, ir.Constant(index, i // panels)))
                target = builder.gep(data[9], [builder.add(first, ir.Constant(index, i % panels * LANES))])
                builder.store(result, builder.bitcast(target, vector.as_pointer())).align = 4
            return context.get_dummy_value()

        return signature, generate

    return tile


_tile6, _tile4, _tile2, _tile1, _tile3x2, _tile2x2, _tile1x4 = (_tile(*shape) for shape in _SHAPES)


@serial
def panel_product(x, a, xs, xk, rows, w, b, wk, count, out, o, os):  # type: ignore[no-untyped-def]
    """16 columns of a product for `rows` rows, in tiles of 6, 4, 2 and 1; operands as in `_tile`."""
    row = 0
    while row + 6 <= rows and rows - row != 8:  # 4 + 4 keeps more chains in flight than 6 + 2
        _tile6(x, a + row * xs, xs, xk, w, b, wk, 0, count, out, o + row * os, os)
        row += 6
    while row + 4 <= rows:
        _tile4(x, a + row * xs, xs, xk, w, b, wk, 0, count, out, o + row * os, os)
        row += 4
    if row + 2 <= rows:
        _tile2(x, a + row * xs, xs, xk, w, b, wk, 0, count, out, o + row * os, os)
        row += 2
    if row < rows:
        _tile1(x, a + row * xs, xs, xk, w, b, wk, 0, count, out, o + row * os, os)


@serial
def panels_product(x, a, xs, xk, rows, w, b, wk, wp, panels, count, out, o, os):  # type: ignore[no-untyped-def]
    """`panels` neighbouring panels, `wp` elements apart: few rows take several at once, for more chains in flight."""
    p = 0
    if rows == 1:
        while p + WIDE <= panels:
            _tile1x4(x, a, xs, xk, w, b + p * wp, wk, wp, count, out, o + p * LANES, os)
            p += WIDE
    elif rows == 2:
        while p + 2 <= panels:
            _tile2x2(x, a, xs, xk, w, b + p * wp, wk, wp, count, out, o + p * LANES, os)
            p += 2
    elif rows == 3:
        while p + 2 <= panels:
            _tile3x2(x, a, xs, xk, w, b + p * wp, wk, wp, count, out, o + p * LANES, os)
            p += 2
    while p < panels:
        panel_product(x, a, xs, xk, rows, w, b + p * wp, wk, count, out, o + p * LANES, os)
        p += 1
