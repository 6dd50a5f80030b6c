"""How a block-scaled product is cut for Hopper: the shapes of `gemm_stream.cu`. Launches nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.cuda.gemm_pack import CHUNK_BYTES
from kernels.reference.gemm import DEPTH

WIDTHS = (8, 16, 32, 64, 128)
PROCESSORS = 132  # multiprocessors of an H100 or H200
_SPREAD = 1.3  # of the largest group's tokens over the average's, which should fit one tile
_FEW_CHANNELS = 1024
_FEW_TILES, _MOST_SPLIT = 64, 3  # up to so many tiles of 64 rows, channels are split; four do not divide the chip
_MANY, _MANY_OF_A_GROUP = 256, 128  # tokens beyond which large tiles are faster
# What 128 channels of a large tile take on an H200, by rows and passes, and what a row of it takes to begin and end.
_BLOCK_NS = {(64, 1): 300, (96, 1): 365, (128, 1): 428, (176, 1): 572, (192, 1): 592, (128, 2): 770}
_NS_OF_A_ROW = 4.7
_SHARES = (0.0, 0.39, 0.56, 0.8, 1.0)  # of a tile of two passes, where so many of its four times 64 tokens count
_MANY_OF_A_RUN, _LONG = 1024, 4096  # tokens of a run, and channels, from which two passes are faster for runs
_LIKELY = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)  # tokens of a group over the average's
_SHARED_BYTES = 232_448 - 1024  # what a block may ask for, and room to align
_LEAVING_BYTES = 8 * 2048  # of a large tile, 16 tokens by 64 rows of each warp
_SLOT_BYTES = 128 * 16  # sums of 64 rows of eight tokens
_ON_THEIR_WAY = 9  # stages of 64 rows to a multiprocessor, beyond which reading all weights once takes longer
_WHOLE_CHANNELS, _SPLIT_CHANNELS = 16, 64  # blocks of a tile from which a third warpgroup takes its turn
_MANY_BLOCKS = 64  # of a tile whose channels are not split, from which three threads fetch what 128 tokens take


@dataclass(frozen=True, slots=True)
class Stream:
    """How a product is cut.

    A block of threads takes 64 * row_groups rows and `tokens` at a time; depth_groups warpgroups of it take
    turns over channels. `split` blocks share a tile's channels. `once`: no block takes a second tile. `resident`
    blocks have room on a multiprocessor. The ring has `deepest` stages at most. `fetchers`: a thread that fetches all,
    or 3 that fetch weights, activations and scales apart.
    """

    tokens: int
    row_groups: int
    depth_groups: int
    split: int
    once: bool
    resident: int = 1
    deepest: int = 32
    fetchers: int = 1

    @property
    def threads(self) -> int:
        consumers = self.row_groups * self.depth_groups
        fewest = {64: 3, 128: 2}.get(self.tokens, 5)  # that trade registers, which takes whole warpgroups
        return 128 * consumers + (128 if fewest <= consumers <= 4 else 32)

    @property
    def block_rows(self) -> int:
        """Rows of a block of threads."""
        return 64 * self.row_groups

    @property
    def partial_bytes(self) -> int:
        """Sums of a tile on their way out: fp32 of every warpgroup, or bf16 where they are whole."""
        if self.depth_groups * self.split == 1 and self.tokens >= 16:
            return 4 * self.row_groups * min(self.tokens, 64) * 32
        return self.depth_groups * self.row_groups * self.tokens // 8 * _SLOT_BYTES

    @property
    def apart_bytes(self) -> int:
        """Room for sums beside the ring: those of a block's only tile lie where the ring was, others' come any time."""
        shares = -(-self.tokens // (8 * self.depth_groups * self.split))
        sent = self.depth_groups * shares * (self.split - 1) * self.row_groups * _SLOT_BYTES
        return sent + (0 if self.once else self.partial_bytes)

    def stage_bytes(self, fp4: bool) -> int:
        """One stage of the ring with its two barriers."""
        weight = self.block_rows // 64 * (CHUNK_BYTES if fp4 else 64 * DEPTH)
        return weight + self.tokens * (DEPTH + 4) + 16

    def stages(self, fp4: bool) -> int:
        """As many as shared memory holds and warpgroups that take turns share evenly: tiles arrive in any order, and
        one could run ahead into a stage whose former tile is late."""
        room = _SHARED_BYTES // self.resident - 1024 * (self.resident - 1)
        room -= self.apart_bytes + 8
        return min(room // self.stage_bytes(fp4), self.deepest) // self.depth_groups * self.depth_groups

    def shared_bytes(self, fp4: bool) -> int:
        return self.stages(fp4) * self.stage_bytes(fp4) + self.apart_bytes + 8

    def blocks(self, groups: int, capacity: int, rows: int) -> int:
        """Blocks of threads of a launch."""
        tiles = groups * -(-rows // self.block_rows) * -(-capacity // self.tokens)
        return self.split * (tiles if self.once else min(tiles, PROCESSORS * self.resident // self.split))


@dataclass(frozen=True, slots=True)
class Large:
    """How a product of many tokens is cut (`gemm_large.cu`): tiles of 128 * passes tokens by `rows`.

    `share` blocks of threads of a cluster fetch activations together. `fp4`: four more warps decode weights.
    """

    rows: int
    share: int = 1
    passes: int = 1
    fp4: bool = False

    @property
    def threads(self) -> int:
        return 512 if self.fp4 else 384

    @property
    def tokens(self) -> int:
        return 128 * self.passes

    @property
    def copied_tokens(self) -> int:
        """Tokens that one copy fetches."""
        return self.tokens // self.share

    @property
    def stage_bytes(self) -> int:
        """Operands, scales, a note and barriers; FP4 weights as they are packed, too."""
        packed = self.rows // 64 * CHUNK_BYTES + 8 if self.fp4 else 0
        return (self.tokens + self.rows) * DEPTH + self.tokens * 4 + 128 + 16 + packed

    @property
    def stages(self) -> int:
        """As many as shared memory holds beside what leaves."""
        return (_SHARED_BYTES - _LEAVING_BYTES) // 1024 * 1024 // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return -(-self.stages * self.stage_bytes // 1024) * 1024 + _LEAVING_BYTES

    def blocks(self, groups: int, capacity: int, rows: int) -> int:
        """Blocks of threads of a launch."""
        units = groups * -(-capacity // self.tokens) * -(-rows // (self.rows * self.share))
        clusters = PROCESSORS // self.share
        if self.halves(units) or (groups > 1 and self.passes > 1):  # where tokens are counted later, they may be
            return min(units * self.passes, clusters) * self.share
        turns = max(-(-units // clusters), 1)
        return -(-units // turns) * self.share  # those that would not shorten the last turn take power

    def halves(self, units: int) -> bool:
        """Whether the tiles of the last turn are taken by halves, and so half a turn is saved."""
        clusters = PROCESSORS // self.share
        return self.passes > 1 and 0 < 2 * (units % clusters) <= clusters


def choose_cut(
    rows: int, channels: int, groups: int, tokens: int, fp4: bool = False, grain: int = 128, masked: bool = False
) -> Stream | Large:  # fmt: skip
    """The fastest cut found on an H200 for `tokens` in a group on average, of either kernel.

    `masked`: groups of tokens lie apart; else tokens of several experts lie in runs, one behind another.
    """
    if tokens <= (_MANY if groups == 1 else _MANY_OF_A_GROUP):
        return choose_stream(rows, channels, groups, tokens, fp4, grain)
    return choose_large(rows, channels, groups, tokens, grain, masked, fp4)


def choose_large(
    rows: int, channels: int, groups: int, tokens: int, grain: int = 128, masked: bool = False, fp4: bool = False
) -> Large:  # fmt: skip
    """The tile that takes least, turns of all multiprocessors counted, for `tokens` in a group on average.

    A token's bits are the same whatever it says.
    """

    def cost(large: Large) -> float:
        units = _token_tiles(groups, tokens, large, masked) * -(-rows // (large.rows * large.share))
        block_ns = _BLOCK_NS[large.rows, large.passes]
        a_turn = channels / DEPTH * block_ns + _NS_OF_A_ROW * large.rows * large.passes
        return _turns(large, units) * a_turn

    runs = groups > 1 and not masked  # tiles of 256 tokens have two experts, more often the fewer tokens those have
    one_pass = runs and not fp4 and (tokens < _MANY_OF_A_RUN or channels < _LONG)
    return min((large for large in large_tiles(grain, fp4) if large.passes == 1 or not one_pass), key=cost)


def _turns(large: Large, units: float) -> float:
    """Of all multiprocessors, for so many tiles of a cluster; not whole where the number of tiles is an average."""
    clusters = PROCESSORS // large.share
    if large.passes == 1:
        return math.ceil(units / clusters)
    if units % 1:
        return units / clusters + 0.25
    rest = _SHARES[2] if large.halves(int(units)) else units % clusters > 0
    return units // clusters + rest


def large_tiles(grain: int, fp4: bool = False) -> list[Large]:
    """What `choose_large` chooses from for weights of which squares of `grain` share a scale."""
    if fp4:
        return [Large(128, share=2, passes=2, fp4=True)]
    tiles = (Large(width, 2 if passes > 1 else 1, passes) for width, passes in _BLOCK_NS)
    return [large for large in tiles if large.rows % 32 == 0 or grain == 128]


def _token_tiles(groups: int, tokens: int, large: Large, masked: bool) -> float:
    """Tiles of tokens, on average where there are several groups; of two passes, as many as take that long."""
    size = large.tokens
    if groups == 1:
        return -(-tokens // size)
    if not masked:
        return groups * (tokens / size + 0.5 / large.passes)
    counts = [int(tokens * part) for part in _LIKELY]
    if large.passes == 1:
        return groups * sum(-(-count // size) for count in counts) / len(counts)
    return groups * sum(count // size + _SHARES[-(-count % size // 64)] for count in counts) / len(counts)


def choose_stream(rows: int, channels: int, groups: int, tokens: int, fp4: bool = False, grain: int = 128) -> Stream:
    """The fastest cut found on an H200 for `tokens` in a group on average. Any cut is right for any counts."""
    if groups > 1:
        tokens = math.ceil(tokens * _SPREAD)
    width = next((width for width in WIDTHS if width >= tokens), WIDTHS[-1])
    if fp4:
        return Stream(width, 4, 1, 1, once=False) if width <= 32 else Stream(64, 2, 1, 1, once=False)
    if groups > 1 or tokens > 2 * WIDTHS[-1]:
        return _for_many(width, grain)
    return _for_few(rows, channels, width, -(-tokens // width), grain)


def _for_many(width: int, grain: int) -> Stream:
    """Many tiles: blocks of threads that stay."""
    if width < WIDTHS[-1] or grain == 32:
        return Stream(min(width, 64), 2, 2 if width < 64 else 1, 1, once=False)
    return Stream(width, 2, 1, 1, once=False)


def _for_few(rows: int, channels: int, width: int, token_tiles: int, grain: int) -> Stream:
    """Every multiprocessor reads weights: few rows a block of threads, and channels are split where rows are few.

    How channels are divided depends on the weights alone: up to 128 tokens, all cuts give a token the same bits.
    """
    if channels < _FEW_CHANNELS:  # no two warpgroups find enough to take turns over
        alone = width == WIDTHS[-1] and grain == 128
        return Stream(width, 1 if alone else 2, 1, 1, once=False, resident=2 if alone else 1, deepest=4)
    row_tiles = -(-rows // 64)
    if row_tiles > PROCESSORS:
        groups = min(-(-row_tiles // PROCESSORS), 4 if width <= 64 else 3 if grain == 128 else 2)  # what registers hold
        once = -(-row_tiles // groups) * token_tiles <= PROCESSORS
        return Stream(width, groups, 1, 1, once, deepest=max(12 // groups, 4))
    split = max(min(PROCESSORS // row_tiles, _MOST_SPLIT, channels // DEPTH // 8), 1) if row_tiles <= _FEW_TILES else 1
    if split == 1 and width >= 64 and row_tiles * token_tiles * 2 <= PROCESSORS:
        width, token_tiles = width // 2, token_tiles * 2
    once = row_tiles * token_tiles * split <= PROCESSORS or split > 1
    least = _WHOLE_CHANNELS if split == 1 else _SPLIT_CHANNELS
    blocks = channels // DEPTH // split
    turns = 3 if once and grain == 128 and blocks >= least else 2
    fetchers = 3 if width == WIDTHS[-1] and (split > 1 or blocks >= _MANY_BLOCKS) else 1
    return Stream(width, 1, turns, split, once, deepest=_ON_THEIR_WAY, fetchers=fetchers)
