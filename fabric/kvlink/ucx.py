"""The KV link over UCX (NIXL): one-sided WRITE with notification. Knows deadlines and peers, not the agent's calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fabric.errors import DeadlineExceeded, StartError
from fabric.kvlink import plan, ucx_lanes
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.lanes import Expectation, kinds
from fabric.kvlink.link import Notice, Region, Token, Write, as_bytes
from fabric.kvlink.peers import PeerBook
from fabric.kvlink.ucx_agent import Agent, agent_name
from fabric.kvlink.ucx_driver import Driver
from fabric.records import LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
_ANY_LANE = Expectation()


class UcxLink:
    """Public methods run in the event loop that opened the link. A push without writes is a notice without delivery
    report: NIXL confirms writes alone.
    """

    def __init__(self, name: str, epoch: int, expected: Expectation = _ANY_LANE) -> None:
        """Raises StartError where UCX cannot start, or the expected lane cannot come to be."""
        self._expected = expected
        self._name, self._epoch = name, epoch
        self._inbox = Inbox()
        self._peers = PeerBook()
        self._regions: list[Region] = []
        self._lane = ucx_lanes.UNCONNECTED
        self._reached: set[str] = set()
        self._driver = Driver(agent_name(name, epoch), asyncio.get_running_loop(), self._inbox)
        self._metadata = self._driver.submit(Agent.metadata).result()
        offered = ucx_lanes.offered()
        _log.info("transport opened", transport="ucx", lanes_offered=offered, expected=expected.kind or "any")
        try:
            expected.check_start(offered)
        except StartError:
            self._driver.close()
            raise

    @property
    def address(self) -> LinkAddress:
        return LinkAddress("ucx://", self._name, self._epoch, self._metadata)

    @property
    def lane(self) -> str:
        if self._lane == ucx_lanes.UNCONNECTED:
            self._lane = ucx_lanes.chosen()  # a peer may have come by itself
        return self._lane

    def register(self, buffer: Any) -> Region:
        memory = as_bytes(buffer)
        region = Region(Token(len(self._regions), memory.ctypes.data, memory.nbytes), memory)

        def work(agent: Agent) -> bytes:
            agent.register(region.token.base, region.token.nbytes)
            return agent.metadata()

        self._metadata = self._driver.submit(work).result()
        self._regions.append(region)
        return region

    async def push(
        self, address: LinkAddress, writes: Sequence[Write], *, notify: bytes = b"", timeout_s: float
    ) -> None:
        replaced = self._peers.admit(address)
        if replaced is not None:
            self._driver.forget(agent_name(replaced.peer, replaced.epoch))
        planned = [plan.copies(write) for write in writes if len(write.sizes)]
        transfer = self._driver.push(address, planned, notify)
        if transfer is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.wrap_future(transfer)
            except TimeoutError as error:
                raise DeadlineExceeded(f"push to {address.peer} not done after {timeout_s:.3g} s") from error
        self._note_lane(address.peer)

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

    def _note_lane(self, peer: str) -> None:
        """After the first push to a peer: what carried it, logged, compared and kept."""
        if peer not in self._reached:
            self._lane = ucx_lanes.chosen()
            _log.info("lane chosen", lane=self._lane, kinds="+".join(kinds(self._lane)), peer=peer)
            self._expected.check_peer(self._lane, peer)
            self._reached.add(peer)

    async def close(self) -> None:
        await asyncio.to_thread(self._driver.close)
        self._inbox.close()
