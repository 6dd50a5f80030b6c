"""What both ends of a pipelined transfer tell each other by notices. Knows bytes and bounds, sends nothing.

A message starts with one byte that names its kind, 0x10 to 0x16, so that it can share a link's notices with others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fabric.errors import InvalidArgument
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import ROW, Extents
from fabric.kvlink.verify import DIGEST_KIND
from fabric.records import LinkAddress

_CHUNK, _GAVE_UP, _CREDIT, _REFUSAL, _ALIVE, _TRAILING, _UNREADABLE = 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16
_RUN = struct.Struct("<QQQQB")
_SIZE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Extents that are complete in the landing, at offsets from its start. `reply`: where credit goes from now on.

    With `lent` they are not in the landing: they lie in memory of the writer under that name (`Token.shared`), at
    offsets from its start, until they are credited; `run` is where they go if the receiver cannot read that memory, or
    empty where they were announced ahead (`Landing.lent_bytes`): then they are announced anew once they are written.
    """

    transfer: str
    number: int
    run: Run
    last: bool
    extents: Extents
    reply: LinkAddress | None = None
    lent: bytes = b""

    @property
    def ahead(self) -> bool:
        """Whether its bytes need no place in the landing."""
        return bool(self.lent) and not self.run.size

    @property
    def nbytes(self) -> int:
        """Bytes to copy, of its place in the landing or else of its extents."""
        return self.run.size or int(self.extents.table["size"].sum())

    def pack(self) -> bytes:
        groups = self.extents.groups
        run = _RUN.pack(self.number, self.run.offset, self.run.start, self.run.end, self.last)
        texts = [str(len(groups)), self.transfer, DIGEST_KIND, *groups]
        parts = [*map(str.encode, texts), run, self.extents.table.tobytes(), self.lent]
        if self.reply is not None:
            reply = self.reply
            parts += [reply.url.encode(), reply.peer.encode(), str(reply.epoch).encode(), reply.metadata]
        return _pack(_CHUNK, parts)


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The writer writes no more for this transfer."""

    transfer: str

    def pack(self) -> bytes:
        return _pack(_GAVE_UP, [self.transfer.encode()])


@dataclass(frozen=True, slots=True)
class Alive:
    """The writer is there and has nothing to write yet."""

    transfer: str

    def pack(self) -> bytes:
        return _pack(_ALIVE, [self.transfer.encode()])


@dataclass(frozen=True, slots=True)
class Trailing:
    """The writer starts no write for this transfer any more, but one that it gave up may still be on its way."""

    transfer: str

    def pack(self) -> bytes:
        return _pack(_TRAILING, [self.transfer.encode()])


@dataclass(frozen=True, slots=True)
class Credit:
    """The first `chunks` chunks are verified in their places: everything before `position` was taken out."""

    transfer: str
    position: int
    chunks: int

    def pack(self) -> bytes:
        return _pack(_CREDIT, [self.transfer.encode(), b"%d" % self.position, b"%d" % self.chunks])


@dataclass(frozen=True, slots=True)
class Refusal:
    """The receiver takes no more of this transfer; `code` is that of the error it met."""

    transfer: str
    code: str
    message: str

    def pack(self) -> bytes:
        return _pack(_REFUSAL, [self.transfer.encode(), self.code.encode(), self.message.encode()])


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The receiver cannot read memory of the writer: what was lent must be written into the landing."""

    transfer: str

    def pack(self) -> bytes:
        return _pack(_UNREADABLE, [self.transfer.encode()])


FromSender = Chunk | GaveUp | Alive | Trailing
FromReceiver = Credit | Refusal | Unreadable


class Word(Enum):
    """What a writer said of its writes."""

    ALIVE = "alive"
    DONE = "done"  # it wrote everything or gave up: it will write no more
    TRAILING = "trailing"  # it starts no other write; one that it gave up may still be on its way


def word_of(message: FromSender) -> Word:
    match message:
        case Alive() | Chunk(last=False):
            return Word.ALIVE
        case Chunk(lent=lent) if lent:  # it may still have to be written
            return Word.ALIVE
        case Trailing():
            return Word.TRAILING
    return Word.DONE


def is_for_receiver(payload: bytes) -> bool:
    """Whether a notice is what a sender says; see `unpack`."""
    return payload[:1] in (b"\x10", b"\x11", b"\x14", b"\x15")


def is_for_sender(payload: bytes) -> bool:
    """Whether a notice is what a receiver says."""
    return payload[:1] in (b"\x12", b"\x13", b"\x16")


def unpack(payload: bytes) -> FromSender | FromReceiver:
    """Raises InvalidArgument for bytes that are no message, or seals of another digest kind."""
    try:
        parts = _unpack(payload)
        match payload[0]:
            case 0x10:
                return _chunk(parts)
            case 0x11:
                return GaveUp(*map(bytes.decode, parts))
            case 0x12:
                transfer, position, chunks = parts
                return Credit(transfer.decode(), int(position), int(chunks))
            case 0x13:
                return Refusal(*map(bytes.decode, parts))
            case 0x14:
                return Alive(*map(bytes.decode, parts))
            case 0x15:
                return Trailing(*map(bytes.decode, parts))
            case 0x16:
                return Unreadable(*map(bytes.decode, parts))
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise InvalidArgument("not a message of a pipelined transfer", field="notice") from error
    raise InvalidArgument("not a message of a pipelined transfer", field="notice")


def _chunk(parts: list[bytes]) -> Chunk:
    count = int(parts[0])
    transfer, kind, *groups = (part.decode() for part in parts[1 : 3 + count])
    run, rows, lent, *reply = parts[3 + count :]
    if kind != DIGEST_KIND:
        raise InvalidArgument(f"sealed with {kind!r}, not {DIGEST_KIND!r}", field="digest_kind")
    number, offset, start, end, last = _RUN.unpack(run)
    if last > 1:
        raise ValueError("neither the last chunk nor another one")
    extents = Extents(tuple(groups), np.frombuffer(rows, ROW))
    if len(extents) and int(extents.table["group"].max()) >= count:
        raise ValueError("an extent of no group")
    address = None
    if reply:
        url, peer, epoch, metadata = reply
        address = LinkAddress(url.decode(), peer.decode(), int(epoch), metadata)
    return Chunk(transfer, number, Run(offset, start, end), bool(last), extents, address, lent)


def _pack(kind: int, parts: list[bytes]) -> bytes:
    sized = (_SIZE.pack(len(part)) + part for part in parts)
    return bytes([kind]) + b"".join(sized)


def _unpack(payload: bytes) -> list[bytes]:
    parts, at, end = [], 1, len(payload)
    unpack_from, head = _SIZE.unpack_from, _SIZE.size
    while at < end:
        (size,) = unpack_from(payload, at)
        first = at + head
        at = first + size
        if at > end:
            raise ValueError("cut short")
        parts.append(payload[first:at])
    return parts
