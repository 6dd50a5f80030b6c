"""Operands of the operators: ragged batches, views of the KV pools, each operator's weights. Knows no algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

CPU = torch.device("cpu")
Weights: TypeAlias = Any  # what Ops.pack returned: opaque to everybody but the backend that made it


@dataclass(frozen=True, slots=True)
class Windows:
    """Compressor windows that this batch completes, for one rate: `[windows]` sequence and window numbers, int32."""

    sequence: np.ndarray
    window: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """The arrays of a `Ragged` on a device, int32. A negative sequence, position or slot belongs to no live row."""

    tokens: torch.Tensor
    positions: torch.Tensor
    sequences: torch.Tensor
    starts: torch.Tensor
    context: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    floors: torch.Tensor
    windows: dict[int, tuple[torch.Tensor, torch.Tensor]]  # by compress rate: sequence and window numbers
    # What one layer has made of these arrays alone, for those that follow: see `kernels.staging.once`.
    made: dict[tuple[object, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of several sequences back to back. Row `i` of sequence `s` is token `context[s] + i - starts[s]`."""

    tokens: np.ndarray  # int64 [rows]
    positions: np.ndarray  # int32 [rows]
    sequences: np.ndarray  # int32 [rows] which sequence a row belongs to
    starts: np.ndarray  # int32 [sequences + 1]
    context: np.ndarray  # int32 [sequences] tokens cached before this batch
    slots: np.ndarray  # int32 [sequences] window slot
    tables: np.ndarray  # int32 [sequences, blocks] block ids, padded with 0
    windows: dict[int, Windows]  # by compress rate
    floors: np.ndarray | None = None  # int32 [sequences] first position a window may hold; None: all are 0
    # Remembered by kernels.staging once it is made; a changed copy of the batch has none.
    staged: Staged | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def window_floors(self) -> np.ndarray:
        """First position that each sequence's window rows may see, int32 [sequences]."""
        return np.zeros(len(self.slots), np.int32) if self.floors is None else self.floors

    @property
    def rows(self) -> int:
        """Rows in the batch."""
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer of one GLOBAL cache group: entry `e` of block `b` is `storage[b, offset + e * width :][:width]`.

    Where the storage is uint8, an entry is a published record (reference/records.py) and `width` its bytes.
    """

    storage: torch.Tensor  # [blocks, elements of a block]
    array: np.ndarray | None  # the same memory, where it is the host's; bf16 appears as uint16
    offset: int
    entries: int  # per block
    width: int
    rate: int  # tokens per entry
    scales: Pages | None = None  # of records whose scales stand apart: an index key's fp32, or V4's 8 bytes

    @property
    def are_records(self) -> bool:
        """Whether entries are published records, and not numbers of one type."""
        return self.storage.dtype == torch.uint8


@dataclass(frozen=True, slots=True)
class Ring:
    """One layer of one WINDOW group: position `p` is `storage[slot, offset + (p % capacity) * width :][:width]`.

    Where the storage is uint8, a row is a published record and `width` its bytes, as of pages.
    """

    storage: torch.Tensor  # [slots, elements of a slot]
    array: np.ndarray | None  # the same memory, where it is the host's; bf16 appears as uint16
    offset: int
    capacity: int
    width: int
    scales: Ring | None = None  # of records whose scales stand apart

    @property
    def are_records(self) -> bool:
        """Whether rows are published records, and not numbers of one type."""
        return self.storage.dtype == torch.uint8

    def takes_first(self, ragged: Ragged, window: int) -> bool:
        """Whether a batch's rows are stored before they are attended, and not after: records are attended where they
        lie, if the new ones displace none that a row of the batch sees."""
        return self.are_records and int(np.diff(ragged.starts).max()) <= self.capacity - window + 1


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine of every position in use, fp32 `[positions, rope width / 2]`, for interleaved pairs."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HyperSite:
    """Hyper-connection of one block: how `streams` residuals mix into its input and back, and its input norm."""

    mix: Weights  # [(2 + m) * m, m * hidden]
    base: torch.Tensor  # [(2 + m) * m] fp32
    scale: torch.Tensor  # [3] fp32
    norm: torch.Tensor  # [hidden] fp32
    streams: int
    iterations: int  # of Sinkhorn
    hyper_eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class HyperHead:
    """Collapse of the residual streams before the final norm."""

    mix: Weights  # [m, m * hidden]
    base: torch.Tensor  # [m] fp32
    scale: torch.Tensor  # [1] fp32
    norm: torch.Tensor  # [hidden] fp32
    streams: int
    hyper_eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Where the query latent and the window key stand in the fused projection, and their norms."""

    query_norm: torch.Tensor  # [q_lora_rank] fp32; columns 0 .. q_lora_rank
    key_norm: torch.Tensor  # [head_dim] fp32; the next head_dim columns
    norm_eps: float


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """A compressor: columns `column .. + 2 * parts * width` of the fused projection hold `[content | gate]`."""

    column: int
    rate: int
    width: int
    overlap: bool  # two parts per row: one for the window itself, one for the window after it
    bias: torch.Tensor  # [rate, parts * width] fp32, added to the gate by position in the window
    norm: torch.Tensor  # [width] fp32
    norm_eps: float
    mixing: IndexMixing | None = None  # of index keys that are cached as records

    @property
    def row_width(self) -> int:
        """Elements of one `[content | gate]` row."""
        return self.width * (4 if self.overlap else 2)


