"""Frames of the TCP transport: greeting, push, answer. Knows their bytes and bounds, no sockets."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument

MAGIC = 0x4B56_4C31  # "KVL1"
MAX_COPIES = 1 << 20
MAX_NOTICE_BYTES = 1 << 20
MAX_NAME_BYTES = 256

_GREETING = struct.Struct("<IQQHH")
_PUSH = struct.Struct("<IIIQ")
_ANSWER = struct.Struct("<IB")
GREETING_BYTES = _GREETING.size
PUSH_BYTES = _PUSH.size
ANSWER_BYTES = _ANSWER.size
COPY_BYTES = 24


class Answer(IntEnum):
    """What a receiver says to a greeting or a push."""

    DONE = 0
    STALE = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Greeting:
    """First frame of a connection: who writes, and which incarnation of whom it means to write to."""

    writer_epoch: int
    target_epoch: int
    writer: str
    target: str

    def pack(self) -> bytes:
        writer, target = self.writer.encode(), self.target.encode()
        head = _GREETING.pack(MAGIC, self.writer_epoch, self.target_epoch, len(writer), len(target))
        return head + writer + target


def unpack_greeting(head: bytes) -> tuple[int, int, int, int]:
    """(writer epoch, target epoch, bytes of the writer's name, bytes of the target's name)."""
    magic, writer_epoch, target_epoch, writer_bytes, target_bytes = _GREETING.unpack(head)
    _check(magic, max(writer_bytes, target_bytes) <= MAX_NAME_BYTES)
    return writer_epoch, target_epoch, writer_bytes, target_bytes


def unpack_name(packed: bytes) -> str:
    """Raises InvalidArgument for bytes that are no text: two of those must not pass for one name."""
    try:
        return packed.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("a name in a greeting is no text", field="frame") from error


def pack_push(copies: NDArray[np.int64], notice: bytes) -> bytes:
    """Head of a push: `copies` is int64 [n, 3] of (region number, offset, size). The payload follows in that order."""
    head = _PUSH.pack(MAGIC, len(copies), len(notice), int(copies[:, 2].sum()) if len(copies) else 0)
    return head + np.ascontiguousarray(copies, dtype="<i8").tobytes() + notice


def unpack_push(head: bytes) -> tuple[int, int, int]:
    """(number of copies, bytes of the notice, bytes of payload)."""
    magic, copies, notice_bytes, payload_bytes = _PUSH.unpack(head)
    _check(magic, copies <= MAX_COPIES and notice_bytes <= MAX_NOTICE_BYTES)
    return copies, notice_bytes, payload_bytes


def unpack_copies(packed: bytes) -> NDArray[np.int64]:
    return np.frombuffer(packed, dtype="<i8").reshape(-1, 3)


def pack_answer(answer: Answer) -> bytes:
    return _ANSWER.pack(MAGIC, answer)


def unpack_answer(packed: bytes) -> Answer:
    magic, answer = _ANSWER.unpack(packed)
    _check(magic, answer in Answer.__members__.values())
    return Answer(answer)


def _check(magic: int, sane: bool) -> None:
    if magic != MAGIC or not sane:
        raise InvalidArgument("not a frame of this protocol", field="frame")
