"""Damage between the wire and decode's look at it: what a landing holds is not what its writer sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fabric.kvlink import Notice, messages
from tests.support.stack import Stack


@contextmanager
def flipped(stack: Stack, group: str, block: int) -> Iterator[list[int]]:
    """One bit of an extent flips after it landed and before decode looks at it. Yields how often that was."""
    intake, flips = stack.desk._intake, [0]
    original = intake.noticed

    def noticed(notice: Notice) -> bool:
        message = messages.unpack(notice.payload)
        for row in message.extents.rows() if isinstance(message, messages.Chunk) else ():
            if row[:2] == (group, block):
                landing = stack.desk._holdings[message.transfer].landing
                stack.desk._landings._memory[landing.offset + row[3] + row[4] // 2] ^= 1
                flips[0] += 1
        return bool(original(notice))

    intake.noticed = noticed
    try:
        yield flips
    finally:
        intake.noticed = original
