"""Every operator of every backend against the reference, on odd shapes and over poisoned memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels import Ops, choose
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    ExpertBank,
    HyperHead,
    HyperSite,
    IndexerSpec,
    LatentSpec,
    Pages,
    Ring,
    RouterSpec,
    Selection,
)
from kernels.testing.generator import LANDMARKS, fill_pages, generator, pages_of, ragged_of, ring_of, rope_of
from kernels.testing.numeric import assert_close

REFERENCE = choose("reference")
PAGE = 16


@pytest.fixture(params=["cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return choose(request.param)


def copy_of(view: Pages | Ring) -> Pages | Ring:
    storage = view.storage.clone()
    array = storage.view(torch.uint16).numpy() if storage.dtype == torch.bfloat16 else storage.numpy()
    return dataclasses.replace(view, storage=storage, array=array)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(("groups", "outputs", "inner"), [(1, 1, 1), (1, 24, 40), (3, 17, 33), (2, 64, 16)])
@pytest.mark.parametrize("rows", [0, 1, 5, 13])
def test_linear_matches_the_reference(ops: Ops, rows: int, groups: int, outputs: int, inner: int, rounds: bool) -> None:
    draw = generator(rows + outputs)
    weight = torch.randn(groups, outputs, inner, generator=draw)
    x = torch.randn(rows, groups * inner, generator=draw)
    expected = REFERENCE.linear(x, REFERENCE.pack(weight, rounds))
    assert_close("linear", ops.linear(x, ops.pack(weight, rounds)), expected)


def test_weights_that_are_bf16_values_give_the_same_bits_in_half_the_bytes() -> None:
    cpu, draw = choose("cpu"), generator(1)
    weight = torch.randn(1, 20, 24, generator=draw).to(torch.bfloat16).to(torch.float32)
    x = torch.randn(7, 24, generator=draw)
    packed = cpu.pack(weight, False)
    wide = dataclasses.replace(packed, array=(packed.array.astype(np.uint32) << 16).view(np.float32))
    assert packed.array.dtype == np.uint16
    assert torch.equal(cpu.linear(x, packed), cpu.linear(x, wide))


@pytest.mark.parametrize("rows", [1, 6, 29])
@pytest.mark.parametrize(("streams", "hidden"), [(4, 32), (2, 20), (3, 7)])
def test_hyper_connections_match_the_reference(ops: Ops, streams: int, hidden: int, rows: int) -> None:
    draw = generator(streams * rows)
    outputs = (2 + streams) * streams
    fn = torch.randn(1, outputs, streams * hidden, generator=draw) * 0.1
    x, block = torch.randn(rows, streams, hidden, generator=draw), torch.randn(rows, hidden, generator=draw)
    base, scale, norm = (torch.randn(n, generator=draw) for n in (outputs, 3, hidden))
    found, expected = (
        chosen.hyper_pre(x, HyperSite(chosen.pack(fn, False), base, scale, norm, streams, 20, 1e-6, 1e-6))
        for chosen in (ops, REFERENCE)
    )
    for one, other in zip(found, expected, strict=True):
        assert_close("hyper", one, other)
    _, post, comb = expected
    torch.testing.assert_close(comb.sum(-2), torch.ones(rows, streams), rtol=0, atol=1e-4)  # ends on columns
    assert_close("hyper", ops.hyper_post(x, block, post, comb), REFERENCE.hyper_post(x, block, post, comb))
    head = [
        chosen.hyper_head(
            x, HyperHead(chosen.pack(fn[:, :streams], False), base[:streams], scale[:1], norm, streams, 1e-6, 1e-6)
        )
        for chosen in (ops, REFERENCE)
    ]
    assert_close("hyper", head[0], head[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_matches_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    draw = generator(3)
    ragged = ragged_of(LANDMARKS, PAGE, ())
    projected = torch.randn(ragged.rows, 40, generator=draw)
    spec = LatentSpec(torch.rand(12, generator=draw), torch.rand(20, generator=draw), 1e-6)
    found = ops.latent(projected, spec, ragged, rope_of(256, 4), dtype)
    expected = REFERENCE.latent(projected, spec, ragged, rope_of(256, 4), dtype)
    assert_close("latent", found[0], expected[0])
    assert found[1].dtype == dtype
    assert_close("latent" if dtype == torch.float32 else "bf16", found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rate", "overlap"), [(4, True), (16, False)])
def test_compressor_matches_the_reference(ops: Ops, rate: int, overlap: bool, dtype: torch.dtype) -> None:
    width, parts, draw = 20, 2 if overlap else 1, generator(rate)
    ragged = ragged_of(LANDMARKS, PAGE, (rate,))
    row_width = 2 * parts * width
    ring = ring_of(ragged, parts * rate + 3, row_width, torch.float32, 1)
    pages = pages_of(ragged, PAGE, rate, width, dtype, 2)
    projected = torch.randn(ragged.rows, row_width + 11, generator=draw)
    bias, norm = torch.randn(rate, parts * width, generator=draw), torch.rand(width, generator=draw)
    spec = CompressorSpec(5, rate, width, overlap, bias, norm, 1e-6)
    other_ring, other_pages = copy_of(ring), copy_of(pages)
    ops.compress(projected, spec, ragged, ring, pages, rope_of(256, 4))
    REFERENCE.compress(projected, spec, ragged, other_ring, other_pages, rope_of(256, 4))
    assert torch.equal(ring.storage.nan_to_num(-1), other_ring.storage.nan_to_num(-1))
    assert torch.equal(pages.storage.isnan(), other_pages.storage.isnan())
    name = "compress" if dtype == torch.float32 else "bf16"
    assert_close(name, pages.storage.nan_to_num(), other_pages.storage.nan_to_num())


def test_ring_keeps_the_newest_rows_when_more_arrive_than_it_holds(ops: Ops) -> None:
    ragged = ragged_of(((0, 37), (130, 1)), PAGE, ())
    rows = torch.randn(ragged.rows, 9, generator=generator(4))
    ring = ring_of(ragged, 10, 5, torch.float32, 1)
    ops.store_rows(rows, 2, ragged, ring)
    held = ring.storage[int(ragged.slots[0]), ring.offset :].view(10, 5)
    for position in range(27, 37):
        assert torch.equal(held[position % 10], rows[position, 2:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_indexer_chooses_as_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    ragged = ragged_of(LANDMARKS, PAGE, (4,))
    pages = pages_of(ragged, PAGE, 4, 20, dtype, 2)
    fill_pages(ragged, pages, 3)
    queries = torch.randn(ragged.rows, 3 + 18 * 20, generator=generator(5))
    projected = torch.randn(ragged.rows, 2 + 18, generator=generator(6))
    spec = IndexerSpec(3, 2, 18, 20, 6)
    found = ops.index_topk(queries, projected, spec, ragged, pages, rope_of(256, 4))
    expected = REFERENCE.index_topk(queries, projected, spec, ragged, pages, rope_of(256, 4))
    assert torch.equal(found.counts, expected.counts)
    for row, count in enumerate(found.counts):
        assert torch.equal(found.entries[row, :count], expected.entries[row, :count])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_indexer_takes_the_lowest_entries_among_equal_scores(backend: str) -> None:
    ragged = ragged_of(((200, 1),), PAGE, (4,))
    pages = pages_of(ragged, PAGE, 4, 16, torch.float32, 2)
    pages.storage.fill_(1.0)
    entry = pages.storage[int(ragged.tables[0, 40 // 4])]
    entry[pages.offset : pages.offset + 16] = 2.0  # entry 40 scores higher than all others
    ones = torch.ones(1, 16)
    spec = IndexerSpec(0, 0, 1, 16, 6)
    table = dataclasses.replace(rope_of(256, 2), cos=torch.ones(256, 2), sin=torch.zeros(256, 2))
    chosen = choose(backend).index_topk(ones, ones, spec, ragged, pages, table)
    assert chosen.entries[0, : int(chosen.counts[0])].tolist() == [0, 1, 2, 3, 4, 40]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["window", "all", "chosen"])
@pytest.mark.parametrize(("heads", "width"), [(3, 20), (8, 32), (40, 16)])
def test_attention_matches_the_reference(ops: Ops, heads: int, width: int, mode: str, dtype: torch.dtype) -> None:
    draw, rate, window = generator(heads), 4, 16
    ragged = ragged_of(LANDMARKS, PAGE, (rate,))
    ring = ring_of(ragged, window + 3, width, dtype, 1)
    pages = pages_of(ragged, PAGE, rate, width, dtype, 2)
    fill_pages(ragged, pages, 3)
    queries = torch.randn(ragged.rows, heads * width + 5, generator=draw)
    fresh = torch.randn(ragged.rows, width, generator=draw).to(dtype)
    spec = AttentionSpec(heads, width, window, torch.randn(heads, generator=draw), 1e-6)
    selection = choice(ragged.positions, rate, 6) if mode == "chosen" else None
    operands = (queries, fresh, spec, ragged, ring, None if mode == "window" else pages, selection, rope_of(256, 4))
    assert_close("attend", ops.attend(*operands), REFERENCE.attend(*operands))


def choice(positions: np.ndarray, rate: int, topk: int) -> Selection:
    """All visible entries where they fit, else `topk` random ones, ascending."""
    rng = np.random.default_rng(0)
    entries, counts = np.zeros((len(positions), topk), np.int32), np.zeros(len(positions), np.int32)
    for row, position in enumerate(positions):
        visible = (int(position) + 1) // rate
        counts[row] = min(visible, topk)
        entries[row, : counts[row]] = np.sort(rng.permutation(visible)[:topk])
    return Selection(torch.from_numpy(entries), torch.from_numpy(counts))


@pytest.mark.parametrize("rows", [1, 13, 40])
@pytest.mark.parametrize("kind", ["learned", "hashed"])
def test_router_matches_the_reference(ops: Ops, kind: str, rows: int) -> None:
    draw, experts = generator(rows), 19
    x, gate = torch.randn(rows, 24, generator=draw), torch.randn(1, experts, 24, generator=draw)
    bias = torch.randn(experts, generator=draw) if kind == "learned" else None
    table = torch.rand(32, experts, generator=draw).argsort(1)[:, :3].contiguous() if kind == "hashed" else None
    tokens = torch.randint(0, 32, (rows,), generator=draw)
    found, expected = (
        chosen.route(x, tokens, RouterSpec(chosen.pack(gate, False), bias, table, experts, 3, 1.5))
        for chosen in (ops, REFERENCE)
    )
    assert torch.equal(found[0], expected[0])
    assert_close("route", found[1], expected[1])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_router_takes_the_lower_expert_in_a_tie(backend: str) -> None:
    ops = choose(backend)
    spec = RouterSpec(ops.pack(torch.ones(1, 8, 4), False), torch.zeros(8), None, 8, 3, 1.0)
    chosen, weights = ops.route(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), spec)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 48), (20, 9)])
def test_experts_match_the_reference(ops: Ops, hidden: int, inner: int, rows: int, rounds: bool) -> None:
    draw, experts = generator(rows), 5
    gate, up = (torch.randn(experts + 1, inner, hidden, generator=draw) for _ in range(2))
    down = torch.randn(experts + 1, hidden, inner, generator=draw) * 0.1
    x = torch.randn(rows, hidden, generator=draw)
    chosen = torch.rand(rows, experts - 1, generator=draw).argsort(1)[:, :2].to(torch.int32).contiguous()  # one idles
    weights = torch.rand(rows, 2, generator=draw)
    found, expected = (
        one.experts(
            x, chosen, weights, ExpertBank(*(one.pack(w, rounds) for w in (gate, up, down)), experts, inner, 2.0)
        )
        for one in (ops, REFERENCE)
    )
    assert_close("bf16" if rounds else "experts", found, expected)
