"""A NIXL agent as its driver sees it: memory, peers, transfers, notifications. Knows NIXL's calls, no asyncio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import nixl_cu12._bindings as nixl
import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument, ServiceError, StartError, Unavailable
from fabric.kvlink.link import Notice
from fabric.kvlink.plan import Copies
from fabric.telemetry import logs

# The Python wrapper passes 0, which spins: 5 CPU seconds in 5 s. At 200 ms an idle agent uses 0.02 % of a core, and
# since arrivals wake the thread, 1 MiB still moves in 0.1 ms.
PROGRESS_DELAY_US = 200_000
_log = logs.get("kvlink")


class Agent:
    """One caller at a time; `post` releases the interpreter while it copies."""

    def __init__(self, name: str) -> None:
        """Raises StartError where UCX cannot start; `name` is what peers see on notifications."""
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = PROGRESS_DELAY_US
        try:
            self._agent: Any = nixl.nixlAgent(name, config)
            options, _ = self._agent.getPluginParams("UCX")
            self._backends = [self._agent.createBackend("UCX", options)]
        except Exception as error:
            raise StartError(
                f"UCX cannot start: {error}", field="transport", fix="check UCX_TLS and UCX_NET_DEVICES, or use tcp://"
            ) from error
        self._registered: list[Any] = []
        self._zombies: list[int] = []

    def metadata(self) -> bytes:
        """How peers reach this agent and its memory; changes when memory is registered."""
        return bytes(self._agent.getLocalMD())

    def register(self, base: int, nbytes: int) -> None:
        descriptors = nixl.nixlRegDList(nixl.DRAM_SEG, np.array([[base, nbytes, 0]], dtype=np.uint64))
        with _mapped("register"):
            self._agent.registerMem(descriptors, self._backends)
        self._registered.append(descriptors)

    def load_peer(self, metadata: bytes) -> str:
        """Name of the agent that the metadata describes. Raises InvalidArgument where it describes none."""
        with _mapped("load peer"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def forget_peer(self, name: str) -> None:
        with _mapped("forget peer"):
            self._agent.invalidateRemoteMD(name)

    def post(self, peer: str, planned: Sequence[Copies], notify: bytes) -> int:
        """Starts a transfer and returns its handle; all copies in one request, so that one notification covers them."""
        handle = None
        try:
            local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, table) for table in _tables(planned))
            handle = self._agent.createXferReq(nixl.NIXL_WRITE, local, remote, peer, notify, self._backends)
            self._agent.postXferReq(handle)
        except Exception as error:
            if handle is not None:
                self.release(handle)
            raise _ours("post", error) from error
        return int(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        with _mapped("notify"):
            self._agent.genNotif(peer, payload, self._backends)

    def done(self, handle: int) -> bool:
        """Whether the transfer is complete. Raises Unavailable when its peer is gone."""
        try:
            return bool(self._agent.getXferStatus(handle) == nixl.NIXL_SUCCESS)
        except Exception as error:
            raise _ours("status", error) from error

    def release(self, handle: int) -> None:
        """Gives a transfer up. One that cannot be cancelled yet is tried again with the next release."""
        pending, self._zombies = [*self._zombies, handle], []
        for each in pending:
            try:
                self._agent.releaseXferReq(each)
            except Exception:
                self._zombies.append(each)

    def arrived(self) -> list[Notice]:
        """Notifications since the last call, in order per peer; without those of agents that are no link's."""
        with _mapped("notifications"):
            by_peer = self._agent.getNotifs({}, self._backends)
        notices = []
        for name, payloads in by_peer.items():
            sender = incarnation(name)
            if sender is None:
                _log.warning("notifications of an unknown kind of agent dropped", count=len(payloads))
            else:
                notices += [Notice(*sender, bytes(payload)) for payload in payloads]
        return notices

    def close(self) -> None:
        """Releases transfers and memory, then the agent itself, whose destructor ends its progress thread."""
        for handle in self._zombies:
            try:
                self._agent.releaseXferReq(handle)
            except Exception as error:
                _log.warning("transfer not released", error=type(error).__name__)
        for descriptors in self._registered:
            with _mapped("deregister"):
                self._agent.deregisterMem(descriptors, self._backends)
        self._registered.clear()
        self._agent = None


def agent_name(peer: str, epoch: int) -> str:
    """NIXL's name of one incarnation: two incarnations of a peer are two agents, whose state is never mixed."""
    return f"{peer}#{epoch}"


def incarnation(name: str | bytes) -> tuple[str, int] | None:
    """Peer and epoch of an agent's name; None for what `agent_name` never makes: any agent can connect."""
    try:
        text = name.decode() if isinstance(name, bytes) else name
    except UnicodeDecodeError:  # never replaced: two such names must not pass for one
        return None
    peer, _, epoch = text.rpartition("#")
    return (peer, int(epoch)) if peer and epoch.isascii() and epoch.isdecimal() and len(epoch) <= 20 else None


def _tables(planned: Sequence[Copies]) -> NDArray[np.uint64]:
    """Local and remote descriptors, uint64 [2, n, 3]: address, bytes, device."""
    tables = np.zeros((2, sum(copies.table.shape[1] for copies in planned), 3), np.int64)
    start = 0
    for copies in planned:
        part = tables[:, start : start + copies.table.shape[1]]
        np.add(copies.table[0], copies.source.token.base, out=part[0, :, 0])
        np.add(copies.table[1], copies.target.base, out=part[1, :, 0])
        part[:, :, 1] = copies.table[2]
        start += copies.table.shape[1]
    return tables.view(np.uint64)


def _ours(what: str, error: Exception) -> ServiceError:
    """NIXL's error as ours: what the caller got wrong, or a peer that is gone."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, nixl.nixlInvalidParamError | nixl.nixlNotFoundError | nixl.nixlMismatchError):
        return InvalidArgument(f"{what}: UCX knows no such memory or peer", field="address")
    return Unavailable(f"{what}: {type(error).__name__}")


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _ours(what, error) from error
