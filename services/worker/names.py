"""Names: how a store is asked for blocks of one prefix. Knows keys and tokens; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.deepinfer.v1 import kvstore_pb2 as pb


@dataclass(frozen=True, slots=True)
class Names:
    """Blocks that follow each other in a prefix. `tokens`: little-endian uint32, as many bytes of each block."""

    keys: Sequence[bytes]
    tokens: bytes

    def pack(self, first: int = 0, end: int | None = None) -> pb.BlockNames:
        """Blocks [first, end), to the last one by default."""
        size = len(self.tokens) // max(1, len(self.keys))
        last = len(self.keys) if end is None else end
        return pb.BlockNames(keys=b"".join(self.keys[first:last]), tokens=self.tokens[first * size : last * size])
