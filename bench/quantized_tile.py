"""A prototype of the register tile that keeps weights quantized: FP8 or FP4 panels decoded as they are multiplied.

For measurement (bench.quantized): what is multiplied is bit for bit what a load would have dequantized. x86 with AVX2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compile import Array, parallel, serial

LANES, WIDE = 16, 4
FP8_BLOCK, FP4_GROUP = 128, 32
FP8_FACTOR = 2.0**120  # what a scale is multiplied with: E4M3's exponent read as fp32's is 120 too small
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_F32, _I32, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _WORDS, _CODES = (ir.VectorType(kind, LANES) for kind in (_F32, _I32, _I8))


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = 1 if vector is _CODES else 4
    return loaded


def _splat(builder: Any, scalar: Any) -> Any:
    empty = ir.Constant(_FLOATS, ir.Undefined)
    inserted = builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(inserted, empty, ir.Constant(_WORDS, [0] * LANES))


def _fp8(builder: Any, word: Any) -> Any:
    """E4M3 codes, zero-extended, as fp32 times 2**-120."""
    sign = builder.shl(builder.and_(word, _all(0x80)), _all(24))
    rest = builder.shl(builder.and_(word, _all(0x7F)), _all(20))
    return builder.bitcast(builder.or_(sign, rest), _FLOATS)


def _fp4(builder: Any, word: Any) -> Any:
    """E2M1 codes in the low four bits as fp32."""
    half, indices = ir.VectorType(_F32, 8), ir.VectorType(_I32, 8)
    look = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(half, [half, indices]), "llvm.x86.avx2.permps"
    )
    table, undefined = ir.Constant(half, list(_MAGNITUDES)), ir.Constant(_WORDS, ir.Undefined)
    parts = []
    for first in (0, 8):
        lanes = ir.Constant(indices, list(range(first, first + 8)))
        parts.append(builder.call(look, [table, builder.shuffle_vector(word, undefined, lanes)]))
    joined = builder.shuffle_vector(*parts, ir.Constant(_WORDS, list(range(LANES))))
    sign = builder.and_(builder.shl(word, _all(28)), _all(0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(joined, _WORDS), sign), _FLOATS)


def _fma(builder: Any, factor: Any, column: Any, total: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [factor, column, total]
    )


def _inputs(
    builder: Any, words: list[Any], factors: list[Any], x_rows: list[Any], k: Any, totals: list[Any]
) -> list[Any]:
    """The totals after one step of codes: one input of FP8, two of FP4 (which has a factor for every lane)."""
    fp8 = factors[0][1]
    each = 1 if fp8 else 2
    for part in range(each):
        raw = [_fp8(builder, w) if fp8 else _fp4(builder, builder.lshr(w, _all(4 * part))) for w in words]
        columns = [builder.fmul(value, factor) for value, (factor, _) in zip(raw, factors, strict=True)]
        place = builder.add(builder.mul(k, ir.Constant(k.type, each)), ir.Constant(k.type, part))
        numbers = [_splat(builder, builder.load(builder.gep(row, [place]))) for row in x_rows]
        pairs = [(number, column) for number in numbers for column in columns]
        totals = [_fma(builder, *pair, total) for pair, total in zip(pairs, totals, strict=True)]
    return totals


def _loop(builder: Any, count: Any, targets: list[Any], step: Any) -> None:
    """Runs `step(k, totals)` for k < count over totals that are loaded from and stored to `targets`."""
    begun, entry = [_load(builder, target, _FLOATS) for target in targets], builder.block
    loop, done = builder.append_basic_block("multiply"), builder.append_basic_block("store")
    builder.branch(loop)
    builder.position_at_end(loop)
    k, sums = builder.phi(count.type), [builder.phi(_FLOATS) for _ in targets]
    totals = step(k, list(sums))
    following = builder.add(k, ir.Constant(count.type, 1))
    first = [ir.Constant(count.type, 0), *begun]
    for phi, before, after in zip([k, *sums], first, [following, *totals], strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    for target, total in zip(targets, totals, strict=True):
        builder.store(total, builder.bitcast(target, _FLOATS.as_pointer())).align = 4


def _tile(rows: int, panels: int, bits: int) -> Any:
    """An intrinsic that adds one block: out[o + r*os + 16*p + l] += sum_k x[a + r*xs + k] * (w[..] * scale), in order.

    FP8: a byte per weight and one factor per panel. FP4: a byte holds inputs 2k (low) and 2k + 1; 16 factors per panel.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context, x, a, xs, w, b, wp, f, fb, fp, count, out, o, os):  # type: ignore[no-untyped-def]
        n = types.intp
        signature = types.void(x, n, n, w, n, n, f, n, n, n, out, n, n)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            data = {i: context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3, 6, 10)}
            a, xs, b, wp, fb, fp, count, o, os = (args[i] for i in (1, 2, 4, 5, 7, 8, 9, 11, 12))

            def at(which: int, base: Any, step: Any, times: int) -> Any:
                return builder.gep(data[which], [builder.add(base, builder.mul(step, ir.Constant(a.type, times)))])

            x_rows = [at(0, a, xs, r) for r in range(rows)]
            weights = [at(3, b, wp, p) for p in range(panels)]
            scales = [at(6, fb, fp, p) for p in range(panels)]
            fp8 = bits == 8
            factors = [(_splat(builder, builder.load(s)) if fp8 else _load(builder, s, _FLOATS), fp8) for s in scales]
            starts = [at(10, o, os, r) for r in range(rows)]
            targets = [builder.gep(s, [ir.Constant(a.type, p * LANES)]) for s in starts for p in range(panels)]

            def step(k: Any, totals: list[Any]) -> list[Any]:
                offset = builder.mul(k, ir.Constant(a.type, LANES))
                codes = [_load(builder, builder.gep(panel, [offset]), _CODES) for panel in weights]
                words = [builder.zext(code, _WORDS) for code in codes]
                return _inputs(builder, words, factors, x_rows, k, totals)

            _loop(builder, count, targets, step)
            return context.get_dummy_value()

        return signature, generate

    return tile


