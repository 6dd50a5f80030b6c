"""Notices: what rides beside a one-sided write. Knows which handoff it belongs to and whether it was the last write."""

from __future__ import annotations

from dataclasses import dataclass

_MORE, _LAST, _TRAILING = b"\x01", b"\x02", b"\x03"
MAX_ID_BYTES = 64


@dataclass(frozen=True, slots=True)
class HandoffNotice:
    """`last`: the writer will not write for this handoff again, whether it wrote everything or gave up.

    `trailing`: it starts no write either, but one that it gave up may still be on its way.
    """

    handoff_id: str
    last: bool
    trailing: bool = False

    def dump(self) -> bytes:
        kind = _TRAILING if self.trailing else _LAST if self.last else _MORE
        return kind + self.handoff_id.encode()

    @staticmethod
    def load(payload: bytes) -> HandoffNotice | None:
        """The notice, or None for bytes that are none: whoever can connect can send anything."""
        kind = payload[:1]
        if kind not in (_MORE, _LAST, _TRAILING) or not 1 < len(payload) <= MAX_ID_BYTES + 1:
            return None
        try:
            return HandoffNotice(payload[1:].decode("ascii"), kind == _LAST, kind == _TRAILING)
        except UnicodeDecodeError:
            return None
