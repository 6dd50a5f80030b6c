"""Register tiles: every way to cut a product gives each output the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import Ops, choose
from kernels.cpu.headtile import HEADS, mix_values, score_keys
from kernels.operands import ExpertBank
from kernels.testing.generator import generator

ROWS = 33


@pytest.fixture(scope="module")
def ops() -> Ops:
    chosen = choose("cpu", batch_invariant=True)
    chosen.begin()
    return chosen


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(("groups", "outputs", "inner"), [(1, 24, 40), (3, 17, 33), (2, 64, 16), (1, 112, 20)])
def test_a_product_gives_a_row_the_same_bits_in_every_batch(
    ops: Ops, groups: int, outputs: int, inner: int, rounds: bool
) -> None:
    draw = generator(outputs)
    weight = ops.pack(torch.randn(groups, outputs, inner, generator=draw), rounds)
    x = torch.randn(ROWS, groups * inner, generator=draw)
    whole = ops.linear(x, weight)
    for count in (1, 2, 3, 4, 5, 7, 8, 12):
        for first in range(0, ROWS, count):
            part = slice(first, first + count)
            assert torch.equal(ops.linear(x[part], weight), whole[part])


@pytest.mark.parametrize("rounds", [False, True])
def test_experts_give_a_row_the_same_bits_in_every_batch(ops: Ops, rounds: bool) -> None:
    draw, experts, hidden, inner = generator(3), 5, 40, 56
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    packed = (ops.pack(torch.randn(experts + 1, *shape, generator=draw), rounds) for shape in shapes)
    bank = ExpertBank(*packed, experts, inner, 7.0)
    x, weights = torch.randn(ROWS, hidden, generator=draw), torch.rand(ROWS, 2, generator=draw)
    chosen = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(ROWS)]).to(torch.int32)
    whole = ops.experts(x, chosen, weights, bank)
    for count in (1, 2, 3, 5, 8):
        for first in range(0, ROWS, count):
            part = slice(first, first + count)
            assert torch.equal(ops.experts(x[part], chosen[part], weights[part], bank), whole[part])


@pytest.mark.parametrize("width", [5, 8, 24, 29, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_mixtures_of_scattered_rows_are_products_and_no_neighbour_changes_a_bit(
    width: int, dtype: torch.dtype
) -> None:
    keys, draw = 11, generator(width)
    queries = torch.randn(HEADS, width, generator=draw).numpy()
    rows, weights = torch.randn(keys, width, generator=draw).to(dtype), torch.rand(keys, HEADS, generator=draw).numpy()
    stored = torch.full((keys * (width + 3),), torch.nan, dtype=dtype)
    places = torch.randperm(keys, generator=draw).numpy() * (width + 3)
    for at, row in zip(places, rows, strict=True):
        stored[at : at + width] = row
    flat = stored.view(torch.uint16).numpy() if dtype == torch.bfloat16 else stored.numpy()
    scores, mixed = np.empty((keys, HEADS), np.float32), np.zeros((HEADS, width), np.float32)
    score_keys(queries, flat, places, width, scores)
    mix_values(weights, flat, places, 0, keys, width, mixed)
    wide = rows.float().numpy()
    assert np.allclose(scores, wide @ queries.T, atol=1e-5)
    assert np.allclose(mixed, weights.T @ wide, atol=1e-5)
    for i in range(keys):
        alone = np.empty((1, HEADS), np.float32)
        score_keys(queries, flat, places[i : i + 1], width, alone)
        assert np.array_equal(alone[0], scores[i])
    pieces = np.zeros_like(mixed)
    for first in (0, 4):
        mix_values(weights, flat, places, first, min(4, keys - first) if first == 0 else keys - 4, width, pieces)
    assert np.array_equal(pieces, mixed)
