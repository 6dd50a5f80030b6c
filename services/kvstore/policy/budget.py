"""Budgets: how many bytes each owner may have promised to it. Knows owners and sums, no blocks and no time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fabric.retention import RetentionClass


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose promise it is: one budget per tenant and retention class."""

    tenant: str = ""
    retention: RetentionClass = RetentionClass.DEFAULT


NOBODY = Owner()


class Budgets:
    """Promised bytes per owner, each within `owner_bytes`, all together within `total_bytes`."""

    def __init__(self, owner_bytes: int, total_bytes: int) -> None:
        self.owner_bytes, self._total_bytes = owner_bytes, total_bytes
        self._promised: Counter[Owner] = Counter()
        self.promised = 0  # bytes of all owners

    def of(self, owner: Owner) -> int:
        """Bytes promised to an owner."""
        return self._promised[owner]

    def can_promise(self, owner: Owner, size_bytes: int) -> bool:
        owned, total = self._promised[owner] + size_bytes, self.promised + size_bytes
        return owned <= self.owner_bytes and total <= self._total_bytes

    def could_promise(self, size_bytes: int) -> bool:
        """Whether there were room if nothing else was promised."""
        return size_bytes <= min(self.owner_bytes, self._total_bytes)

    def crowds(self, owner: Owner, size_bytes: int) -> bool:
        """Whether it is the owner's own budget that has no room."""
        return self._promised[owner] + size_bytes > self.owner_bytes

    def promise(self, owner: Owner, size_bytes: int) -> None:
        """Raises ValueError beyond a budget: ask `can_promise` first."""
        if not self.can_promise(owner, size_bytes):
            raise ValueError(f"{size_bytes} bytes are beyond the budget of {owner}")
        self._promised[owner] += size_bytes
        self.promised += size_bytes

    def end(self, owner: Owner, size_bytes: int) -> None:
        """Takes a promise back. Raises ValueError for more than was promised."""
        if size_bytes > self._promised[owner]:
            raise ValueError(f"{size_bytes} bytes were never promised to {owner}")
        self._promised[owner] -= size_bytes
        self.promised -= size_bytes
        if not self._promised[owner]:
            del self._promised[owner]
