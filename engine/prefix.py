"""Prefix keys: the identity of a block of tokens in its context. Knows tokens and salts; knows no storage."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from copy import copy
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
class RegionSalt:
    """Salts of a prompt whose first `region_tokens` tokens are a region that several tenants share by their own will.

    A block that lies wholly inside the region is keyed with the region's salt, every other one with the tenant's.
    """

    tenant: bytes
    region: bytes
    region_tokens: int


Salt = bytes | RegionSalt  # a tenant's alone, unless the prompt starts with a shared region


@dataclass(frozen=True, slots=True)
class BlockContent:
    """Everything a hit compares besides the key, so that a key collision can never serve other tokens."""

    salt: bytes
    tokens: tuple[int, ...]
    images: tuple[bytes, ...]


def block_keys(
    salt: Salt, tokens: Sequence[int], identity: PrefixIdentity, image_hashes: Sequence[ImageMark] = ()
) -> list[bytes]:
    """32-byte keys of the full blocks of `tokens`, each chained to the key before it.

    Key = keyed BLAKE3 over length-prefixed fields; the key material is derived from the tenant's `salt`, so equal
    prompts of two tenants share nothing but what both declared as a region.
    """
    chain = KeyChain(salt, identity, image_hashes)
    chain.grow(tokens)
    return list(chain.keys)


class KeyChain:
    """Keys and contents of one growing token sequence; blocks are keyed once, when they become full."""

    def __init__(self, salt: Salt, identity: PrefixIdentity, image_hashes: Sequence[ImageMark] = ()) -> None:
        self._identity, self._images = identity, tuple(image_hashes)
        salts = salt if isinstance(salt, RegionSalt) else RegionSalt(salt, b"", 0)
        # What a tenant's image looks like is no part of a region, whatever tokens stand in its place.
        self._region_tokens = min([salts.region_tokens, *(mark.position for mark in self._images)])
        self._tenant = _Keyed(salts.tenant, identity)
        self._region = _Keyed(salts.region, identity) if self._region_tokens else self._tenant
        self.keys: list[bytes] = []
        self.contents: list[BlockContent] = []

    def grow(self, tokens: Sequence[int]) -> None:
        """Add keys for the blocks of `tokens`, the sequence from its start, that are full and not keyed yet."""
        size = self._identity.block_tokens
        for index in range(len(self.keys), len(tokens) // size):
            self._append(index, tuple(tokens[index * size : (index + 1) * size]))

    def copy(self) -> KeyChain:
        """Another chain of the same tokens, which grows by itself."""
        other = copy(self)
        other.keys, other.contents = list(self.keys), list(self.contents)
        return other

    def parent(self, index: int) -> bytes:
        """Key of the block before `index`; 32 zero bytes for the first."""
        return self.keys[index - 1] if index else _ROOT

    def _append(self, index: int, tokens: tuple[int, ...]) -> None:
        first = index * self._identity.block_tokens
        images = tuple(mark.digest for mark in self._images if first <= mark.position < first + len(tokens))
        keyed = self._region if first + len(tokens) <= self._region_tokens else self._tenant
        hasher = keyed.hasher.copy()
        hasher.update(_prefixed(self.parent(index)))
        hasher.update(_prefixed(np.asarray(tokens, dtype="<i8").tobytes()))
        hasher.update(struct.pack("<I", len(images)))
        for digest in images:
            hasher.update(_prefixed(digest))
        self.keys.append(hasher.digest())
        self.contents.append(BlockContent(keyed.salt, tokens, images))


class _Keyed:
    """A hasher that has taken the fields which all keys of one salt share."""

    def __init__(self, salt: bytes, identity: PrefixIdentity) -> None:
        self.salt = salt
        self.hasher = blake3(key=blake3(salt, derive_key_context=_SALT_CONTEXT).digest())
        fields = (identity.model_revision, identity.layout_fingerprint, identity.window_policy)
        for field in (*(value.encode() for value in fields), struct.pack("<I", identity.block_tokens)):
            self.hasher.update(_prefixed(field))


def _prefixed(field: bytes) -> bytes:
    return struct.pack("<Q", len(field)) + field
