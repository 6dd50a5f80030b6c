"""Prefix keys: the identity of a block of tokens in its context. Knows tokens and salts; knows no storage."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

_SALT_CONTEXT = "deepinfer 2026-11 prefix salt v1"
_ROOT = bytes(32)


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """What, besides the tokens, decides the bytes of a cached block."""

    model_revision: str
    layout_fingerprint: str
    window_policy: str  # "exact", or a policy whose records may differ in their bits
    block_tokens: int


@dataclass(frozen=True, slots=True)
class ImageMark:
    """An image whose placeholder tokens start at `position`; `digest` is its full 256-bit content hash."""

    position: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Everything a hit compares besides the key, so that a key collision can never serve other tokens."""

    salt: bytes
    tokens: tuple[int, ...]
    images: tuple[bytes, ...]


def block_keys(
    salt: bytes, tokens: Sequence[int], identity: PrefixIdentity, image_hashes: Sequence[ImageMark] = ()
) -> list[bytes]:
    """32-byte keys of the full blocks of `tokens`, each chained to the key before it.

    Key = keyed BLAKE3 over length-prefixed fields; the key material is derived from the tenant's `salt`, so equal
    prompts of two tenants share nothing.
    """
    chain = KeyChain(salt, identity, image_hashes)
    chain.grow(tokens)
    return list(chain.keys)


class KeyChain:
    """Keys and contents of one growing token sequence; blocks are keyed once, when they become full."""

    def __init__(self, salt: bytes, identity: PrefixIdentity, image_hashes: Sequence[ImageMark] = ()) -> None:
        self._salt, self._identity, self._images = salt, identity, tuple(image_hashes)
        self._hasher = blake3(key=blake3(salt, derive_key_context=_SALT_CONTEXT).digest())
        fields = (identity.model_revision, identity.layout_fingerprint, identity.window_policy)
        for field in (*(value.encode() for value in fields), struct.pack("<I", identity.block_tokens)):
            self._hasher.update(_prefixed(field))
        self.keys: list[bytes] = []
        self.contents: list[BlockContent] = []

    def grow(self, tokens: Sequence[int]) -> None:
        """Add keys for the blocks of `tokens`, the sequence from its start, that are full and not keyed yet."""
        size = self._identity.block_tokens
        for index in range(len(self.keys), len(tokens) // size):
            self._append(index, tuple(tokens[index * size : (index + 1) * size]))

    def parent(self, index: int) -> bytes:
        """Key of the block before `index`; 32 zero bytes for the first."""
        return self.keys[index - 1] if index else _ROOT

    def _append(self, index: int, tokens: tuple[int, ...]) -> None:
        first = index * self._identity.block_tokens
        images = tuple(mark.digest for mark in self._images if first <= mark.position < first + len(tokens))
        hasher = self._hasher.copy()
        hasher.update(_prefixed(self.parent(index)))
        hasher.update(_prefixed(np.asarray(tokens, dtype="<i8").tobytes()))
        hasher.update(struct.pack("<I", len(images)))
        for digest in images:
            hasher.update(_prefixed(digest))
        self.keys.append(hasher.digest())
        self.contents.append(BlockContent(self._salt, tokens, images))


def _prefixed(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
