"""A peer on the KV link for tests: in this process, or as a child that can be killed and frozen.

Run with `python -m tests.support.link_peer URL NAME EPOCH SEED [lends]`; it reads one JSON command a line and answers
with one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fabric.errors import ServiceError
from fabric.kvlink import Link, open_link
from fabric.kvlink.incoming import Intake
from fabric.kvlink.inproc import InprocLink
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes, Region
from fabric.kvlink.outgoing import Piece, Sender, SendLimits
from fabric.kvlink.plan import lay_out, write_to
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from fabric.records import Extent, Landing, LinkAddress
from tests.support import procs

SOURCE_BYTES = 8 << 20


def source_bytes(seed: int) -> Bytes:
    """What a peer with this seed has to send, uint8 [SOURCE_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, SOURCE_BYTES, dtype=np.uint8)


def sealed(seed: int, sizes: list[int]) -> list[Extent]:
    """The receipt of a push of consecutive extents of these sizes."""
    memory, offsets = source_bytes(seed), lay_out(np.array(sizes, np.int64)).tolist()
    return [
        Extent("latent", block, 1, offset, size, digest(memory[offset : offset + size]))
        for block, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]


def source_region(link: Link, seed: int, lends: bool) -> Region:
    """`source_bytes` as a link knows them; `lends`: where a peer of this host may read them."""
    if not lends:
        return link.register(source_bytes(seed))
    memory = link.allocate(SOURCE_BYTES, touched=False)
    memory[:] = source_bytes(seed)
    return link.register(memory)


class Pusher:
    """Pushes consecutive extents of its source into landings."""

    def __init__(self, link: Link, seed: int, lends: bool = False) -> None:
        self.link, self.source = link, source_region(link, seed, lends)

    async def push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float) -> None:
        array = np.array(sizes, np.int64)
        offsets = lay_out(array)
        write = write_to(landing, self.source, offsets, offsets, array)
        await self.link.push(landing.address, [write], notify=notify.encode(), timeout_s=timeout_s)


def pieces(source: Region, sizes: list[int], wrong: int = -1) -> list[Piece]:
    """Consecutive extents of a source for a pipelined transfer; number `wrong` is sealed with another digest."""
    offsets = lay_out(np.array(sizes, np.int64)).tolist()
    return [
        Piece("latent", block, 1, source, start, size, digest(source.memory[start : start + size]) ^ (block == wrong))
        for block, (start, size) in enumerate(zip(offsets, sizes, strict=True))
    ]


