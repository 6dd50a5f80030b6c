"""Retention: whose cached KV a request reads and writes, and what it belongs to. Knows no seconds and no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OWNER_BYTES = 16


class RetentionClass(StrEnum):
    """What a request belongs to: how long its KV is worth keeping is the store's to say."""

    DEFAULT = "default"
    CHAT = "chat"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a request's KV is kept for. `owner`: opaque id of the tenant, `OWNER_BYTES` long; empty: nobody's."""

    owner: bytes = b""
    retention: RetentionClass = RetentionClass.DEFAULT


UNOWNED = Keeping()
