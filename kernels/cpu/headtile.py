"""Register tiles of attention over rows that lie anywhere: four heads at once, keys and values read where they stand.

A score is eight sums over every eighth channel, added in one fixed order; a mixture is one chain over the keys. An
output's bits depend on its own query and keys alone: not on how many keys a tile takes, or what lies beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compile import serial
from kernels.cpu.numbers import widen
from kernels.cpu.tile import prefetch

HEADS = 4
_LANES = 8
_FLOAT, _WORD = ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, _LANES)


def _load(builder: Any, pointer: Any, is_bf16: bool) -> Any:
    """Eight stored elements as fp32."""
    if not is_bf16:
        loaded = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
        loaded.align = 4
        return loaded
    wide = ir.VectorType(_WORD, _LANES)
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), _LANES).as_pointer()))
    halves.align = 2
    return builder.bitcast(builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * _LANES)), _VECTOR)


def _pick(builder: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_WORD, len(lanes)), lanes))


def _pairs(builder: Any, left: Any, right: Any) -> Any:
    """Neighbours of two vectors of four, added."""
    return builder.fadd(_pick(builder, left, right, [0, 2, 4, 6]), _pick(builder, left, right, [1, 3, 5, 7]))


def _totals(builder: Any, sums: list[Any]) -> Any:
    """The totals of four vectors of eight as one of four."""
    halves = [
        builder.fadd(_pick(builder, one, one, [0, 1, 2, 3]), _pick(builder, one, one, [4, 5, 6, 7])) for one in sums
    ]
    return _pairs(builder, _pairs(builder, *halves[:2]), _pairs(builder, *halves[2:]))


def _fma(builder: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_LANES}f32")


class _Loop:
    """`for i in range(0, count, step)` over sums that start as given; at least one turn."""

    def __init__(self, builder: Any, count: Any, step: int, starts: list[Any]) -> None:
        self._builder, self._count, self._step = builder, count, ir.Constant(count.type, step)
        entry, self._body = builder.block, builder.append_basic_block("turn")
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(count.type)
        self.index.add_incoming(ir.Constant(count.type, 0), entry)
        self.sums = [builder.phi(_VECTOR) for _ in starts]
        for phi, start in zip(self.sums, starts, strict=True):
            phi.add_incoming(start, entry)

    def close(self, results: list[Any]) -> None:
        """End the body, whose new sums are `results`; building goes on behind the loop."""
        builder = self._builder
        for phi, result in zip(self.sums, results, strict=True):
            phi.add_incoming(result, self._body)
        following = builder.add(self.index, self._step)
        self.index.add_incoming(following, self._body)
        done = builder.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, done)
        builder.position_at_end(done)


def _score_tile(keys: int) -> Any:
    """An intrinsic: scores[i + j, h] = sum of queries[h, c] * stored[places[i + j] + c] over c < count, j < keys."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context, queries, stored, places, i, count, scores):  # type: ignore[no-untyped-def]
        number = types.intp
        signature = types.void(queries, stored, places, number, number, scores)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            arrays = [context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 1, 2, 5)]
            (query, key, place, score), i, count = [one.data for one in arrays], args[3], args[4]
            index, is_bf16 = count.type, signature.args[1].dtype == types.uint16
            stride = builder.extract_value(arrays[0].shape, 1)
            heads = [builder.gep(query, [builder.mul(stride, ir.Constant(index, h))]) for h in range(HEADS)]
            nth = [builder.add(i, ir.Constant(index, j)) for j in range(keys)]
            rows = [builder.gep(key, [builder.load(builder.gep(place, [n]))]) for n in nth]
            loop = _Loop(builder, count, _LANES, [ir.Constant(_VECTOR, [0.0] * _LANES)] * (HEADS * keys))
            fma, results = _fma(builder), list(loop.sums)
            values = [_load(builder, builder.gep(row, [loop.index]), is_bf16) for row in rows]
            for h, head in enumerate(heads):
                factor = _load(builder, builder.gep(head, [loop.index]), False)
                for j, value in enumerate(values):
                    at = j * HEADS + h
                    results[at] = builder.call(fma, [factor, value, loop.sums[at]])
            loop.close(results)
            for j, n in enumerate(nth):
                target = builder.gep(score, [builder.mul(n, ir.Constant(index, HEADS))])
                totals = _totals(builder, results[j * HEADS : (j + 1) * HEADS])
                builder.store(totals, builder.bitcast(target, totals.type.as_pointer())).align = 4
            return context.get_dummy_value()

        return signature, generate

    return tile


