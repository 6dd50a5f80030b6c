"""What every KV link does: registered regions, one-sided writes, notices. Knows numpy arrays of bytes, no transport."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument
from fabric.records import LinkAddress

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]

_TOKEN = struct.Struct("<QQQ")
_MOST_TOKEN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Token:
    """Names a registered region to other processes: number within its link, first address, length in bytes; and how
    processes of the same host find its memory, where they can (`SharedName`)."""

    number: int
    base: int
    nbytes: int
    shared: bytes = b""

    def pack(self) -> bytes:
        return _TOKEN.pack(self.number, self.base, self.nbytes) + self.shared

    @staticmethod
    def unpack(packed: bytes) -> Token:
        """Raises InvalidArgument for bytes that are no token."""
        if not _TOKEN.size <= len(packed) <= _MOST_TOKEN_BYTES:
            raise InvalidArgument(f"a region token has {_TOKEN.size} bytes or more, not {len(packed)}", field="region")
        number, base, nbytes = _TOKEN.unpack_from(packed)
        token = Token(number, base, nbytes, packed[_TOKEN.size :])
        if max(token.number, token.base + token.nbytes) >= 1 << 63:  # addresses are reckoned with as int64
            raise InvalidArgument("a region token names no memory", field="region")
        return token


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory of this process that the link can read from and peers can write to. Holds its buffer alive."""

    token: Token
    memory: Bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Copies of `sizes[i]` bytes from `source_offsets[i]` of a local region to `target_offsets[i]` of a remote one.

    The three arrays are int64 [n]; the remote region is named by the token that its owner handed out.
    """

    source: Region
    source_offsets: Offsets
    target: bytes
    target_offsets: Offsets
    sizes: Offsets

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True)
class Notice:
    """A payload that became visible together with the bytes pushed before it, and who sent it."""

    peer: str
    epoch: int
    payload: bytes


class Link(Protocol):
    """One end of the KV transport: reads from its own regions, writes into regions of peers.

    A push returns when its bytes are in the peer's memory. Nothing fences a writer: whoever hands out a region must
    expect writes until the writer says that it finished or is known to be dead.
    """

    @property
    def address(self) -> LinkAddress:
        """Where peers write to; covers the regions registered so far."""
        ...

    @property
    def lane(self) -> str:
        """What carries the bytes, such as "cma/memory+tcp/lo"; "unconnected" before the first push."""
        ...

    def allocate(self, nbytes: int, touched: bool = True) -> Bytes:
        """Zeroed memory, uint8 [nbytes], of the kind that peers write to and read fastest once it is registered.

        `touched`: all of its pages are there at once, as who writes one-sided wants them; else each when it is used.
        """
        ...

    def register(self, buffer: Any) -> Region:
        """Makes the memory of a writable, contiguous buffer known to the link until `close`."""
        ...

    def lends(self, address: LinkAddress, region: Region) -> bool:
        """Whether the peer at `address` may be able to read a region of this process where it is, by its token's
        `shared`: only that peer's `view` can say for sure."""
        ...

    def was_read(self, address: LinkAddress) -> None:
        """The peer at `address` has read what was lent to it: what the lane is, is known now.

        Raises:
            Internal: this link lends nothing.
        """
        ...

    def view(self, peer: str, epoch: int, shared: bytes) -> Bytes | None:
        """Memory that a peer registered, to be read where it is, uint8 [nbytes]; None where that cannot be. What its
        owner does with it meanwhile is seen.

        Raises:
            InvalidArgument: `shared` is no name of memory.
        """
        ...

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        """A push that needs no waiting, done when this returns; False where it needs some: then `push` it.

        Raises:
            InvalidArgument, StaleTicket: as `push`.
        """
        ...

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        """Writes everything, then delivers `notify` (if not empty) as one notice. Adjacent copies become one.

        Raises:
            InvalidArgument: a write leaves its region; nothing was written.
            StaleTicket: the address belongs to an incarnation that was overtaken; nothing was written to the newer one.
            Unavailable: the peer is gone; any part may have been written.
            DeadlineExceeded: not done in time; the rest may still be written later.
        """
        ...

    def expecting(self) -> AbstractContextManager[None]:
        """While at least one such context is open, notices are looked for; without, arrivals may stay unseen.

        An idle link costs nothing: some transports can only poll, and they poll inside this context alone.
        """
        ...

    def notices(self) -> AsyncIterator[Notice]:
        """Notices in order of arrival, each exactly once; one consumer. Ends when the link closes."""
        ...

    async def close(self) -> None:
        """Ends transfers and gives the transport back; safe to repeat."""
        ...


def plain_memory(nbytes: int, touched: bool = True) -> Bytes:
    """Zeroed memory; touched, since a first write by a peer would otherwise pay for every page fault."""
    return np.full(nbytes, 0, np.uint8) if touched else np.zeros(nbytes, np.uint8)


def as_bytes(buffer: Any) -> Bytes:
    """The memory of `buffer` as uint8 [nbytes], without a copy.

    Raises:
        InvalidArgument: it is read-only, empty or not contiguous.
    """
    array = np.asarray(buffer)
    if not array.flags.writeable or not array.flags.c_contiguous or array.nbytes == 0:
        raise InvalidArgument("a region must be writable, contiguous and not empty", field="buffer")
    return array.reshape(-1).view(np.uint8)
