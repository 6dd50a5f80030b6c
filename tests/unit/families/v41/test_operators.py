"""V4.1's CPU operators equal the reference ones on odd shapes over scattered, poisoned memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu.csa2 import OPS as CPU
from kernels.cpu.linear import pack as cpu_pack
from kernels.csa2 import ChoiceSpec, EngramSpec, PoolSpec
from kernels.operands import HyperSite, RopeTable, Selection
from kernels.reference.csa2 import OPS as REFERENCE
from kernels.reference.linear import pack as reference_pack
from kernels.testing.generator import LANDMARKS, fill_pages, generator, pages_of, ragged_of, ring_of
from kernels.testing.numeric import assert_close

PAGE = 16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.parametrize(("rows", "streams", "hidden"), [(1, 4, 48), (13, 4, 40), (25, 2, 33)])
def test_mixing_and_collapse(rows: int, streams: int, hidden: int) -> None:
    draw = generator(rows)
    x, outputs = torch.randn(rows, streams, hidden, generator=draw), (2 + streams) * streams
    matrix = torch.randn(1, outputs, streams * hidden, generator=draw) * 0.05
    base, weight = torch.randn(outputs, generator=draw), torch.rand(hidden, generator=draw) + 0.5

    def site(pack: object) -> HyperSite:
        return HyperSite(pack(matrix, False), base, torch.tensor([1.1, 0.9, 1.2]), weight, streams, 20, 1e-6, 1e-20)

    expected, found = REFERENCE.hyper_mix(x, site(reference_pack)), CPU.hyper_mix(x, site(cpu_pack))
    for mine, theirs in zip(found, expected, strict=True):
        assert_close("hyper", mine, theirs)
    pre = expected[0]
    wanted = REFERENCE.hyper_collapse(x, pre, weight, 1e-20)
    assert_close("hyper", CPU.hyper_collapse(x, pre, weight, 1e-20), wanted)
    assert_close("hyper", CPU.norm(x[:, 0].contiguous(), weight, 1e-20), REFERENCE.norm(x[:, 0], weight, 1e-20))


@pytest.mark.parametrize(("rows", "heads", "width", "turned"), [(1, 1, 32, 32), (9, 4, 40, 16), (3, 3, 8, 2)])
def test_heads_are_turned_to_their_rows_positions(rows: int, heads: int, width: int, turned: int) -> None:
    draw = generator(rows + 1)
    x, angles = torch.randn(rows, heads * width, generator=draw), torch.randn(50, turned // 2, generator=draw)
    rope, at = RopeTable(angles.cos(), angles.sin()), np.arange(rows, dtype=np.int32) * 5 % 50
    before = x.clone()
    found = CPU.rotate_heads(x, width, at, rope)
    assert_close("hyper", found, REFERENCE.rotate_heads(x, width, at, rope))
    assert torch.equal(x, before), "the projection is not changed in place"
    kept = width - turned
    assert torch.equal(found.view(rows, heads, width)[..., :kept], x.view(rows, heads, width)[..., :kept])


@pytest.mark.parametrize("rate", [1, 2])
def test_pooled_latents_and_the_rows_left_open(rate: int) -> None:
    width, column, ragged = 24, 5, ragged_of(LANDMARKS, PAGE, (1, 2))
    projected = torch.randn(ragged.rows, column + 2 * width + 3, generator=generator(7))
    spec = PoolSpec(column, rate, width, torch.rand(width, generator=generator(8)) + 0.5, 1e-20)
    rings = [ring_of(ragged, 10, 2 * width, torch.float32, 9) if rate > 1 else None for _ in range(2)]
    expected, found = REFERENCE.pool(projected, spec, ragged, rings[0]), CPU.pool(projected, spec, ragged, rings[1])
    assert len(expected) == len(ragged.windows[rate].window) > 0
    assert_close("compress", found, expected)
    if rate > 1:
        assert torch.equal(rings[0].storage.nan_to_num(), rings[1].storage.nan_to_num())


@DTYPES
def test_entries_land_where_the_block_table_says(dtype: torch.dtype) -> None:
    ragged = ragged_of(LANDMARKS, PAGE, (1, 2))
    pages = [pages_of(ragged, PAGE, 2, 24, dtype, 3) for _ in range(2)]
    values = torch.randn(len(ragged.windows[2].window), 24, generator=generator(4))
    REFERENCE.store_entries(values, ragged, pages[0])
    CPU.store_entries(values, ragged, pages[1])
    assert torch.equal(pages[0].storage.nan_to_num(), pages[1].storage.nan_to_num())


@DTYPES
@pytest.mark.parametrize("rate", [1, 2])
@pytest.mark.parametrize(("topk", "blocks", "size"), [(8, 5, 4), (3, 0, 8), (40, 2, 4), (500, 500, 8), (8, 3, 5)])
def test_choices_and_candidates(topk: int, blocks: int, size: int, rate: int, dtype: torch.dtype) -> None:
    heads, width, ragged = 33, 16, ragged_of(LANDMARKS, PAGE, (1, 2))
    pages = pages_of(ragged, PAGE, rate, width, dtype, 5)
    fill_pages(ragged, pages, 6)
    queries = torch.randn(ragged.rows, heads * width, generator=generator(7))
    weights = torch.randn(ragged.rows, heads, generator=generator(8))
    spec = ChoiceSpec(heads, width, topk, blocks, size)
    expected, proposed = REFERENCE.choose(queries, weights, spec, ragged, pages, None)
    found, offered = CPU.choose(queries, weights, spec, ragged, pages, None)
    assert_same(found, expected)
    if not blocks:
        assert offered is None
        return
    assert_same(offered, proposed)
    again, other = torch.flip(queries, [1]).contiguous(), ChoiceSpec(heads, width, topk, 0, size)
    within, _ = REFERENCE.choose(again, weights, other, ragged, pages, proposed)
    assert_same(CPU.choose(again, weights, other, ragged, pages, proposed)[0], within)


def assert_same(found: Selection, expected: Selection) -> None:
    assert torch.equal(found.counts, expected.counts)
    for row, count in enumerate(expected.counts.tolist()):
        assert torch.equal(found.entries[row, :count], expected.entries[row, :count]), f"row {row}"


def test_engram_adds_nothing_to_dead_rows_and_the_gated_value_to_others() -> None:
    draw, rows, streams, hidden = generator(11), 9, 4, 21
    x, projected = torch.randn(rows, streams, hidden, generator=draw), torch.randn(rows, 5 * hidden, generator=draw)
    projected[3] = 0  # a key of length 0
    alive = torch.tensor(np.arange(rows) % 3 != 1)
    norms = [torch.rand(streams, hidden, generator=draw) + 0.5 for _ in range(2)]
    spec = EngramSpec(*norms, 1e-20)
    found = CPU.engram(x, projected, alive, spec)
    assert_close("hyper", found, REFERENCE.engram(x, projected, alive, spec))
    assert torch.equal(found[~alive], x[~alive])
