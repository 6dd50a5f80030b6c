"""Notices: what rides beside a one-sided write. Knows which handoff it belongs to and whether it was the last write."""

from __future__ import annotations

from dataclasses import dataclass

_MORE, _LAST = b"\x01", b"\x02"
MAX_ID_BYTES = 64


@dataclass(frozen=True, slots=True)
class HandoffNotice:
    """`last`: the writer will not write for this handoff again, whether it wrote everything or gave up."""

    handoff_id: str
    last: bool

    def dump(self) -> bytes:
        return (_LAST if self.last else _MORE) + self.handoff_id.encode()

    @staticmethod
    def load(payload: bytes) -> HandoffNotice | None:
        """The notice, or None for bytes that are none: whoever can connect can send anything."""
        kind = payload[:1]
        if kind not in (_MORE, _LAST) or not 1 < len(payload) <= MAX_ID_BYTES + 1:
            return None
        try:
            return HandoffNotice(payload[1:].decode("ascii"), kind == _LAST)
        except UnicodeDecodeError:
            return None
