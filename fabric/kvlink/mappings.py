"""Mappings of peers' memory by name: opened once each, dropped when their owner ends. Knows no bytes and no copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fabric.kvlink.shared import Mapping, SharedName
from fabric.telemetry import logs

_log = logs.get("kvlink")
_MOST_NAMES = 1024


class Mappings:
    """All methods run in the event loop that made it."""

    def __init__(self, opener: Callable[[SharedName], Mapping | None]) -> None:
        """opener: maps what a name leads to; None where it leads nowhere."""
        self._opener, self._loop = opener, asyncio.get_running_loop()
        self._found: dict[bytes, Mapping | None] = {}  # None: cannot be mapped, or its owner has ended
        self._names: dict[str, set[bytes]] = {}

    def find(self, peer: str, packed: bytes) -> Mapping | None:
        """What a name leads to; None where it cannot be mapped, or its owner is known to have ended.

        Raises:
            InvalidArgument: the name is none.
        """
        if packed not in self._found:
            self.keep(peer, packed, self.open(packed))
        return self._found[packed]

    def open(self, packed: bytes) -> Mapping | None:
        """What a name leads to, not kept; may run in any thread. Raises InvalidArgument for what is no name."""
        return self._opener(SharedName.unpack(packed))

    def keep(self, peer: str, packed: bytes, mapping: Mapping | None) -> None:
        """Keeps what `open` found, unless another was faster."""
        if packed in self._found:
            if mapping is not None:
                mapping.close()
            return
        if len(self._found) >= _MOST_NAMES:
            self.forget(next(iter(self._names)))
        self._found[packed] = mapping
        self._names.setdefault(peer, set()).add(packed)
        if mapping is not None:
            writable = bool(mapping.memory.flags.writeable)
            _log.info("memory of a peer mapped", peer=peer, bytes=mapping.memory.nbytes, writable=writable)
            self._loop.add_reader(mapping.process, self._drop, packed)

    def known(self, packed: bytes) -> Mapping | None:
        """As `find`, without looking for what was not met."""
        return self._found.get(packed)

    def live(self) -> list[Mapping]:
        """Those whose owners are not known to have ended."""
        return [mapping for mapping in self._found.values() if mapping is not None]

    def has_met(self, packed: bytes) -> bool:
        return packed in self._found

    def forget(self, peer: str) -> None:
        """Drops the mappings of an incarnation that was replaced."""
        for packed in self._names.pop(peer, ()):
            self._drop(packed)
            del self._found[packed]

    def close(self) -> None:
        """Safe to repeat."""
        for peer in list(self._names):
            self.forget(peer)

    def _drop(self, packed: bytes) -> None:
        mapping = self._found[packed]
        if mapping is not None:
            self._found[packed] = None
            self._loop.remove_reader(mapping.process)
            mapping.close()
