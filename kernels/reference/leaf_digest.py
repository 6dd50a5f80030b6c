"""Leaf-tree digest of an extent's canonical bytes, in numpy: the definition. Knows bytes; knows no GPU and no receipt.

All arithmetic is modulo 2^64. A word is 8 bytes, little endian; a ragged last word is filled with zeros. `mix` is the
64-bit finalizer of MurmurHash3 (xor-shift 33, multiply, xor-shift 33, multiply, xor-shift 33), a bijection.

    leaf i   = bytes [4096 i, 4096 (i + 1)) of the extent; the last one is as long as what is left
    L(i)     = mix(sum over the leaf's words j of mix(word[j] ^ (j + 1) * WORD_KEY) + bytes of the leaf * LENGTH_KEY)
    digest   = mix(sum over the leaves i of mix(L(i) ^ (i + 1) * LEAF_KEY) + bytes of the extent * LENGTH_KEY)

What it detects. Sums of 64-bit terms have one value in every order, so that any number of lanes may form them; the
order of words and leaves is in the keys. Each step is a bijection of any one of its inputs while the others stay:
whatever changes inside one aligned word, a flipped bit above all, changes the digest with certainty, and so does a
length whose bytes stay. Any other change (swapped or repeated leaves, a cut, a stale block) goes undetected with
probability about 2^-64. It is a checksum, no seal against forgery: who may write digests may write any.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LEAF_BYTES = 4096
LEAF_WORDS = LEAF_BYTES // 8
WORD_KEY = 0x9E3779B97F4A7C15
LEAF_KEY = 0xD1B54A32D192ED03
LENGTH_KEY = 0xC2B2AE3D27D4EB4F
MIX_FIRST = 0xFF51AFD7ED558CCD
MIX_SECOND = 0xC4CEB9FE1A85EC53

Words: TypeAlias = NDArray[np.uint64]


def leaf_digest(memory: NDArray[np.uint8]) -> int:
    """Digest of contiguous bytes, uint8 [bytes]. Raises ValueError where there are none."""
    if memory.ndim != 1 or memory.dtype != np.uint8 or memory.size == 0:
        raise ValueError(f"a digest is of bytes, uint8 [n > 0], not of {memory.dtype} {list(memory.shape)}")
    leaves = _leaves(memory)
    total = _mix(leaves ^ _keys(len(leaves), LEAF_KEY)).sum(dtype=np.uint64)
    return int(_with_length(total[None], np.array([memory.size]))[0])


def _leaves(memory: NDArray[np.uint8]) -> Words:
    """L(i) of every leaf, uint64 [leaves]."""
    count = -(-memory.size // LEAF_BYTES)
    padded = np.zeros(count * LEAF_BYTES, np.uint8)
    padded[: memory.size] = memory
    words = padded.view("<u8").astype(np.uint64, copy=False).reshape(count, LEAF_WORDS)
    terms = _mix(words ^ _keys(LEAF_WORDS, WORD_KEY))
    terms.reshape(-1)[-(-memory.size // 8) :] = 0
    lengths = np.minimum(LEAF_BYTES, memory.size - np.arange(count) * LEAF_BYTES)
    return _with_length(terms.sum(axis=1, dtype=np.uint64), lengths)


def _with_length(sums: Words, lengths: NDArray[np.int64]) -> Words:
    return _mix(sums + lengths.astype(np.uint64) * np.uint64(LENGTH_KEY))


def _keys(count: int, key: int) -> Words:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(key)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(33))) * np.uint64(MIX_FIRST)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(MIX_SECOND)
    return words ^ (words >> np.uint64(33))
