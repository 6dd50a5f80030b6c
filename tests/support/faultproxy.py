"""A TCP proxy on loopback that hurts what passes: delay, cut, black hole, half-open, flipped bits, slow drip.

Order is never changed: TCP would not either. Faults apply from the moment they are set, to running connections as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

_CHUNK_BYTES = 64 << 10
_ONCE = 1 << 60  # bytes until the next flip: never


@dataclass(slots=True)
class Faults:
    """What happens to bytes from now on.

    delay_s, jitter_s: added to every chunk. black_hole: bytes are read and vanish. flip_every_bytes: one random bit per
    so many bytes towards the server is inverted. drip_bytes_per_s: at most so many bytes a second. half_open: bytes
    towards the client vanish, those towards the server pass.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    black_hole: bool = False
    half_open: bool = False
    flip_every_bytes: int = 0
    drip_bytes_per_s: int = 0


class FaultProxy:
    """Forwards connections to host:port of `target`; `address` is where clients connect."""

    def __init__(self, target: str, rng: random.Random) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._rng = rng
        self._until_flip = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self.faults = Faults()
        self.flipped = 0
        self.forwarded = 0  # bytes, both ways
        self.address = ""

    def cut(self) -> None:
        """Resets every running connection; new ones are served."""
        for writer in list(self._connections):
            writer.transport.abort()

    def flip_once(self, after_bytes: int) -> None:
        """Inverts one random bit, in the byte that comes after so many more towards the server."""
        self.faults = replace(self.faults, flip_every_bytes=_ONCE)
        self._until_flip = after_bytes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._connections |= {writer, upstream}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream, to_server=True))
                group.create_task(self._pump(upstream_reader, writer, to_server=False))
        except* OSError:
            pass  # a connection that was cut
        finally:
            self._connections -= {writer, upstream}
            for each in (writer, upstream):
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: bool) -> None:
        while data := await reader.read(self.faults.drip_bytes_per_s or _CHUNK_BYTES):
            faults = self.faults
            if faults.delay_s or faults.jitter_s:
                await asyncio.sleep(faults.delay_s + self._rng.uniform(0, faults.jitter_s))
            if faults.drip_bytes_per_s:
                await asyncio.sleep(len(data) / faults.drip_bytes_per_s)
            if faults.black_hole or (faults.half_open and not to_server):
                continue
            writer.write(self._flip(bytearray(data)) if to_server and faults.flip_every_bytes else data)
            await writer.drain()
            self.forwarded += len(data)
        if writer.can_write_eof():
            writer.write_eof()

    def _flip(self, data: bytearray) -> bytes:
        """Inverts one random bit after every `flip_every_bytes` bytes."""
        position = self._until_flip
        while position < len(data):
            data[position] ^= 1 << self._rng.randrange(8)
            self.flipped += 1
            position += self.faults.flip_every_bytes
        self._until_flip = position - len(data)
        return bytes(data)


@asynccontextmanager
async def fault_proxy(target: str, seed: int = 0) -> AsyncIterator[FaultProxy]:
    """A running proxy in front of `target`; print `seed` where a test fails."""
    proxy = FaultProxy(target, random.Random(seed))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()