def _mix_tile(vectors: int) -> Any:
    """An intrinsic: mixed[h, c + l] += sum of weights[i, h] * stored[places[i] + c + l], first <= i < first + count."""

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(_context, weights, stored, places, first, count, c, mixed):  # type: ignore[no-untyped-def]
        number = types.intp
        signature = types.void(weights, stored, places, number, number, number, mixed)

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            arrays = [context.make_array(signature.args[n])(context, builder, args[n]) for n in (0, 1, 2, 6)]
            (weight, value, place, mix), (first, count, c) = [one.data for one in arrays], args[3:6]
            index, is_bf16 = count.type, signature.args[1].dtype == types.uint16
            stride, targets = builder.extract_value(arrays[3].shape, 1), []
            for n in range(HEADS * vectors):
                at = builder.add(builder.mul(stride, ir.Constant(index, n // vectors)), c)
                target = builder.gep(mix, [builder.add(at, ir.Constant(index, n % vectors * _LANES))])
                targets.append(builder.bitcast(target, _VECTOR.as_pointer()))
            starts = [builder.load(target, align=4) for target in targets]
            loop, fma, results = _Loop(builder, count, 1, starts), _fma(builder), []
            i = builder.add(first, loop.index)
            row = builder.gep(value, [builder.add(builder.load(builder.gep(place, [i])), c)])
            values = [
                _load(builder, builder.gep(row, [ir.Constant(index, v * _LANES)]), is_bf16) for v in range(vectors)
            ]
            # Rows lie too far apart for the hardware to see that the next columns come next.
            prefetch(builder, builder.gep(row, [ir.Constant(index, 2 * vectors * _LANES)]))
            for h in range(HEADS):
                at = builder.add(builder.mul(i, ir.Constant(index, HEADS)), ir.Constant(index, h))
                one = builder.insert_element(
                    ir.Constant(_VECTOR, ir.Undefined), builder.load(builder.gep(weight, [at])), ir.Constant(_WORD, 0)
                )
                factor = _pick(builder, one, one, [0] * _LANES)
                for v, part in enumerate(values):
                    results.append(builder.call(fma, [factor, part, loop.sums[h * vectors + v]]))
            loop.close(results)
            for result, target in zip(results, targets, strict=True):
                builder.store(result, target).align = 4
            return context.get_dummy_value()

        return signature, generate

    return tile


_score3, _score1 = _score_tile(3), _score_tile(1)
_mix3, _mix1 = _mix_tile(3), _mix_tile(1)


@serial
def score_keys(queries, stored, places, width, scores):  # type: ignore[no-untyped-def]
    """scores [keys, 4] of queries [4, >= width] with the rows of `width` elements at places [keys] of flat `stored`."""
    keys, whole, i = len(places), width // _LANES * _LANES, 0
    scores[:] = 0.0
    if whole > 0:
        while i + 3 <= keys:
            _score3(queries, stored, places, i, whole, scores)
            i += 3
        while i < keys:
            _score1(queries, stored, places, i, whole, scores)
            i += 1
    if whole < width:
        for i in range(keys):
            for h in range(HEADS):
                for c in range(whole, width):
                    scores[i, h] += queries[h, c] * widen(stored[places[i] + c])


@serial
def mix_values(weights, stored, places, first, count, width, mixed):  # type: ignore[no-untyped-def]
    """mixed [4, width] += weights [keys, 4] of keys first .. + count times their rows; count >= 1."""
    c = 0
    while c + 3 * _LANES <= width:
        _mix3(weights, stored, places, first, count, c, mixed)
        c += 3 * _LANES
    while c + _LANES <= width:
        _mix1(weights, stored, places, first, count, c, mixed)
        c += _LANES
    for at in range(c, width):
        for h in range(HEADS):
            for i in range(first, first + count):
                mixed[h, at] += weights[i, h] * widen(stored[places[i] + at])