class Placed:
    """Live memory by extent, made when an extent asks for it."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], Bytes] = {}

    def __call__(self, group: str, block: int, size: int) -> Bytes:
        return self.blocks.setdefault((group, block), np.zeros(size, np.uint8))

    def digest(self) -> int:
        """Of everything, in order of blocks."""
        return digest(np.concatenate([self.blocks[key] for key in sorted(self.blocks)]))


class Peer(Protocol):
    """What a contract test does to the other side, whatever it is."""

    async def push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> str: ...
    async def start_push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> None: ...
    async def pushed(self) -> str: ...
    async def start_pipe(
        self, landing: Landing, sizes: list[int], chunk_bytes: int, wrong: int = -1, timeout_s: float = 10.0
    ) -> None: ...
    async def open(self, owner: str, window_bytes: int) -> Landing: ...
    async def opened(self, owner: str) -> int | str: ...
    async def grant(self, owner: str, nbytes: int) -> Landing: ...
    async def landed(self, owner: str, nbytes: int) -> int: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...
    async def kill(self) -> None: ...
    async def close(self) -> None: ...


class Commands:
    """Carries commands out on a link of its own."""

    def __init__(self, link: Link, seed: int, lends: bool = False) -> None:
        self._pusher = Pusher(link, seed, lends)
        self._pool = LandingPool(link, SOURCE_BYTES)
        self._placed: dict[str, Placed] = {}
        self._intake = Intake(link, self._pool)
        self._senders: dict[tuple[int, float], Sender] = {}
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float) -> str:
        """ "ok", or the code of the error that the push raised."""
        try:
            await self._pusher.push(landing, sizes, notify, timeout_s)
        except ServiceError as error:
            return error.code
        return "ok"

    async def pipe(self, landing: Landing, sizes: list[int], chunk_bytes: int, wrong: int, timeout_s: float) -> str:
        """A pipelined transfer of consecutive extents; "ok", or the code of its error or of its receiver's refusal."""
        link = self._pusher.link
        limits = SendLimits(chunk_bytes, max(chunk_bytes, 1 << 20), timeout_s)
        sender = self._senders.setdefault((chunk_bytes, timeout_s), Sender(link, limits))
        try:
            async with sender.transfer(landing) as outgoing:
                await outgoing.send(pieces(self._pusher.source, sizes, wrong), last=True)
                if outgoing.refused is not None:
                    return outgoing.refused.code
        except ServiceError as error:
            return error.code
        return "ok"

    def open(self, owner: str, window_bytes: int) -> Landing:
        self._placed[owner] = Placed()
        return self._intake.open(owner, window_bytes, self._placed[owner])

    async def opened(self, owner: str) -> int | str:
        """Digest of what a pipelined transfer placed, or the code of its error; closes it."""
        try:
            await self._intake.ready(owner, 10.0)
        except ServiceError as error:
            return error.code
        finally:
            await self._intake.close(owner, Writer.UNKNOWN)
        return self._placed[owner].digest()

    async def _follow(self) -> None:
        async for notice in self._pusher.link.notices():
            taken = self._intake.noticed(notice)
            for sender in self._senders.values():
                taken = sender.noticed(notice) or taken

    async def close(self) -> None:
        self._following.cancel()
        await self._intake.aclose()

    def grant(self, owner: str, nbytes: int) -> Landing:
        return self._pool.grant(owner, nbytes)

    def landed(self, owner: str, nbytes: int) -> int:
        """Digest of the first `nbytes` bytes of a landing."""
        grant = self._pool._book.find(owner)
        assert grant is not None
        start = grant.first * self._pool._book.slab_bytes
        return digest(self._pool._memory[start : start + nbytes])


class InprocPeer:
    """The other side in this process; its failures are the fake's."""

    def __init__(self, link: InprocLink, seed: int) -> None:
        self._link = link
        self._commands = Commands(link, seed)
        self._running: asyncio.Task[str] | None = None

    async def push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> str:
        return await self._commands.push(landing, sizes, notify, timeout_s)

    async def start_push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> None:
        self._running = asyncio.create_task(self.push(landing, sizes, notify, timeout_s))

    async def pushed(self) -> str:
        assert self._running is not None
        return await self._running

    async def start_pipe(
        self, landing: Landing, sizes: list[int], chunk_bytes: int, wrong: int = -1, timeout_s: float = 10.0
    ) -> None:
        self._running = asyncio.create_task(self._commands.pipe(landing, sizes, chunk_bytes, wrong, timeout_s))

    async def open(self, owner: str, window_bytes: int) -> Landing:
        return self._commands.open(owner, window_bytes)

    async def opened(self, owner: str) -> int | str:
        return await self._commands.opened(owner)

    async def grant(self, owner: str, nbytes: int) -> Landing:
        return self._commands.grant(owner, nbytes)

    async def landed(self, owner: str, nbytes: int) -> int:
        return self._commands.landed(owner, nbytes)

    async def freeze(self) -> None:
        self._link.freeze()

    async def thaw(self) -> None:
        self._link.thaw()

    async def kill(self) -> None:
        await self.close()

    async def close(self) -> None:
        await self._commands.close()
        await self._link.close()


