"""How a block-scaled product is cut for Hopper: the shapes of `gemm_stream.cu`. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cuda.gemm_pack import CHUNK_BYTES
from kernels.reference.gemm import DEPTH

WIDTHS = (8, 16, 32, 64, 128)
PROCESSORS = 132  # multiprocessors of an H100 or H200
_SHARED_BYTES = 232_448 - 1024  # what a block may ask for, and room to align


@dataclass(frozen=True, slots=True)
class Stream:
    """How a product is cut.

    A block of threads takes 64 * passes * row_groups rows and `tokens` at a time; depth_groups warpgroups of it take turns over
    channels. `split` blocks share a tile's channels; `share` blocks of other rows read the same activations, each a
    part for all. `once`: no block takes a second tile. `resident` blocks have room on a multiprocessor.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    once: bool
    resident: int = 1
    share: int = 1
    passes: int = 1

    @property
    def threads(self) -> int:
        return 128 * self.row_groups * self.depth_groups + (128 if self.passes > 1 else 32)

    @property
    def block_rows(self) -> int:
        """Rows of a block of threads."""
        return 64 * self.passes * self.row_groups

    @property
    def partial_bytes(self) -> int:
        """Sums of a tile on their way out: fp32, or bf16 where they are whole."""
        if self.depth_groups * self.split == 1 and self.tokens >= 16:
            return 4 * self.row_groups * min(self.tokens, 64) * 32
        return self.depth_groups * self.tokens * (self.block_rows * 4 + 16)

    def stage_bytes(self, fp4: bool) -> int:
        """One stage of the ring with its two barriers."""
        weight = self.block_rows // 64 * (CHUNK_BYTES if fp4 else 64 * DEPTH)
        return weight + self.tokens * (DEPTH + 4) + 16

    def stages(self, fp4: bool) -> int:
        """As many as shared memory holds."""
        room = _SHARED_BYTES // self.resident - 1024 * (self.resident - 1)
        room -= 0 if self.once else self.partial_bytes
        return min(room // self.stage_bytes(fp4), 32)

    def shared_bytes(self, fp4: bool) -> int:
        ring = self.stages(fp4) * self.stage_bytes(fp4) + (0 if self.once else self.partial_bytes)
        return max(ring, self.partial_bytes)

    def blocks(self, groups: int, capacity: int, rows: int) -> int:
        """Blocks of threads of a launch."""
        tiles = groups * -(-rows // (self.block_rows * self.share)) * -(-capacity // self.tokens)
        cluster = self.split * self.share
        return cluster * (tiles if self.once else min(tiles, PROCESSORS * self.resident // cluster))
