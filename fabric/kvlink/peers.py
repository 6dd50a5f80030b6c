"""The newest incarnation seen of every peer. Knows names and epochs, no transport."""

from __future__ import annotations

from fabric.errors import StaleTicket
from fabric.records import LinkAddress


class PeerBook:
    """Refuses addresses of incarnations that were overtaken: stale metadata of a peer can crash a transport."""

    def __init__(self) -> None:
        self._newest: dict[str, LinkAddress] = {}

    def admit(self, address: LinkAddress) -> LinkAddress | None:
        """Notes the address. Returns the older incarnation that it replaces, to be forgotten by the caller.

        Raises:
            StaleTicket: a newer incarnation of the peer was seen.
        """
        known = self._newest.get(address.peer)
        if known is not None and known.epoch > address.epoch:
            raise StaleTicket(
                f"{address.peer} of epoch {address.epoch} was replaced by epoch {known.epoch}", field="address"
            )
        self._newest[address.peer] = address
        return known if known is not None and known.epoch < address.epoch else None
