"""Attention over a window and compressed entries on Hopper, each part of the keys by name."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda.engine import domain, named, window_records
from kernels.cuda.spans import INVARIANT_SPAN
from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection
from kernels.triton.engine import attend as by_triton
from kernels.triton.engine import invariant


def attend(
    queries: Tensor, fresh: Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring, pages: Pages | None,
    selection: Selection | None, rope: RopeTable,
) -> Tensor:  # fmt: skip
    """As reference.attend.attend."""
    if ring.are_records:
        return window_records.attend(queries, fresh, spec, ragged, ring, pages, selection, rope)
    if not domain.attends_window(spec, ring, pages, len(queries)) or fresh.dtype != torch.bfloat16:
        return by_triton.attend(queries, fresh, spec, ragged, ring, pages, selection, rope)
    query = by_triton.turn_queries(queries, spec, ragged, rope, torch.bfloat16)
    lists = [named.in_ring(ragged, ring, spec.window), named.in_batch(ragged, fresh, spec.window)]
    if pages is not None:
        lists.append(named.in_pages(ragged, pages, selection))
    parts = [named.attend(query, one, spec.width**-0.5) for one in lists]
    return named.joined(parts, spec, ragged, rope)


def attend_invariant(
    queries: Tensor, fresh: Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring, pages: Pages | None,
    selection: Selection | None, rope: RopeTable,
) -> Tensor:  # fmt: skip
    """The same, with kernels and a split that do not depend on how many rows there are. Over rows by Triton: by name,
    mixtures of what was there before a batch and of what came with it are rounded each on its own."""
    if ring.are_records:
        return window_records.attend(queries, fresh, spec, ragged, ring, pages, selection, rope, INVARIANT_SPAN)
    return invariant.attend(queries, fresh, spec, ragged, ring, pages, selection, rope)
