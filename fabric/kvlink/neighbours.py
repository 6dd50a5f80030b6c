"""Peers of the same host: memory that they can map, writes into theirs, views of it, notices that wake. Knows no NIXL.

Where the host gives no sockets or shared memory, or a setting wants none, nothing here succeeds and nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from fabric.kvlink.doorbell import Doorbell
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.link import Bytes, Region, plain_memory
from fabric.kvlink.mapped import LANE, CopyTable, MappedLane, Work
from fabric.kvlink.mappings import Mappings
from fabric.kvlink.plan import Copies
from fabric.kvlink.shared import Shared, allocate, open_mapping
from fabric.records import LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
_SCHEME = "ucx://"


class Neighbours:
    """All methods run in the event loop that made it."""

    def __init__(self, name: str, epoch: int, inbox: Inbox, wanted: bool, copy: CopyTable | None) -> None:
        self._doorbell = _doorbell(name, epoch, inbox) if wanted else None
        self.mapped = MappedLane(copy) if self._doorbell is not None else None
        self._views = Mappings(partial(open_mapping, writable=False))
        self._shared: dict[int, Shared] = {}

    @property
    def lane(self) -> str:
        """What may carry bytes to peers of this host; empty where nothing may."""
        return LANE if self.mapped is not None else ""

    @property
    def url(self) -> str:
        """A link's address, with its doorbell."""
        return _SCHEME + (self._doorbell.where if self._doorbell is not None else "")

    def allocate(self, nbytes: int, touched: bool) -> Bytes:
        """Zeroed memory that peers can map, or plain memory where there is no such."""
        if self.mapped is None:
            return plain_memory(nbytes, touched)
        try:
            shared = allocate(nbytes, touched)
        except OSError as error:
            _log.warning("memory cannot be shared with peers of this host", reason=error.strerror)
            return plain_memory(nbytes, touched)
        self._shared[shared.memory.ctypes.data] = shared
        return shared.memory

    def name_of(self, memory: Bytes) -> bytes:
        """How peers find memory that was allocated here; empty for other memory."""
        shared = self._shared.get(memory.ctypes.data)
        return shared.name.pack() if shared is not None and memory.nbytes <= shared.memory.nbytes else b""

    def lends(self, address: LinkAddress, region: Region) -> bool:
        """Whether a peer may be able to read a region of this process where it is: only it can say for sure."""
        return bool(region.token.shared) and self._doorbell is not None and self._doorbell.reaches(_where(address))

    def view(self, peer: str, name: bytes) -> Bytes | None:
        """Memory of a peer, to be read where it is; None where it cannot be. Raises InvalidArgument for no name."""
        mapping = self._views.find(peer, name) if self.mapped is not None else None
        return mapping.memory if mapping is not None else None

    def plan(self, planned: Sequence[Copies]) -> Work | None:
        """What writes everything through mappings; None where something is not mapped (yet)."""
        return self.mapped.plan(planned) if self.mapped is not None and planned else None

    async def meet(self, peer: str, planned: Sequence[Copies]) -> None:
        """Maps what can be mapped. Raises InvalidArgument for a token that names no memory."""
        if self.mapped is not None and not self.mapped.has_met(planned):
            await self.mapped.meet(peer, planned)

    def is_over(self, planned: Sequence[Copies]) -> bool:
        """Whether the owner of a region that was mapped has ended: asked only where it did not hear of a write."""
        return self.mapped is not None and self.mapped.is_over(planned)

    def start(self, work: Work) -> Future[None]:
        """Runs what `plan` returned on a thread, to its end."""
        if self.mapped is None:
            raise RuntimeError("nothing was planned")
        return self.mapped.start(work)

    def ring(self, address: LinkAddress, payload: bytes) -> bool:
        """Delivers a notice; False where it must be said otherwise."""
        return self._doorbell is not None and self._doorbell.ring(_where(address), payload)

    def forget(self, peer: str) -> None:
        """Lets go of an incarnation that was replaced."""
        self._views.forget(peer)
        if self.mapped is not None:
            self.mapped.mappings.forget(peer)

    def close(self) -> None:
        """Safe to repeat."""
        if self._doorbell is not None:
            self._doorbell.close()
        if self.mapped is not None:
            self.mapped.close()
        self._views.close()
        for address in list(self._shared):
            self._shared.pop(address).close()


def _where(address: LinkAddress) -> str:
    return address.url.removeprefix(_SCHEME)


def _doorbell(name: str, epoch: int, inbox: Inbox) -> Doorbell | None:
    try:
        return Doorbell(name, epoch, inbox)
    except OSError as error:
        _log.warning("peers of this host cannot ring", reason=error.strerror)
        return None
