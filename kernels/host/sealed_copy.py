"""Copies that are digested in the same pass: xxh3-64 of the very registers that were stored. Knows addresses alone.

After the specification of XXH3 with its default secret and seed 0, for more than 240 bytes. One call copies many
extents without the interpreter; each byte of the source is read once, so a writer that changes it meanwhile changes the
copy and its digest alike.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

# Shorter inputs have another definition; whoever calls digests them otherwise.
LEAST_BYTES = 241

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = np.array([_PRIMES_32[2], *_PRIMES_64[:4], _PRIMES_32[1], _PRIMES_64[4], _PRIMES_32[0]], np.uint64)
_MERGE = np.frombuffer(_SECRET[11:75].tobytes(), "<u8")
_AVALANCHE = 0x165667919E3779F9
_STRIPE = 64
_STRIPES = (len(_SECRET) - _STRIPE) // 8  # of a block: each takes the secret 8 bytes further on
_BLOCK = _STRIPES * _STRIPE
# Stores that go past the caches take addresses of this alignment. They leave the cache to the source, and need not read
# the destination before: 18 GB/s of one core where others have 13.
_STREAMED = 16

_intrinsic: Any = intrinsic  # its types count the compiler's argument as the caller's
_WORD = ir.IntType(64)
_LANES = ir.VectorType(_WORD, 8)
_SWAPPED = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])


def _pointer(builder: Any, base: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(base, ir.Constant(_WORD, offset)), _LANES.as_pointer())


class _Once(ir.LoadInstr):  # type: ignore[misc]
    """A volatile load: the compiler reads the memory here and nowhere else."""

    def descr(self, buf: list[str]) -> None:
        super().descr(buf)
        buf[-1] = buf[-1].replace("load ", "load volatile ", 1)


def _load(builder: Any, base: Any, offset: int) -> Any:
    loaded = builder.load(_pointer(builder, base, offset))
    loaded.align = 1
    return loaded


def _load_once(builder: Any, base: Any, offset: int) -> Any:
    loaded = _Once(builder.block, _pointer(builder, base, offset))
    loaded.align = 1
    builder._insert(loaded)
    return loaded


def _store(builder: Any, value: Any, base: Any, offset: int, streamed: bool) -> None:
    stored = builder.store(value, _pointer(builder, base, offset))
    stored.align = _STREAMED if streamed else 1
    if streamed:
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _splat(value: int) -> Any:
    return ir.Constant(_LANES, [value] * 8)


def _mixed(builder: Any, sums: Any, data: Any, key: Any) -> Any:
    """Sums after one stripe: low times high half of each keyed word, and the word beside it."""
    keyed = builder.xor(data, key)
    product = builder.mul(builder.and_(keyed, _splat(0xFFFFFFFF)), builder.lshr(keyed, _splat(32)))
    return builder.add(sums, builder.add(product, builder.shuffle_vector(data, data, _SWAPPED)))


def _scrambled(builder: Any, sums: Any, key: Any) -> Any:
    folded = builder.xor(sums, builder.lshr(sums, _splat(47)))
    return builder.mul(builder.xor(folded, key), _splat(_PRIMES_32[0]))


def _absorbed(builder: Any, sums: Any, stripe: int, source: Any, target: Any, secret: Any, streamed: bool) -> Any:
    """Copies one stripe; sums after it."""
    data = _load_once(builder, source, _STRIPE * stripe)
    _store(builder, data, target, _STRIPE * stripe, streamed)
    return _mixed(builder, sums, data, _load(builder, secret, 8 * stripe))


def _absorbing_blocks(streamed: bool) -> Any:
    """An intrinsic (source, target, secret, sums, blocks) that copies so many blocks, one at least, and adds them to
    the 8 words at `sums`.

    They stay in registers until the end: written once a block, they more than halved the speed of streamed stores in
    every other process, depending on where they lay.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, target, secret, at, blocks = arguments
        first, loop, done = builder.block, builder.append_basic_block("block"), builder.append_basic_block("done")
        before = _load(builder, at, 0)
        builder.branch(loop)
        builder.position_at_end(loop)
        index, sums = builder.phi(_WORD), builder.phi(_LANES)
        offset = builder.mul(index, ir.Constant(_WORD, _BLOCK))
        here, there = builder.add(source, offset), builder.add(target, offset)
        after = sums
        for stripe in range(_STRIPES):
            after = _absorbed(builder, after, stripe, here, there, secret, streamed)
        after = _scrambled(builder, after, _load(builder, secret, len(_SECRET) - _STRIPE))
        following = builder.add(index, ir.Constant(_WORD, 1))
        builder.cbranch(builder.icmp_unsigned("<", following, blocks), loop, done)
        for phi, initial, later in ((index, ir.Constant(_WORD, 0), following), (sums, before, after)):
            phi.add_incoming(initial, first)
            phi.add_incoming(later, loop)
        builder.position_at_end(done)
        _store(builder, after, at, 0, False)
        return context.get_dummy_value()

    def absorb(_context: Any, source: Any, target: Any, secret: Any, sums: Any, blocks: Any) -> Any:
        return types.void(*[types.uint64] * 5), generate

    return _intrinsic(absorb)


