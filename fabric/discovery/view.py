"""What one watcher believes about a service's members. Knows listings and events, no clock and no network."""

from __future__ import annotations

from collections.abc import Iterable

from fabric.discovery.member import MemberInfo


class View:
    """Members by instance. After a loss of the backend, absence is not believed at once.

    A backend that comes back, perhaps with an empty store or with leases that expired while it slept, has not yet heard
    from members that are well: those are kept for `grace_s`, long enough for each to register again.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._members: dict[str, MemberInfo] = {}
        self._doubted: dict[str, float] = {}  # instance -> when to stop believing in it
        self._lost = False
        self._grace_ends = float("-inf")

    def lost(self) -> None:
        """The backend did not answer: keep everything."""
        self._lost = True

    def listed(self, now: float, members: Iterable[MemberInfo]) -> None:
        """The backend answered with the whole set."""
        if self._lost:
            self._lost, self._grace_ends = False, now + self._grace_s
        fresh = {member.instance: member for member in members}
        for instance in self._members.keys() - fresh.keys():
            self._absent(now, instance)
        for member in fresh.values():
            self.put(member)

    def put(self, member: MemberInfo) -> None:
        known = self._members.get(member.instance)
        if known is not None and known.epoch > member.epoch:
            return
        self._members[member.instance] = member
        self._doubted.pop(member.instance, None)

    def deleted(self, now: float, instance: str) -> None:
        if instance in self._members:
            self._absent(now, instance)

    def expire(self, now: float) -> None:
        """Drops the members whose grace is over."""
        for instance in [name for name, until in self._doubted.items() if until <= now]:
            del self._doubted[instance]
            self._members.pop(instance, None)

    def next_expiry(self) -> float | None:
        return min(self._doubted.values(), default=None)

    def snapshot(self) -> tuple[MemberInfo, ...]:
        return tuple(self._members[instance] for instance in sorted(self._members))

    def _absent(self, now: float, instance: str) -> None:
        if now < self._grace_ends:
            self._doubted.setdefault(instance, self._grace_ends)
        elif instance not in self._doubted:
            del self._members[instance]
