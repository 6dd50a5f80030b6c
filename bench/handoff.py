"""KV handoff between two processes: pushed, verified and committed into blocks, against memcpy and a bare NIXL WRITE.

This process receives, a child sends. A handoff is timed here from the grant of its landing until everything is verified
in place; the landing's name travels over a pipe, as gRPC would carry it. Blocks are sealed by the sender before, as
prefill does when it finishes one; what sealing costs has a row of its own. Rounds alternate with memcpy of the same
extents; ratios are medians over rounds of one run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench import handoff_hidden
from bench.arguments import Parser, byte_size, new_file, positive
from bench.push import Geometry, Source, push_rounds
from bench.table import Row, report
from fabric import wire
from fabric.errors import InvalidArgument
from fabric.kvlink import open_link, ucx_lanes
from fabric.kvlink.extents import Extents
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes, Link, Region
from fabric.kvlink.outgoing import Piece, Pieces, Sender, SendLimits
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import digest
from fabric.records import Landing
from kernels.host.scattered_copy import copy_scattered
from kernels.host.sealed_copy import copy_sealed
from protos.deepinfer.v1 import common_pb2 as pb

TIMEOUT_S = 30.0
_SWITCH_S = 0.0005  # between threads of the interpreter, as workers set it


@dataclass(frozen=True, slots=True)
class Case:
    """`blocks` blocks, each with one extent of so many bytes for every group, one after the other."""

    name: str
    blocks: int
    groups: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.blocks * sum(self.groups)

    def spans(self) -> Iterator[tuple[str, int, int, int]]:
        """(group, block, start, bytes) of every extent in pool memory."""
        start = 0
        for block in range(self.blocks):
            for group, size in enumerate(self.groups):
                yield f"group-{group}", block, start, size
                start += size

    def seal(self, source: Region) -> Pieces:
        """The extents at the start of `source`."""
        return Pieces.pack(
            [
                Piece(group, block, 1, source, start, size, digest(source.memory[start : start + size]))
                for group, block, start, size in self.spans()
            ]
        )

    def starts(self) -> NDArray[np.int64]:
        """First byte of every extent, int64 [groups, blocks]."""
        return np.array([start for _, _, start, _ in self.spans()], np.int64).reshape(self.blocks, -1).T


# V4.1 at 128 tokens a block: entries (288 B) and index keys (68 B) of 3 layers for 2 tokens each, and of 1 for each.
V41_BLOCK = (3 * 288 * 64, 3 * 68 * 64, 288 * 128, 68 * 128)
LARGE = Case("64 MiB", 64, (1 << 20,))
SMALL = Case("1 MiB", 8, (128 << 10,))
PROMPT = Case("77,000 tokens", -(-77_000 // 128), V41_BLOCK)
CASES = {case.name: case for case in (LARGE, SMALL, PROMPT)}


def child(pipe: Connection, transport: str, chunk_bytes: int) -> None:
    """The sending process."""
    sys.setswitchinterval(_SWITCH_S)
    ucx_lanes.prepare()
    uvloop.run(_send(pipe, transport, chunk_bytes))


async def _send(pipe: Connection, transport: str, chunk_bytes: int) -> None:
    link = open_link(transport, "bench-source", 1, copy_scattered)
    limits = SendLimits(chunk_bytes=chunk_bytes, in_flight_bytes=4 * chunk_bytes, timeout_s=TIMEOUT_S)
    sender = Sender(link, limits)
    following = asyncio.ensure_future(_follow(link, sender.noticed))
    largest = max(case.nbytes for case in CASES.values())
    plain = np.random.default_rng(0).integers(0, 256, largest, dtype=np.uint8)
    shared = link.allocate(largest, touched=False)  # as a worker's pool is
    shared[:] = plain
    source, written = link.register(shared), link.register(plain)
    sealed = {(name, True): case.seal(source) for name, case in CASES.items()}
    sealed[LARGE.name, False] = LARGE.seal(written)
    orders = Heard(pipe)
    while (order := await orders.next()) is not None:
        match order:
            case ("handoff", name, lends, packed):
                landing = wire.unpack_landing(pb.Landing.FromString(packed))
                async with sender.transfer(landing) as outgoing:
                    await outgoing.send(sealed[name, lends], last=True)
                _tell(pipe, "confirmed")
            case ("push", landing, rounds):
                geometry = Geometry(LARGE.name, LARGE.blocks, LARGE.groups)
                pushed = Source(link, geometry, np.random.default_rng(0))
                _tell(pipe, await push_rounds(link, pushed, landing, rounds))
            case ("seal", name, rounds):
                _tell(pipe, _median_s(partial(CASES[name].seal, source), rounds))
            case ("lane",):
                _tell(pipe, link.lane)
    following.cancel()
    await link.close()


async def _follow(link: Link, take: Callable[..., bool]) -> None:
    async for notice in link.notices():
        take(notice)


class Heard:
    """What the other process says, without a thread in between."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._take)

    async def next(self) -> Any:
        return await self._messages.get()

    def _take(self) -> None:
        try:
            message = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 - from our own child or parent
        except EOFError:  # the other process has ended
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            message = None
        self._messages.put_nowait(message)


