"""A NIXL agent as its driver sees it: memory, peers, transfers, notifications. Knows NIXL's calls, no asyncio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import nixl_cu12._bindings as nixl
import numpy as np
from numpy.typing import NDArray

from fabric.errors import InvalidArgument, ServiceError, StartError, Unavailable
from fabric.kvlink.link import Notice, Token, Write
from fabric.telemetry import logs

# The Python wrapper passes 0, which spins: 5 CPU seconds in 5 s. At 50 ms an idle agent uses 0.1 % of a core, and since
# arrivals wake the thread, 1 MiB still moves in 0.1 ms.
PROGRESS_DELAY_US = 50_000
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
            self._backend = self._agent.createBackend("UCX", options)
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
            self._agent.registerMem(descriptors, [self._backend])
        self._registered.append(descriptors)

    def load_peer(self, metadata: bytes) -> str:
        """Name of the agent that the metadata describes. Raises InvalidArgument where it describes none."""
        with _mapped("load peer"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def forget_peer(self, name: str) -> None:
        with _mapped("forget peer"):
            self._agent.invalidateRemoteMD(name)

    def post(self, peer: str, writes: Sequence[tuple[Token, Write]], notify: bytes) -> int:
        """Starts a transfer and returns its handle; all writes in one request, so that one notification covers them."""
        local, remote = (nixl.nixlXferDList(nixl.DRAM_SEG, table) for table in _tables(writes))
        with _mapped("post"):
            handle = int(self._agent.createXferReq(nixl.NIXL_WRITE, local, remote, peer, notify, [self._backend]))
        try:
            with _mapped("post"):
                self._agent.postXferReq(handle)
        except BaseException:
            self.release(handle)
            raise
        return handle

    def notify(self, peer: str, payload: bytes) -> None:
        with _mapped("notify"):
            self._agent.genNotif(peer, payload, [self._backend])

    def done(self, handle: int) -> bool:
        """Whether the transfer is complete. Raises Unavailable when its peer is gone."""
        with _mapped("status"):
            return bool(self._agent.getXferStatus(handle) == nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Gives a transfer up. One that cannot be cancelled yet is tried again with the next release."""
        pending, self._zombies = [*self._zombies, handle], []
        for each in pending:
            try:
                self._agent.releaseXferReq(each)
            except Exception:
                self._zombies.append(each)

    def arrived(self) -> list[Notice]:
        """Notifications since the last call, in order per peer."""
        with _mapped("notifications"):
            by_peer = self._agent.getNotifs({}, [self._backend])
        return [notice(name, payload) for name, payloads in by_peer.items() for payload in payloads]

    def close(self) -> None:
        """Releases transfers and memory, then the agent itself, whose destructor ends its progress thread."""
        for handle in self._zombies:
            try:
                self._agent.releaseXferReq(handle)
            except Exception as error:
                _log.warning("transfer not released", error=type(error).__name__)
        for descriptors in self._registered:
            with _mapped("deregister"):
                self._agent.deregisterMem(descriptors, [self._backend])
        self._registered.clear()
        self._agent = None


def agent_name(peer: str, epoch: int) -> str:
    """NIXL's name of one incarnation: two incarnations of a peer are two agents, whose state is never mixed."""
    return f"{peer}#{epoch}"


def notice(name: str | bytes, payload: bytes) -> Notice:
    text = name.decode() if isinstance(name, bytes) else name
    peer, _, epoch = text.rpartition("#")
    return Notice(peer, int(epoch), bytes(payload))


def _tables(writes: Sequence[tuple[Token, Write]]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Local and remote descriptors, uint64 [n, 3] each: address, bytes, device."""
    count = sum(len(write.sizes) for _, write in writes)
    local, remote = np.zeros((count, 3), np.uint64), np.zeros((count, 3), np.uint64)
    start = 0
    for token, write in writes:
        end = start + len(write.sizes)
        np.add(write.source_offsets, write.source.token.base, out=local[start:end, 0], casting="unsafe")
        np.add(write.target_offsets, token.base, out=remote[start:end, 0], casting="unsafe")
        local[start:end, 1] = remote[start:end, 1] = write.sizes
        start = end
    return local, remote


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """NIXL's errors as ours: what the caller got wrong, or a peer that is gone."""
    try:
        yield
    except ServiceError:
        raise
    except (nixl.nixlInvalidParamError, nixl.nixlNotFoundError, nixl.nixlMismatchError) as error:
        raise InvalidArgument(f"{what}: UCX knows no such memory or peer", field="address") from error
    except Exception as error:
        raise Unavailable(f"{what}: {type(error).__name__}") from error