@dataclass(frozen=True, slots=True, eq=False)
class IndexMixing:
    """How index keys become records, and queries what meets them: mixed channels, then FP8 with one scale a row.

    `matrix` is orthogonal, so that no score changes by itself; it spreads large channels before few bits are left.
    """

    matrix: torch.Tensor  # fp32 [width, width]; a row x becomes matrix @ x
    powers: bool  # whether scales are powers of two


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The lightning indexer: query columns of the query projection, head weight columns of the fused projection."""

    query_column: int
    weight_column: int
    heads: int
    width: int
    topk: int
    mixing: IndexMixing | None = None  # None: keys are cached as they are


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries each row attends: the first `counts[row]` of `entries[row]`, ascending. int32."""

    entries: torch.Tensor  # [rows, topk]
    counts: torch.Tensor  # [rows]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Shared-key attention over a window, compressed entries and a per-head sink."""

    heads: int
    width: int
    window: int
    sink: torch.Tensor  # [heads] fp32
    norm_eps: float | None  # of the norm of each query head; None where the model has none


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Expert choice: learned (bias) or by token id (table)."""

    gate: Weights  # [experts, hidden]
    bias: torch.Tensor | None  # [experts] fp32, used for the choice only
    table: torch.Tensor | None  # [vocabulary, topk] int64
    experts: int
    topk: int
    scaling: float


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """Routed experts and, last, the shared one: y = down(silu(min(gate x, limit)) * clamp(up x, -limit, limit))."""

    gate: Weights  # [experts + 1, inner, hidden]; all three (reference/scaled.py) where weights are kept as published
    up: Weights | None  # [experts + 1, inner, hidden]; None there
    down: Weights | None  # [experts + 1, hidden, inner]; None there
    experts: int
    inner: int
    limit: float


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: one cached row `[latent | rotated key]` per token, shared by all heads.

    Queries are `[heads * nope | heads * rope]`. `absorb` and `output` are the two halves of the key-value projection,
    taken over to the query and to the mixed latents; `expand` is that projection itself.
    """

    heads: int
    nope: int  # channels of a head that carry no position
    rope: int  # channels of a head that do
    value: int
    rank: int  # of the latent
    column: int  # where `[latent | key]` begins in the fused input projection
    norm: torch.Tensor  # [rank] fp32
    norm_eps: float
    scale: float  # of the scores
    absorb: Weights  # [heads, rank, nope]
    output: Weights  # [heads, value, rank]
    expand: Weights | None  # [heads * (nope + value), rank]; None where the un-absorbed form is never used


@dataclass(frozen=True, slots=True)
class IndexKeySpec:
    """The lightning indexer's own key: `width` columns of the fused projection, layer-normed, then rotated."""

    column: int
    norm: torch.Tensor  # [width] fp32
    bias: torch.Tensor  # [width] fp32
    norm_eps: float
    mixing: IndexMixing | None = None  # None: keys are cached as they are


@dataclass(frozen=True, slots=True)
class GroupRouterSpec:
    """Expert choice within the best groups; `always` further experts follow, which every row takes with weight 1."""

    gate: Weights  # [experts, hidden]
    bias: torch.Tensor | None  # [experts] fp32, used for the choice only
    experts: int
    topk: int
    groups: int
    kept_groups: int
    group_best: int  # a group's score is the sum of this many of its best experts
    sigmoid: bool  # else softmax over all experts
    normalize: bool
    scaling: float
    always: int


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """One transformer layer that attends every cached row: latent attention, then grouped experts or one wide MLP."""

    attention_norm: torch.Tensor  # [hidden] fp32
    mlp_norm: torch.Tensor  # [hidden] fp32
    norm_eps: float
    input: Weights  # [query rank or heads * (nope + rope), + rank + rope; hidden]
    query_norm: torch.Tensor | None  # [query rank] fp32; None: queries are the first columns of the input projection
    query: Weights | None  # [heads * (nope + rope), query rank]
    attention: MlaSpec
    output: Weights  # [hidden, heads * value]
    router: GroupRouterSpec | None  # None: only the bank's last expert runs
    experts: ExpertBank
