"""Damage between the wire and decode's look at it: what a landing holds, or what was lent, is not what was sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fabric.kvlink import Notice, messages
from tests.support.stack import Stack


@contextmanager
def flipped(stack: Stack, group: str, block: int) -> Iterator[list[int]]:
    """One bit of an extent flips after it landed and before decode looks at it. Yields how often that was."""
    intake, flips = stack.desk._intake, [0]
    original, view = intake.noticed, intake._link.view
    damaged: dict[bytes, int] = {}  # offset in lent memory, by its name

    def damaged_view(peer: str, epoch: int, shared: bytes) -> np.ndarray | None:
        memory = view(peer, epoch, shared)
        if memory is None or shared not in damaged:
            return memory
        copy = memory.copy()
        copy[damaged[shared]] ^= 1
        return copy

    def noticed(notice: Notice) -> bool:
        message = messages.unpack(notice.payload)
        for row in message.extents.rows() if isinstance(message, messages.Chunk) else ():
            if row[:2] == (group, block):
                middle = row[3] + row[4] // 2
                if message.lent:
                    damaged[message.lent] = middle
                else:
                    landing = stack.desk._holdings[message.transfer].landing
                    stack.desk._landings._memory[landing.offset + middle] ^= 1
                flips[0] += 1
        return bool(original(notice))

    intake.noticed, intake._link.view = noticed, damaged_view  # type: ignore[method-assign]
    try:
        yield flips
    finally:
        intake.noticed, intake._link.view = original, view  # type: ignore[method-assign]
