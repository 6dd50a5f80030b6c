"""Format: one record as it lies in a segment file. Knows bytes; opens nothing and trusts none of them.

    prelude: magic, header bytes, payload bytes, number of the segment, digest of all that and of the header
    header:  name, parent, identity, tokens, extents with their digests, when it was stored
    zeros up to a whole page: what is read past the page cache goes straight to where it belongs
    payload: the record as it lies in DRAM
    zeros up to a whole page

Records of the first version, whose payload follows the header at once, are read as well and no longer written. A record
that was erased is one page that says so and zeros; a scan steps over them.

The head names its segment: what a former file left on the same pages of a disk is no record of this one. The payload is
checked extent by extent where it is copied to.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash
from google.protobuf.message import DecodeError

from fabric.records import Extent
from fabric.retention import RetentionClass
from fabric.wire import pack_extents, pack_retention, unpack_extents, unpack_retention
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.kvstore.records import Identity, Record, RecordId, RecordKind, parent_of

PAGE = 4096  # unit of files: what a device writes whole, and what unbuffered reads are aligned to
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 30
_MAGIC, _FIRST_MAGIC = b"DIKVREC2", b"DIKVREC1"
_ERASED_MAGIC = b"DIKVGONE"
_PRELUDE = struct.Struct("<8sIQQ")
_ERASED = struct.Struct("<8sQQ")
_SEAL = struct.Struct("<Q")
PRELUDE_BYTES = _PRELUDE.size + _SEAL.size
_KINDS = {RecordKind.BLOCK: pb.RECORD_KIND_BLOCK, RecordKind.ANCHOR: pb.RECORD_KIND_ANCHOR}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """What a segment says of one record; `stored_at` in unix seconds: written then or, if it was moved, used last."""

    id: RecordId
    identity: Identity
    tokens: bytes
    parent: bytes
    size: int
    extents: tuple[Extent, ...]
    stored_at: float
    retention: RetentionClass = RetentionClass.DEFAULT

    @classmethod
    def of(cls, record: Record, stored_at: float) -> Stored:
        return cls(
            id=record.id,
            identity=record.identity,
            tokens=record.tokens,
            parent=record.parent,
            size=record.size,
            extents=tuple(record.extents),
            stored_at=stored_at,
            retention=record.retention,
        )

    @property
    def parent_id(self) -> RecordId | None:
        """What must outlive this record."""
        return parent_of(self.id, self.parent)

    def used(self, at: float) -> Stored:
        """The same, used last at that time."""
        return replace(self, stored_at=at)

    def placed(self, offset: int) -> Record:
        """The record as it lies at `offset` of the DRAM tier."""
        return Record(self.id, self.identity, self.tokens, self.parent, offset, self.size, self.extents, self.retention)


@dataclass(frozen=True, slots=True)
class Head:
    """A sound prelude and header: where the payload starts, and how long everything is, both in bytes."""

    stored: Stored
    payload_at: int
    nbytes: int


def pack_head(stored: Stored, segment: int) -> bytes:
    """Prelude and header; the payload starts on the next page."""
    header = pb.SegmentHeader(
        kind=_KINDS[stored.id.kind],
        key=stored.id.key,
        parent_key=stored.parent,
        model_revision=stored.identity.model_revision,
        layout_fingerprint=stored.identity.layout_fingerprint,
        token_ids=stored.tokens,
        extents=pack_extents(stored.extents),
        stored_at_ms=round(stored.stored_at * 1000),
        retention=pack_retention(stored.retention),
    ).SerializeToString()
    prelude = _PRELUDE.pack(_MAGIC, len(header), stored.size, segment)
    return prelude + _SEAL.pack(xxhash.xxh3_64_intdigest(prelude + header)) + header


def pack_erased(nbytes: int, segment: int) -> bytes:
    """The first page of `nbytes` bytes (whole pages) of which the rest is zeros: a record that was erased."""
    said = _ERASED.pack(_ERASED_MAGIC, nbytes, segment)
    return (said + _SEAL.pack(xxhash.xxh3_64_intdigest(said))).ljust(PAGE, b"\0")


def erased_bytes(packed: bytes, segment: int) -> int | None:
    """How many bytes from here were erased; None where this is no such page, or of another segment."""
    if len(packed) < _ERASED.size + _SEAL.size:
        return None
    magic, nbytes, number = _ERASED.unpack_from(packed)
    (seal,) = _SEAL.unpack_from(packed, _ERASED.size)
    if magic != _ERASED_MAGIC or number != segment or seal != xxhash.xxh3_64_intdigest(packed[: _ERASED.size]):
        return None
    return int(nbytes) if nbytes and nbytes % PAGE == 0 else None


def padded(nbytes: int) -> int:
    """Bytes of whole pages that hold `nbytes`."""
    return -(-nbytes // PAGE) * PAGE


def head_bytes(prelude: bytes, segment: int) -> int | None:
    """Bytes of prelude and header together, from the prelude alone; None where there is none."""
    if len(prelude) < PRELUDE_BYTES:
        return None
    magic, header, payload, number = _PRELUDE.unpack_from(prelude)
    if magic not in (_MAGIC, _FIRST_MAGIC) or number != segment:
        return None
    if header > MAX_HEADER_BYTES or not 0 < payload <= MAX_PAYLOAD_BYTES:
        return None
    return PRELUDE_BYTES + int(header)


def parse_head(packed: bytes, segment: int) -> Head | None:
    """The head at the start of `packed`; None where it is damaged, cut short or of another segment."""
    length = head_bytes(packed, segment)
    if length is None or len(packed) < length:
        return None
    header = packed[PRELUDE_BYTES:length]
    (seal,) = _SEAL.unpack_from(packed, _PRELUDE.size)
    if xxhash.xxh3_64_intdigest(packed[: _PRELUDE.size] + header) != seal:
        return None
    magic, _, payload, _ = _PRELUDE.unpack_from(packed)
    stored = _unpack(header, int(payload))
    payload_at = padded(length) if magic == _MAGIC else length
    return None if stored is None else Head(stored, payload_at, padded(payload_at + int(payload)))


def _unpack(header: bytes, size: int) -> Stored | None:
    try:
        message = pb.SegmentHeader.FromString(header)
        extents = unpack_extents(message.extents)
        kind = _KIND_OF[message.kind]
        retention = unpack_retention(message.retention) or RetentionClass.DEFAULT
    except (DecodeError, KeyError, ValueError):
        return None
    if not _fit(extents, size):
        return None
    return Stored(
        RecordId(kind, message.key),
        Identity(message.model_revision, message.layout_fingerprint),
        message.token_ids,
        message.parent_key,
        size,
        extents,
        message.stored_at_ms / 1000,
        retention,
    )


def _fit(extents: Sequence[Extent], size: int) -> bool:
    """Whether the extents cover the record exactly, one after the other: no byte is left unchecked."""
    end = 0
    for extent in extents:
        if extent.offset != end:
            return False
        end = extent.end
    return end == size