@_intrinsic
def _stripe(_context: Any, source: Any, target: Any, secret: Any, sums: Any) -> Any:
    """Copies one stripe and adds it to the 8 words at `sums`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, target, secret, at = arguments
        sums = _absorbed(builder, _load(builder, at, 0), 0, source, target, secret, False)
        _store(builder, sums, at, 0, False)
        return context.get_dummy_value()

    return types.void(*[types.uint64] * 4), generate


_blocks, _streamed_blocks = _absorbing_blocks(False), _absorbing_blocks(True)


@_intrinsic
def _copy_byte(_context: Any, source: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        source, target = (builder.inttoptr(each, ir.IntType(8).as_pointer()) for each in arguments)
        builder.store(builder.load(source), target)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@_intrinsic
def _folded_product(_context: Any, left: Any, right: Any) -> Any:
    """Both halves of a product of 128 bits, xored."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(each, wide) for each in arguments))
        high = builder.lshr(product, ir.Constant(wide, 64))
        return builder.xor(builder.trunc(product, _WORD), builder.trunc(high, _WORD))

    return types.uint64(types.uint64, types.uint64), generate


@_intrinsic
def _fence(_context: Any) -> Any:
    """Streamed stores are in memory before what follows."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_word = np.uint64
_native = numba.njit(nogil=True, cache=True, error_model="numpy")


@_native
def _merged(sums, size):  # type: ignore[no-untyped-def]
    digest = size * _word(_PRIMES_64[0])
    for pair in range(4):
        digest += _folded_product(sums[2 * pair] ^ _MERGE[2 * pair], sums[2 * pair + 1] ^ _MERGE[2 * pair + 1])
    digest ^= digest >> _word(37)
    digest *= _word(_AVALANCHE)
    return digest ^ (digest >> _word(32))


@_native
def _copy_one(source, target, size, sums, secret):  # type: ignore[no-untyped-def]
    """Digest of `size` bytes as they were stored at `target`."""
    for lane in range(8):
        sums[lane] = _START[lane]
    to, done, block, stripe = _word(sums.ctypes.data), _word(0), _word(_BLOCK), _word(_STRIPE)
    blocks = (size - _word(1)) // block
    if blocks and target % _word(_STREAMED) == 0:
        _streamed_blocks(source, target, secret, to, blocks)
    elif blocks:
        _blocks(source, target, secret, to, blocks)
    done += blocks * block
    key = secret
    while done + stripe < size:
        _stripe(source + done, target + done, key, to)
        done, key = done + stripe, key + _word(8)
    last = secret + _word(len(_SECRET) - _STRIPE - 7)
    if done + stripe == size:
        _stripe(source + done, target + done, last, to)
        return _merged(sums, size)
    while done < size:
        _copy_byte(source + done, target + done)
        done += _word(1)
    # The last stripe reaches back into bytes that were stored already: it is read where they are.
    _stripe(target + size - stripe, target + size - stripe, last, to)
    return _merged(sums, size)


@numba.njit("int64(uint64, uint64[:, ::1])", nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def copy_sealed(source: int, rows: npt.NDArray[np.uint64]) -> int:
    """Copies extents from the memory at address `source` and compares the digest of each copy.

    rows: uint64 [n, 4], of each its offset from `source`, its bytes (`LEAST_BYTES` at least), its xxh3-64, and the
        address that it goes to. The caller keeps all of this memory alive and writable.

    Returns the number of the first row whose copy has another digest, after which nothing was copied; -1 if none has.
    """
    sums, wrong = np.empty(8, np.uint64), -1
    secret = _word(_SECRET.ctypes.data)
    for index in range(len(rows)):
        found = _copy_one(source + rows[index, 0], rows[index, 3], rows[index, 1], sums, secret)
        if found != rows[index, 2]:
            wrong = index
            break
    _fence()
    return wrong
