"""The KV link over UCX (NIXL): one-sided WRITE with notification. Knows deadlines and peers, not the agent's calls.

What peers of the same host can map is written to by plain copies, and a doorbell says so: as one-sided as the rest, in
a third of the time. Everything else, and everyone else, goes over NIXL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from fabric.errors import DeadlineExceeded, Internal, StartError, Unavailable
from fabric.kvlink import mapped, plan, ucx_lanes
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.lanes import Expectation, kinds
from fabric.kvlink.link import Bytes, Notice, Region, Token, Write, as_bytes
from fabric.kvlink.mapped import CopyTable, Work
from fabric.kvlink.neighbours import Neighbours
from fabric.kvlink.peers import PeerBook
from fabric.kvlink.plan import Copies
from fabric.kvlink.ucx_agent import Agent, agent_name
from fabric.kvlink.ucx_driver import Driver
from fabric.records import LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
_ANY_LANE = Expectation()
# Seconds between two looks for notices of peers that cannot ring, where others can: a megabyte takes about as long.
_PATIENCE_S = 0.001


class UcxLink:
    """Public methods run in the event loop that opened the link. A push without writes is a notice without delivery
    report: NIXL confirms writes alone.
    """

    def __init__(self, name: str, epoch: int, expected: Expectation = _ANY_LANE, copy: CopyTable | None = None) -> None:
        """Raises StartError where UCX cannot start, or the expected lane cannot come to be."""
        self._expected = expected
        self._name, self._epoch = name, epoch
        self._inbox = Inbox()
        self._peers = PeerBook()
        self._regions: list[Region] = []
        self._lane = ucx_lanes.UNCONNECTED
        self._reached: set[tuple[str, bool]] = set()
        self._neighbours = Neighbours(name, epoch, self._inbox, expected.may_map, copy)
        patience_s = _PATIENCE_S if self._neighbours.lane else 0.0
        try:
            self._driver = Driver(agent_name(name, epoch), asyncio.get_running_loop(), self._inbox, patience_s)
        except StartError:
            self._neighbours.close()
            raise
        self._metadata = self._driver.submit(Agent.metadata).result()
        offered = "+".join(filter(None, [self._neighbours.lane, ucx_lanes.offered()]))
        _log.info("transport opened", transport="ucx", lanes_offered=offered, expected=expected.kind or "any")
        try:
            expected.check_start(offered)
        except StartError:
            self._neighbours.close()
            self._driver.close()
            raise

    @property
    def address(self) -> LinkAddress:
        return LinkAddress(self._neighbours.url, self._name, self._epoch, self._metadata)

    @property
    def lane(self) -> str:
        if self._lane == ucx_lanes.UNCONNECTED:
            self._lane = ucx_lanes.chosen()  # a peer may have come by itself
        if not any(is_mapped for _, is_mapped in self._reached):
            return self._lane
        return mapped.LANE if self._lane == ucx_lanes.UNCONNECTED else f"{mapped.LANE}+{self._lane}"

    def allocate(self, nbytes: int, touched: bool = True) -> Bytes:
        return self._neighbours.allocate(nbytes, touched)

    def register(self, buffer: Any) -> Region:
        memory = as_bytes(buffer)
        address, shared = memory.ctypes.data, self._neighbours.name_of(memory)
        region = Region(Token(len(self._regions), address, memory.nbytes, shared), memory)

        def work(agent: Agent) -> bytes:
            agent.register(region.token.base, region.token.nbytes)
            return agent.metadata()

        self._metadata = self._driver.submit(work).result()
        self._regions.append(region)
        return region

    def lends(self, address: LinkAddress, region: Region) -> bool:
        return self._neighbours.lends(address, region)

    def was_read(self, address: LinkAddress) -> None:
        if not self._neighbours.lane:
            raise Internal(f"{address.peer} cannot have read what this link never lent")
        self._note_lane(address.peer, is_mapped=True)

    def view(self, peer: str, epoch: int, shared: bytes) -> Bytes | None:
        found = self._neighbours.view(agent_name(peer, epoch), shared)
        if found is not None:
            self._note_lane(peer, is_mapped=True)
        return found

    def push_at_once(self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes) -> bool:
        planned = self._admit(address, writes)
        if planned:
            work = self._neighbours.plan(planned) if _size(planned) <= mapped.INLINE_BYTES else None
            if work is None:
                return False
            work()
            self._note_lane(address.peer, is_mapped=True)
        return bool(notify) and self._neighbours.ring(address, notify)

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        planned = self._admit(address, writes)
        transfer = None
        if planned and not self._neighbours.lane:  # mostly done at once: then without a deadline, a tenth of its time
            transfer = self._driver.push(address, planned, notify)
            if transfer is None:
                self._note_lane(address.peer, is_mapped=False)
                return
        try:
            async with asyncio.timeout(timeout_s):
                await (self._push(address, planned, notify) if transfer is None else self._follow(address, transfer))
        except TimeoutError as error:
            raise DeadlineExceeded(f"push to {address.peer} not done after {timeout_s:.3g} s") from error

    def _admit(self, address: LinkAddress, writes: Sequence[Write]) -> list[Copies]:
        """The copies to make, once the peer's address and every bound were checked."""
        if self._driver.closed:
            raise Unavailable("this link is closed")
        replaced = self._peers.admit(address)
        if replaced is not None:
            agent = agent_name(replaced.peer, replaced.epoch)
            self._neighbours.forget(agent)
            self._driver.forget(agent)
        return [plan.copies(write) for write in writes if len(write.sizes)]

    async def _push(self, address: LinkAddress, planned: list[Copies], notify: bytes) -> None:
        await self._neighbours.meet(agent_name(address.peer, address.epoch), planned)
        work = self._neighbours.plan(planned)
        if work is not None:
            await self._write_mapped(work, _size(planned))
            self._note_lane(address.peer, is_mapped=True)
        if (work is not None or not planned) and notify and self._neighbours.ring(address, notify):
            return
        if work is not None and not self._neighbours.is_over(planned):
            planned = []
        if not planned and not notify:
            return
        await self._follow(address, self._driver.push(address, planned, notify))

    async def _follow(self, address: LinkAddress, transfer: Future[None] | None) -> None:
        """A transfer over NIXL to its end."""
        if transfer is not None:
            await asyncio.wrap_future(transfer)
        self._note_lane(address.peer, is_mapped=False)

    async def _write_mapped(self, work: Work, nbytes: int) -> None:
        if nbytes <= mapped.INLINE_BYTES:
            work()
        else:
            await asyncio.wrap_future(self._neighbours.start(work))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        self._driver.expect(1)
        try:
            yield
        finally:
            if not self._driver.closed:
                self._driver.expect(-1)

    def notices(self) -> AsyncIterator[Notice]:
        return aiter(self._inbox)

    def _note_lane(self, peer: str, is_mapped: bool) -> None:
        """After the first push to a peer: what carried it, logged, compared and kept."""
        if (peer, is_mapped) in self._reached:
            return
        if not is_mapped:
            self._lane = ucx_lanes.chosen()
        lane = mapped.LANE if is_mapped else self._lane
        _log.info("lane chosen", lane=lane, kinds="+".join(kinds(lane)), peer=peer)
        self._expected.check_peer(lane, peer)
        self._reached.add((peer, is_mapped))

    async def close(self) -> None:
        await asyncio.to_thread(self._driver.close)
        self._neighbours.close()
        self._inbox.close()


def _size(planned: Sequence[Copies]) -> int:
    return sum([copies.nbytes for copies in planned])