_one8, _four8, _one4, _four4 = _tile(1, 4, 8), _tile(4, 1, 8), _tile(1, 4, 4), _tile(4, 1, 4)


@serial
def _panels(x, rows, codes, factors, p, out, fp8):  # type: ignore[no-untyped-def]
    """Panels p .. p + 3 for all rows (1, or a multiple of 4)."""
    inner = x.shape[1]
    blocks = inner // (FP8_BLOCK if fp8 else FP4_GROUP)
    size, width = codes.shape[1] * LANES, factors.shape[2]
    for block in range(blocks):
        b, f = p * size + block * (size // blocks), (p * blocks + block) * width
        for row in range(0, rows, 4):
            o = row * out.shape[1] + p * LANES
            a = row * inner + block * (inner // blocks)
            if rows == 1 and fp8:
                _one8(x, a, inner, codes, b, size, factors, f, blocks * width, FP8_BLOCK, out, o, out.shape[1])
            elif rows == 1:
                _one4(x, a, inner, codes, b, size, factors, f, blocks * width, FP4_GROUP // 2, out, o, out.shape[1])
            else:
                for q in range(WIDE):
                    c, g, h = b + q * size, f + q * blocks * width, o + q * LANES
                    if fp8:
                        _four8(x, a, inner, codes, c, 0, factors, g, 0, FP8_BLOCK, out, h, out.shape[1])
                    else:
                        _four4(x, a, inner, codes, c, 0, factors, g, 0, FP4_GROUP // 2, out, h, out.shape[1])


@parallel
def product(x: Array, codes: Array, factors: Array, fp8: bool, out: Array) -> None:
    """out [rows, 16 * panels] = x [rows, in] times panels [panels, in, 16] (FP4: in / 2), rows 1 or a multiple of 4."""
    out[:] = 0
    for task in prange(codes.shape[0] // WIDE):
        _panels(x, x.shape[0], codes, factors, task * WIDE, out, fp8)


def pack(codes: np.ndarray, scale: np.ndarray, fp8: bool) -> tuple[np.ndarray, np.ndarray]:
    """Panels and factors of codes uint8 [out, in] (FP4: in / 2) and fp32 scales, out a multiple of 64."""
    panels = codes.reshape(-1, LANES, codes.shape[1]).transpose(0, 2, 1).copy()
    if not fp8:
        return panels, scale.reshape(-1, LANES, scale.shape[1]).transpose(0, 2, 1).astype(np.float32).copy()
    each = np.repeat(scale, FP8_BLOCK // LANES, 0)[: len(panels), :, None] * np.float32(FP8_FACTOR)
    return panels, each.astype(np.float32).copy()
