"""The whole latent layer: equal to its operators in torch, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from kernels import Ops, choose
from kernels.operands import ExpertBank, GroupRouterSpec, MlaLayer, MlaSpec, Pages, Ragged
from kernels.testing.generator import LANDMARKS, generator, pages_of, ragged_of, rope_of
from kernels.testing.numeric import assert_close

PAGE = 16
HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK, QUERY = 24, 5, 6, 8, 7, 20, 18
EXPERTS, INNER = 8, 20
REFERENCE = choose("reference")


def layer_of(ops: Ops, rounds: bool, routed: bool, narrow: bool) -> MlaLayer:
    """`routed`: experts, else one MLP; `narrow`: queries come through a latent."""
    draw = generator(7)

    def packed(*shape: int, exact: bool = False) -> object:
        return ops.pack(torch.randn(*shape, generator=draw) * 0.3, rounds and not exact)

    def norm(width: int) -> torch.Tensor:
        return torch.rand(width, generator=draw) + 0.5

    queries, banks = HEADS * (NOPE + ROPE), EXPERTS + 2 if routed else 1
    column = QUERY if narrow else queries
    absorb, output = packed(HEADS, RANK, NOPE), packed(HEADS, VALUE, RANK)
    spec = MlaSpec(HEADS, NOPE, ROPE, VALUE, RANK, column, norm(RANK), 1e-6, 0.3, absorb, output, None)
    bias = torch.randn(EXPERTS, generator=draw) * 0.1
    router = GroupRouterSpec(packed(1, EXPERTS, HIDDEN, exact=True), bias, EXPERTS, 3, 4, 2, 2, True, True, 2.5, 1)
    bank = ExpertBank(
        packed(banks, INNER, HIDDEN), packed(banks, INNER, HIDDEN), packed(banks, HIDDEN, INNER), banks - 1, INNER,
        math.inf,
    )  # fmt: skip
    return MlaLayer(
        norm(HIDDEN), norm(HIDDEN), 1e-6, packed(1, column + RANK + ROPE, HIDDEN), norm(QUERY) if narrow else None,
        packed(1, queries, QUERY) if narrow else None, spec, packed(1, HIDDEN, HEADS * VALUE),
        router if routed else None, bank,
    )  # fmt: skip


def cached(ragged: Ragged, dtype: torch.dtype) -> Pages:
    """Rows of every position before the batch, NaN elsewhere."""
    return pages_of(ragged, PAGE, 1, RANK + ROPE, dtype, 2)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_matches_its_operators_and_caches_the_same_rows(dtype: torch.dtype, routed: bool, narrow: bool) -> None:
    rounds, ragged, rope = dtype == torch.bfloat16, ragged_of(LANDMARKS, PAGE, ()), rope_of(256, ROPE // 2)
    x = torch.randn(ragged.rows, HIDDEN, generator=generator(3))
    found, expected = [], []
    for backend, results in (("cpu", found), ("reference", expected)):
        ops, pages = choose(backend), cached(ragged, dtype)
        ops.begin()
        results += [ops.mla_layer(x, layer_of(ops, rounds, routed, narrow), ragged, pages, rope), pages.storage]
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    assert_close("bf16 layer" if rounds else "layer", found[0], expected[0])
    assert_close("bf16" if rounds else "latent", found[1].nan_to_num(), expected[1].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_as_among_others(dtype: torch.dtype) -> None:
    ops, rope, ragged = choose("cpu", batch_invariant=True), rope_of(256, ROPE // 2), ragged_of(LANDMARKS, PAGE, ())
    ops.begin()
    layer = layer_of(ops, dtype == torch.bfloat16, True, True)
    x, pages = torch.randn(ragged.rows, HIDDEN, generator=generator(4)), cached(ragged, dtype)
    together = ops.mla_layer(x, layer, ragged, pages, rope)
    fresh = cached(ragged, dtype)
    for row in range(ragged.rows):
        alone = ops.mla_layer(x[row : row + 1], layer, _only(ragged, row), fresh, rope)
        assert torch.equal(alone[0], together[row])


def _only(ragged: Ragged, row: int) -> Ragged:
    """A batch of that row, whose predecessors are cached."""
    s = ragged.sequences[row]
    return dataclasses.replace(
        ragged,
        tokens=ragged.tokens[row : row + 1],
        positions=ragged.positions[row : row + 1],
        sequences=np.zeros(1, np.int32),
        starts=np.array([0, 1], np.int32),
        context=ragged.positions[row : row + 1],
        slots=ragged.slots[s : s + 1],
        tables=ragged.tables[s : s + 1],
    )