class ProcessPeer:
    """The other side as a child process."""

    def __init__(self, url: str, name: str, epoch: int, seed: int, log: Path, lends: bool = False) -> None:
        options = ["lends"] if lends else []
        command = procs.python("-m", "tests.support.link_peer", url, name, str(epoch), str(seed), *options)
        self._process = procs.Process(command, log)

    async def ready(self) -> None:
        assert (await self._answer())["event"] == "ready"

    async def push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> str:
        await self.start_push(landing, sizes, notify, timeout_s)
        return await self.pushed()

    async def start_push(self, landing: Landing, sizes: list[int], notify: str, timeout_s: float = 10.0) -> None:
        self._tell("push", landing=_pack(landing), sizes=sizes, notify=notify, timeout_s=timeout_s)

    async def pushed(self) -> str:
        return str((await self._answer())["result"])

    async def start_pipe(
        self, landing: Landing, sizes: list[int], chunk_bytes: int, wrong: int = -1, timeout_s: float = 10.0
    ) -> None:
        options = {"chunk_bytes": chunk_bytes, "wrong": wrong, "timeout_s": timeout_s}
        self._tell("pipe", landing=_pack(landing), sizes=sizes, **options)

    async def open(self, owner: str, window_bytes: int) -> Landing:
        self._tell("open", owner=owner, window_bytes=window_bytes)
        return _unpack((await self._answer())["landing"])

    async def opened(self, owner: str) -> int | str:
        self._tell("opened", owner=owner)
        result: int | str = (await self._answer())["result"]
        return result

    async def grant(self, owner: str, nbytes: int) -> Landing:
        self._tell("grant", owner=owner, nbytes=nbytes)
        return _unpack((await self._answer())["landing"])

    async def landed(self, owner: str, nbytes: int) -> int:
        self._tell("landed", owner=owner, nbytes=nbytes)
        return int((await self._answer())["digest"])

    async def freeze(self) -> None:
        await asyncio.to_thread(self._process.freeze)

    def freeze_now(self) -> None:
        """As `freeze`, without a turn of the event loop in between."""
        self._process.freeze()

    async def thaw(self) -> None:
        self._process.thaw()

    async def kill(self) -> None:
        await asyncio.to_thread(self._process.kill)

    async def close(self) -> None:
        await asyncio.to_thread(self._process.close)

    async def cpu_s(self) -> float:
        """Processor time that the child has used, in seconds."""
        self._tell("cpu")
        return float((await self._answer())["cpu_s"])

    async def end(self) -> int:
        """Asks it to close its link and to leave; returns its exit code."""
        self._tell("end")
        return await asyncio.to_thread(self._process.wait)

    def _tell(self, command: str, **arguments: Any) -> None:
        self._process.tell(json.dumps({"command": command} | arguments))

    async def _answer(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._process.json)


def _pack(landing: Landing) -> dict[str, Any]:
    address = landing.address
    return {
        "id": landing.id,
        "address": [address.url, address.peer, address.epoch, address.metadata.hex()],
        "region": landing.region.hex(),
        "offset": landing.offset,
        "size": landing.size,
        "lent_bytes": landing.lent_bytes,
    }


def _unpack(packed: dict[str, Any]) -> Landing:
    url, peer, epoch, metadata = packed["address"]
    address = LinkAddress(url, peer, epoch, bytes.fromhex(metadata))
    region, numbers = bytes.fromhex(packed["region"]), [packed[name] for name in ("offset", "size", "lent_bytes")]
    return Landing(packed["id"], address, region, *numbers)


async def _serve(url: str, name: str, epoch: int, seed: int, lends: bool) -> None:
    link = open_link(url, name, epoch)
    commands = Commands(link, seed, lends)
    _say({"event": "ready"})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        match request["command"]:
            case "push":
                landing = _unpack(request["landing"])
                result = await commands.push(landing, request["sizes"], request["notify"], request["timeout_s"])
                _say({"result": result})
            case "pipe":
                options = [request[name] for name in ("sizes", "chunk_bytes", "wrong", "timeout_s")]
                _say({"result": await commands.pipe(_unpack(request["landing"]), *options)})
            case "open":
                _say({"landing": _pack(commands.open(request["owner"], request["window_bytes"]))})
            case "opened":
                _say({"result": await commands.opened(request["owner"])})
            case "grant":
                _say({"landing": _pack(commands.grant(request["owner"], request["nbytes"]))})
            case "landed":
                _say({"digest": commands.landed(request["owner"], request["nbytes"])})
            case "cpu":
                _say({"cpu_s": time.process_time()})
            case "end":
                break
    await commands.close()
    await link.close()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), "lends" in sys.argv[5:]))
