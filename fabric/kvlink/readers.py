"""Readers: peers that are known to read memory of this process where it is. Knows names, no memory."""

from __future__ import annotations

from fabric.records import LinkAddress

_MOST = 1024


class Readers:
    """What one link has learnt; forgotten at worst, then learnt anew."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int, bytes]] = set()

    def know(self, address: LinkAddress, shared: bytes) -> bool:
        """Whether this peer has read the memory of this name (`Token.shared`)."""
        return (address.peer, address.epoch, shared) in self._known

    def add(self, address: LinkAddress, shared: bytes) -> None:
        """It has."""
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known.add((address.peer, address.epoch, shared))

    def drop(self, address: LinkAddress) -> None:
        """It says that it cannot, whatever it did before."""
        self._known = {known for known in self._known if known[:2] != (address.peer, address.epoch)}
