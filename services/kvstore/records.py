"""Records: what the store keeps under a name. Knows names, sizes and digests; holds no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fabric.records import Extent
from fabric.retention import RetentionClass

ROOT = bytes(32)  # the parent of a prefix's first block


class RecordKind(StrEnum):
    """BLOCK: all global groups of one block. ANCHOR: the window groups at the end of the block with the same key."""

    BLOCK = "block"
    ANCHOR = "anchor"


class RecordId(NamedTuple):
    """A tuple, for a lookup makes and hashes two of them for every block."""

    kind: RecordKind
    key: bytes  # 32 bytes: keyed hash over the whole prefix up to this block


class Identity(NamedTuple):
    """Whose KV it is: records of another identity are never a hit. A tuple, for it is compared for every name."""

    model_revision: str
    layout_fingerprint: str


class BlockName(NamedTuple):
    """A full block of a prefix and the tokens it must stand for, as little-endian uint32. A tuple, for a read makes one
    for each of its blocks.

    `parent`: key of the block that it must continue; None where who asks does not know it.
    """

    key: bytes
    tokens: bytes
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One verified record at `[offset, offset + size)` of the tier; extent offsets count from the record's start."""

    id: RecordId
    identity: Identity
    tokens: bytes
    parent: bytes
    offset: int
    size: int
    extents: tuple[Extent, ...]
    retention: RetentionClass = RetentionClass.DEFAULT

    def answers(self, name: BlockName, identity: Identity) -> bool:
        """Whether this record is what `name` asks for: tokens and parent are compared, not trusted to the key."""
        continues = name.parent is None or self.parent == name.parent
        return self.id.key == name.key and self.tokens == name.tokens and continues and self.identity == identity

    @property
    def parent_id(self) -> RecordId | None:
        """What must outlive this record."""
        return parent_of(self.id, self.parent)


def parent_of(record: RecordId, parent: bytes) -> RecordId | None:
    """What must outlive a record whose block continues the block `parent`: an anchor's block, a block's parent."""
    if record.kind is RecordKind.ANCHOR:
        return RecordId(RecordKind.BLOCK, record.key)
    return None if parent == ROOT else RecordId(RecordKind.BLOCK, parent)


def sample(record: RecordId) -> int:
    """An even spread number: keys are keyed hashes, any two bytes of one are spread evenly."""
    return int.from_bytes(record.key[:2], "little")