def _tell(pipe: Connection, message: object) -> None:
    pipe.send_bytes(pickle.dumps(message))


class Places:
    """Where each extent goes in live memory: in the order of its blocks."""

    def __init__(self, case: Case, live: Bytes) -> None:
        self._live, self._starts = live, case.starts()
        self._addresses = self._starts.astype(np.uint64) + np.uint64(live.ctypes.data)
        self._sizes = np.array(case.groups, np.uint64)

    def __call__(self, group: str, block: int, size: int) -> Bytes:
        start = self._starts[int(group.rpartition("-")[2]), block]
        return self._live[start : start + size]

    def all(self, extents: Extents) -> NDArray[np.uint64]:
        """Addresses of many, as decode's places tell them."""
        numbers = np.array([int(name.rpartition("-")[2]) for name in extents.groups])
        groups = numbers[extents.table["group"]]
        if (extents.table["size"] != self._sizes[groups]).any():
            raise InvalidArgument("an extent of another size", field="extents")
        found: NDArray[np.uint64] = self._addresses[groups, extents.table["block"]]
        return found


class Receiver:
    """Live blocks, a landing pool and the timing of one handoff; and a landing that nobody can map."""

    def __init__(self, pipe: Connection, transport: str, window_bytes: int) -> None:
        self.pipe, self._heard, self._window_bytes = pipe, Heard(pipe), window_bytes
        self.link = open_link(transport, "bench-target", 1)
        self.plain_link = open_link("ucx://?mapped=off", "bench-plain", 1)
        self.plain = LandingPool(self.plain_link, LARGE.nbytes)
        self.pool = LandingPool(self.link, LARGE.nbytes + window_bytes, kernel=copy_sealed)
        self.intake = Intake(self.link, self.pool)
        self.following = asyncio.ensure_future(_follow(self.link, self.intake.noticed))
        largest = max(case.nbytes for case in CASES.values())
        self.live, self.other = (self.link.allocate(largest) for _ in range(2))  # as a worker's pool is
        self.live[:], self.other[:] = 1, 2
        self.handoffs = 0

    async def handoff(self, case: Case, lends: bool = True) -> float:
        """Seconds from the grant until every byte is verified in its block; `lends`: out of memory that a worker's pool
        is in, else of memory that nobody else can read."""
        places = Places(case, self.live)
        self.handoffs += 1
        owner = f"{case.name} {self.handoffs}"
        started = time.perf_counter()
        window = min(self._window_bytes, 2 * case.nbytes)
        landing = self.intake.open(owner, window, places, place_all=places.all)
        _tell(self.pipe, ("handoff", case.name, lends, wire.pack_landing(landing).SerializeToString()))
        await self.intake.ready(owner, TIMEOUT_S)
        took = time.perf_counter() - started
        await self.intake.close(owner, Writer.FINISHED)
        await self._heard.next()  # the sender is told after who waits here has run: not at the cost of the next handoff
        return took

    def memcpy(self, case: Case) -> float:
        """Seconds of copying the same extents inside this process."""
        pairs = [(self.live[at : at + size], self.other[at : at + size]) for _, _, at, size in case.spans()]

        def copy() -> None:
            for target, source in pairs:
                np.copyto(target, source)

        return _timed(copy)

    async def rounds(self, case: Case, rounds: int, lends: bool = True) -> tuple[float, float, float]:
        """Medians: seconds of a handoff, of memcpy, and their ratio within a round."""
        pairs = [(await self.handoff(case, lends), self.memcpy(case)) for _ in range(rounds + 2)][2:]
        handoffs, copies = zip(*pairs, strict=True)
        ratio = statistics.median(took / copy for took, copy in pairs)
        return statistics.median(handoffs), statistics.median(copies), ratio

    async def ask(self, *order: object) -> Any:
        _tell(self.pipe, order)
        return await self._heard.next()

    async def close(self) -> None:
        _tell(self.pipe, None)
        self.following.cancel()
        await self.intake.aclose()
        await self.plain_link.close()
        await self.link.close()


