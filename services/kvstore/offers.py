"""Offers: which of a writer's records are wanted. Knows layouts and bounds; moves no bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.layout import Layout
from fabric.errors import DataLoss, InvalidArgument
from fabric.records import Extent
from services.kvstore.policy.budget import NOBODY, Owner
from services.kvstore.records import ROOT, BlockName, Identity, RecordId, RecordKind
from services.worker.geometry import record_places

MAX_RECORDS = 4096
KEY_BYTES = 32
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordOffer:
    id: RecordId
    name: BlockName
    parent: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Records of one prefix in order, each block before its anchor and before the block that continues it."""

    records: tuple[RecordOffer, ...]
    identity: Identity
    layout: Layout
    keep_s: float  # soft retention from the moment they are stored; 0: none
    owner: Owner = NOBODY  # whose budget it counts against

    def validate(self) -> None:
        """Raises InvalidArgument for the first record that no store could take."""
        if not 1 <= len(self.records) <= MAX_RECORDS:
            raise _wrong("offer.records", f"{len(self.records)} records", f"offer 1 to {MAX_RECORDS}")
        for record in self.records:
            if len(record.name.key) != KEY_BYTES or len(record.parent) != KEY_BYTES:
                raise _wrong(
                    "offer.records.name.key", "a key is not 32 bytes long", "use the prefix keys of the engine"
                )
            if len(record.name.tokens) != self.layout.block_tokens * TOKEN_BYTES:
                size = f"send {self.layout.block_tokens} of {TOKEN_BYTES} bytes"
                raise _wrong("offer.records.name.tokens", "not one block of tokens", size)
            if record.size != self.size_of(record.id.kind):
                raise _wrong("offer.records.size", f"{record.size} bytes", f"send {self.size_of(record.id.kind)}")

    def size_of(self, kind: RecordKind) -> int:
        """Bytes of every record of this kind."""
        return self.layout.block_bytes if kind is RecordKind.BLOCK else self.layout.window_bytes

    def wanted(
        self, has: Callable[[RecordId], bool], foreign: Callable[[RecordOffer], bool], room_bytes: int
    ) -> tuple[int, ...]:
        """Indices of the records that are new, can be reached from the prefix's start, and fit into `room_bytes`.

        `foreign`: a record of this name is here that stands for something else. What would continue it is not wanted:
        its key, made from the other's, would in turn stand for both.
        """
        known: set[RecordId] = set()
        lost: set[RecordId] = set()
        chosen: list[int] = []
        for index, record in enumerate(self.records):
            needs = needed_by(record)
            if needs in lost or record.id in known or foreign(record):
                lost.add(record.id)
                continue
            reachable = needs is None or needs in known or has(needs)
            if reachable and not has(record.id):
                if record.size > room_bytes:
                    break
                room_bytes -= record.size
                known.add(record.id)
                chosen.append(index)
        return tuple(chosen)

    def require_places(self, record: RecordOffer, extents: Sequence[Extent], offset: int) -> None:
        """Raises DataLoss unless `extents` are the record's groups, in order, from `offset` of the landing."""
        groups = self.layout.globals if record.id.kind is RecordKind.BLOCK else self.layout.windows
        expected = [(place.group, place.offset, place.size) for place in record_places(groups, 0, offset)]
        if [(extent.group, extent.offset, extent.size) for extent in extents] != expected:
            raise DataLoss("the extents are not this record's", field="commit.records")


def needed_by(record: RecordOffer) -> RecordId | None:
    """What must be in the store for the record to be of use."""
    if record.id.kind is RecordKind.ANCHOR:
        return RecordId(RecordKind.BLOCK, record.id.key)
    return None if record.parent == ROOT else RecordId(RecordKind.BLOCK, record.parent)


def _wrong(field: str, message: str, fix: str) -> InvalidArgument:
    return InvalidArgument(message, field=field, fix=fix)
