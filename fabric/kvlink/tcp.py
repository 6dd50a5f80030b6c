"""The KV link over TCP: works everywhere, writes straight into the registered region. Knows sockets, not who grants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric.errors import DeadlineExceeded, Internal, InvalidArgument, StaleTicket, StartError, Unavailable
from fabric.kvlink import plan
from fabric.kvlink import tcp_frames as frames
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.link import Bytes, Notice, Region, Token, Write, as_bytes, plain_memory
from fabric.kvlink.peers import PeerBook
from fabric.kvlink.plan import Copies
from fabric.kvlink.tcp_frames import Answer, Greeting
from fabric.records import LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
_SOCKET_BYTES = 4 << 20
_ACCEPT_AGAIN_S = 0.1


@dataclass(eq=False)
class _Outgoing:
    """A greeted connection to one incarnation of a peer; one push at a time uses it."""

    sock: socket.socket
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class TcpLink:
    """Listens for writers and keeps one connection to every peer it writes to."""

    def __init__(self, host: str, port: int, name: str, epoch: int) -> None:
        """Raises StartError where it cannot listen there."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port}: {error.strerror}", field="transport", fix="choose another port, or 0"
            ) from error
        self._listener.setblocking(False)
        self.address = LinkAddress(f"tcp://{host}:{self._listener.getsockname()[1]}", name, epoch)
        self.lane = "tcp"
        self._regions: dict[int, Region] = {}
        self._peers = PeerBook()
        self._inbox = Inbox()
        self._outgoing: dict[tuple[str, int], _Outgoing] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._spawn(self._accept())

    def allocate(self, nbytes: int, touched: bool = True) -> Bytes:
        return plain_memory(nbytes, touched)

    def register(self, buffer: Any) -> Region:
        memory = as_bytes(buffer)
        region = Region(Token(len(self._regions), 0, memory.nbytes), memory)
        self._regions[region.token.number] = region
        return region

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return False

    def was_read(self, address: LinkAddress) -> None:
        raise Internal(f"{address.peer} cannot have read what this link never lent")

    def view(self, peer: str, epoch: int, shared: bytes) -> Bytes | None:
        return None

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        return False

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        if self._closed:
            raise Unavailable("this link is closed")
        replaced = self._peers.admit(address)
        if replaced is not None:
            self._drop((replaced.peer, replaced.epoch))
        planned = [plan.copies(write) for write in writes]
        try:
            async with asyncio.timeout(timeout_s):
                await self._push(address, planned, notify)
        except TimeoutError as error:
            self._drop((address.peer, address.epoch))
            raise DeadlineExceeded(f"push to {address.peer} not done after {timeout_s:.3g} s") from error
        except (OSError, EOFError) as error:
            self._drop((address.peer, address.epoch))
            raise Unavailable(f"{address.peer} at {address.url} is gone") from error
        except BaseException:
            self._drop((address.peer, address.epoch))  # half a frame may be on the wire
            raise

    @contextmanager
    def expecting(self) -> Iterator[None]:
        yield

    def notices(self) -> AsyncIterator[Notice]:
        return aiter(self._inbox)

    async def close(self) -> None:
        self._closed = True
        for key in list(self._outgoing):
            self._drop(key)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._inbox.close()

    async def _push(self, address: LinkAddress, planned: Sequence[Copies], notify: bytes) -> None:
        connection = await self._connection(address)
        loop = asyncio.get_running_loop()
        async with connection.busy:
            table = np.concatenate([_frame(copies) for copies in planned]) if planned else np.zeros((0, 3), np.int64)
            await loop.sock_sendall(connection.sock, frames.pack_push(table, notify))
            for copies in planned:
                memory = copies.source.memory.data
                for start, _, size in copies.table.T.tolist():
                    await loop.sock_sendall(connection.sock, memory[start : start + size])
            answer = frames.unpack_answer(await _receive(connection.sock, frames.ANSWER_BYTES))
        _raise_for(answer, address)

    async def _connection(self, address: LinkAddress) -> _Outgoing:
        key = (address.peer, address.epoch)
        known = self._outgoing.get(key)
        if known is not None:
            return known
        sock = await _connect(address.url)
        try:
            greeting = Greeting(self.address.epoch, address.epoch, self.address.peer, address.peer)
            await asyncio.get_running_loop().sock_sendall(sock, greeting.pack())
            _raise_for(frames.unpack_answer(await _receive(sock, frames.ANSWER_BYTES)), address)
        except BaseException:
            sock.close()
            raise
        if key in self._outgoing:  # another push was faster
            sock.close()
        return self._outgoing.setdefault(key, _Outgoing(sock))

    def _drop(self, key: tuple[str, int]) -> None:
        connection = self._outgoing.pop(key, None)
        if connection is not None:
            connection.sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is free now, or the writer left before its turn
                _log.warning("connection not accepted", reason=error.strerror)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
            else:
                self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """One writer until it goes or breaks the protocol."""
        loop = asyncio.get_running_loop()
        with sock:
            try:
                _tune(sock)
                writer = await self._greet(sock)
                while writer is not None:
                    await self._take(sock, writer)
                    await loop.sock_sendall(sock, frames.pack_answer(Answer.DONE))
            except (OSError, EOFError):
                return  # the writer knows more than we do: it decides what its end means
            except InvalidArgument as error:
                _log.warning("writer refused", reason=error.message)
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(sock, frames.pack_answer(Answer.REFUSED))

    async def _greet(self, sock: socket.socket) -> Notice | None:
        """The writer's name and epoch as an empty notice; None when it looks for another incarnation of us."""
        head = await _receive(sock, frames.GREETING_BYTES)
        writer_epoch, target_epoch, writer_bytes, target_bytes = frames.unpack_greeting(head)
        writer = frames.unpack_name(await _receive(sock, writer_bytes))
        target = frames.unpack_name(await _receive(sock, target_bytes))
        meant = (target, target_epoch) == (self.address.peer, self.address.epoch)
        answer = Answer.DONE if meant else Answer.STALE
        await asyncio.get_running_loop().sock_sendall(sock, frames.pack_answer(answer))
        return Notice(writer, writer_epoch, b"") if meant else None

    async def _take(self, sock: socket.socket, writer: Notice) -> None:
        """One push: bounds first, then every byte straight to its place, then the notice."""
        count, notice_bytes, payload_bytes = frames.unpack_push(await _receive(sock, frames.PUSH_BYTES))
        copies = frames.unpack_copies(await _receive(sock, count * frames.COPY_BYTES))
        payload = await _receive(sock, notice_bytes)
        self._check(copies, payload_bytes)
        for number, start, size in copies.tolist():
            await _receive_into(sock, self._regions[number].memory.data[start : start + size])
        if payload:
            await self._inbox.put(Notice(writer.peer, writer.epoch, payload))

    def _check(self, copies: NDArray[np.int64], payload_bytes: int) -> None:
        limits = {number: region.token.nbytes for number, region in self._regions.items()}
        for number in np.unique(copies[:, 0]).tolist():
            offsets, sizes = copies[copies[:, 0] == number, 1], copies[copies[:, 0] == number, 2]
            plan.check_bounds(offsets, sizes, limits.get(number, -1), "frame")
        if int(copies[:, 2].sum()) != payload_bytes:
            raise InvalidArgument("payload and copies differ in length", field="frame")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _frame(copies: Copies) -> NDArray[np.int64]:
    """Where the payload goes: int64 [n, 3] of region number, offset, size."""
    numbers = np.full(copies.table.shape[1], copies.target.number, np.int64)
    return np.stack([numbers, copies.table[1], copies.table[2]], axis=1)


def _raise_for(answer: Answer, address: LinkAddress) -> None:
    if answer is Answer.STALE:
        raise StaleTicket(f"epoch {address.epoch} of {address.peer} is not there any more", field="address")
    if answer is Answer.REFUSED:
        raise InvalidArgument(f"{address.peer} refused the write", field="writes")


async def _connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{url!r} is no address of this transport", field="address")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        _tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


async def _receive(sock: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    await _receive_into(sock, memoryview(buffer))
    return bytes(buffer)


async def _receive_into(sock: socket.socket, view: memoryview) -> None:
    loop = asyncio.get_running_loop()
    done = 0
    while done < len(view):
        got = await loop.sock_recv_into(sock, view[done:])
        if got == 0:
            raise EOFError("connection closed by the peer")
        done += got