async def measure(pipe: Connection, transport: str, rounds: int, window_bytes: int) -> tuple[list[Row], str]:
    """All rows, and the lane that carried the handoffs."""
    receiver = Receiver(pipe, transport, window_bytes)
    try:
        large, prompt = await receiver.rounds(LARGE, rounds), await receiver.rounds(PROMPT, rounds)
        small, written = await receiver.rounds(SMALL, 10 * rounds), await receiver.rounds(LARGE, rounds, lends=False)
        sealing = await receiver.ask("seal", PROMPT.name, rounds)
        hashing = _median_s(partial(_hash, receiver.live, PROMPT), rounds)
        lane: str = await receiver.ask("lane")
        landing: Landing = receiver.pool.grant("mapped", LARGE.nbytes)
        mapped = await receiver.ask("push", landing, rounds)
        pushed = await receiver.ask("push", receiver.plain.grant("plain", LARGE.nbytes), rounds)
    finally:
        await receiver.close()
    rows = _rows(pushed, large, prompt, small, sealing, hashing)
    rows.insert(3, Row(f"  link push, unverified, {lane}", LARGE.nbytes / 1e9 / mapped[1], "GB/s"))
    rows.insert(7, Row("  the same from memory that is not shared, / memcpy", 1 / written[2]))
    return rows, lane


def _rows(
    pushed: tuple[float, float, float, int],
    large: tuple[float, float, float],
    prompt: tuple[float, float, float],
    small: tuple[float, float, float],
    sealing: float,
    hashing: float,
) -> list[Row]:
    bare_s, push_s, push_ratio, _ = pushed
    rate = LARGE.nbytes / 1e9
    return [
        Row("64 MiB, bare NIXL WRITE", rate / bare_s, "GB/s"),
        Row("  link push over NIXL, unverified", rate / push_s, "GB/s"),
        Row("  push / bare", push_ratio, "", 0.85, ">="),
        Row("  memcpy", rate / large[1], "GB/s"),
        Row("  handed over, verified, committed", rate / large[0], "GB/s"),
        Row("  committed / memcpy", 1 / large[2], "", 0.40, ">="),
        Row("1 MiB, Reserve to ready, p50", small[0] * 1e3, "ms", 1.0),
        Row(f"{PROMPT.nbytes / 1e6:.1f} MB (77,000 tokens), memcpy", prompt[1] * 1e3, "ms"),
        Row("  handed over, verified, committed", prompt[0] * 1e3, "ms"),
        Row("  committed / memcpy, time", prompt[2], "x", 2.5),
        Row("  share of the receiver's digest", hashing / prompt[0]),
        Row("  sealing by the sender, before", sealing * 1e3, "ms"),
    ]


def _hash(memory: Bytes, case: Case) -> None:
    for _, _, start, size in case.spans():
        digest(memory[start : start + size])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median_s(work: Callable[[], object], rounds: int) -> float:
    return statistics.median(_timed(work) for _ in range(rounds))


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--rounds", type=positive, default=21, help="handoffs of each size; ten times as many of 1 MiB")
    parser.add_argument("--hidden-rounds", type=int, default=5, help="nano prompts through real services; 0: none")
    parser.add_argument("--transport", default="ucx://", help="what carries handoffs; ucx://?mapped=off: NIXL alone")
    parser.add_argument("--chunk-bytes", type=byte_size, default=4 << 20, help="of one push of a pipelined transfer")
    parser.add_argument("--window-bytes", type=byte_size, default=16 << 20, help="landing memory of one transfer")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(_SWITCH_S)
    ucx_lanes.prepare()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, options.transport, options.chunk_bytes))
    process.start()
    try:
        rows, lane = uvloop.run(measure(here, options.transport, options.rounds, options.window_bytes))
        process.join(10)
    finally:
        process.kill()
    if options.hidden_rounds:
        rows += uvloop.run(handoff_hidden.measure(options.hidden_rounds))
    return report(f"KV handoff between two processes, lane {lane}", rows, options.json)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # destructors of the wheel's libraries may crash after the last line
