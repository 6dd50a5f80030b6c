"""What services tell each other about a KV handoff: addresses, landings, extents. Knows no transport, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where one rank of a peer takes writes. A sharded peer has a list of these, one per rank.

    `epoch` rises with every incarnation of `peer`; an address whose epoch was overtaken is never used again.
    """

    url: str
    peer: str
    epoch: int
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class Landing:
    """Memory granted to one writer: bytes [offset, offset + size) of the region that `region` names at `address`.

    `lent_bytes`: of chunks that lie in the writer's own memory, announced and not taken. Where that is less than
    `size`, each of them has a place in the landing.
    """

    id: str
    address: LinkAddress
    region: bytes
    offset: int
    size: int
    lent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous run of canonical bytes inside a landing, sealed with the xxh3-64 digest of all its bytes."""

    group: str
    block: int
    valid_entries: int
    offset: int
    size: int
    digest: int

    @property
    def end(self) -> int:
        return self.offset + self.size
