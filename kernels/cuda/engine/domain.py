"""What the Hopper kernels take of the engine's operators, in one place: everything else goes to the Triton operator.

Shapes and types alone decide, never values, so that a captured graph takes what a batch of its size takes. Launches
nothing and needs no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.operands import AttentionSpec, GroupRouterSpec, MlaSpec, Pages, Ring, RouterSpec
from kernels.reference.dense_decode import VALUE_WIDTH
from kernels.reference.dense_decode import WIDTH as LATENT_WIDTH
from kernels.reference.top_k import MAX_COLUMNS

SHARED_WIDTH = 512  # of keys that serve as values: V4's and V4.1's window rows and entries
_ROWS_A_BLOCK = 64  # heads, or heads times tokens, of one block of threads of attention
# Measured on an H200 (docs/benchmarks.md): from where on these kernels are the faster ones.
_LEAST_ROWS = 128  # heads times tokens of a batch, for dense decode
_LEAST_LAYER_ROWS = 256  # the same where few rows would run as a whole layer of chained kernels
_LEAST_RECORD_ROWS = 64  # the same over records
_LEAST_BLOCKS = 8  # of attention by name, which does not share a row's keys between blocks
_FUSED_TOKENS, _MOST_SCORES = 2, 1 << 28  # between which scores are written: choosing while scoring costs more there
_ALIGNED = 8  # elements of bf16: 16 bytes


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of what is chosen: which operator, which kernel, and where; elsewhere Triton."""

    operator: str
    kernel: str
    where: str


RULES = (
    Rule("attention over all cached latents", "dense_decode.cu", "bf16 cache of 512 + 64 channels (V2, V3), "
         f"{_LEAST_ROWS} heads times tokens or more"),
    Rule("attention over chosen latents", "sparse_prefill.cu", "bf16 cache of 512 + 64 channels (V3.2), "
         f"{_LEAST_BLOCKS} tokens or more for every 64 heads"),
    Rule("attention over all cached records", "dense_decode_fp8.cu", "kv_cache=records (V2, V3), "
         f"{_LEAST_RECORD_ROWS} heads times tokens or more"),
    Rule("attention over chosen records", "sparse_decode.cu", "kv_cache=records (V3.2)"),
    Rule("index scores and choice", "indexer_top_k.cu, mqa_logits.cu and top_k.cu", "kv_cache=records (V3.2, V4): up "
         f"to {_FUSED_TOKENS} tokens of a sequence or {_MOST_SCORES:,} scores at once are never written"),
    Rule("attention over records of a window and entries", "sparse_decode.cu", "kv_cache=records (V4, V4.1)"),
    Rule("attention over a window and entries", "sparse_prefill.cu", "bf16 cache of 512 channels (V4, V4.1), "
         f"{_LEAST_BLOCKS} tokens or more for every 64 heads"),
    Rule("products of stored weights", "gemm_stream.cu, gemm_large.cu", "weights=stored: FP8 in squares of 128 or 32 "
         "and FP4, outputs a multiple of 8 (FP4: 64) and channels of 128"),
    Rule("choice of experts", "gate.cu", "by scores, up to 32 of 1,024 experts in up to 32 groups; not by token id"),
    Rule("choice of entries", "top_k.cu", f"up to {MAX_COLUMNS} entries"),
)  # fmt: skip


def expands(rank: int, rope: int, dtype: torch.dtype) -> bool:
    """Whether long chunks attend un-absorbed: where dense decode and attention by name do not take their latents."""
    return (rank, rank + rope, dtype) != (VALUE_WIDTH, LATENT_WIDTH, torch.bfloat16)


def is_latent(spec: MlaSpec, pages: Pages) -> bool:
    """Whether cached rows are those that the kernels of latent attention read."""
    return (spec.rank, spec.rank + spec.rope) == (VALUE_WIDTH, LATENT_WIDTH) and _is_aligned(pages.storage, pages)


def attends_densely(spec: MlaSpec, pages: Pages, rows: int) -> bool:
    """Whether `dense_decode` takes rows that attend all of their sequence; over records nothing else does."""
    return pages.are_records or (rows * spec.heads >= _LEAST_ROWS and is_latent(spec, pages))


def beats_the_chain(spec: MlaSpec, pages: Pages, rows: int) -> bool:
    """Whether a layer of few rows is faster with `dense_decode` than as a chain of kernels that begin early."""
    least = _LEAST_RECORD_ROWS if pages.are_records else _LEAST_LAYER_ROWS
    return rows * spec.heads >= least and attends_densely(spec, pages, rows)


def attends_chosen(spec: MlaSpec, pages: Pages, rows: int) -> bool:
    """Whether attention by name takes rows that attend chosen latents."""
    return _is_busy(rows, spec.heads) and is_latent(spec, pages)


def writes_scores(tokens: int, rows: int, columns: int) -> bool:
    """Whether index scores of `rows` rows, `tokens` of each sequence, are written before the best are chosen."""
    return tokens > _FUSED_TOKENS and rows * columns <= _MOST_SCORES


def attends_window(spec: AttentionSpec, ring: Ring, pages: Pages | None, rows: int) -> bool:
    """Whether attention by name takes rows that attend a window and entries."""
    parts = (ring,) if pages is None else (ring, pages)
    held = all(_is_aligned(part.storage, part) for part in parts)
    return spec.width == SHARED_WIDTH and held and _is_busy(rows, spec.heads)


def gates(spec: RouterSpec | GroupRouterSpec) -> bool:
    """Whether the gate kernel makes this choice."""
    if isinstance(spec, RouterSpec):
        return spec.table is None and spec.topk <= min(32, spec.experts) and spec.experts <= 1024
    size = spec.experts // spec.groups
    fits = spec.groups <= 32 and spec.groups * size == spec.experts <= 1024
    return fits and not spec.always and spec.topk <= min(32, size * spec.kept_groups)


def ranks(scores: Tensor) -> bool:
    """Whether the top-k kernel takes these scores [rows, columns]."""
    return scores.shape[1] <= MAX_COLUMNS and not scores.stride(0) % 4 and not scores.data_ptr() % 16


def step_of(storage: Tensor, part: Pages | Ring) -> int:
    """Elements between two places that can be named: every row of `part` begins at a multiple of them."""
    return math.gcd(storage.stride(0), part.offset, part.width)


def _is_busy(rows: int, heads: int) -> bool:
    return rows * -(-heads // _ROWS_A_BLOCK) >= _LEAST_BLOCKS


def _is_aligned(storage: Tensor, part: Pages | Ring) -> bool:
    if storage.dtype != torch.bfloat16 or storage.data_ptr() % 16:
        return False
    step = step_of(storage, part)
    return not step % _ALIGNED and len(storage) * storage.stride(0) // step < 1 << 31
