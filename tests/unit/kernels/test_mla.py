"""Operators of latent attention and grouped routing against the reference, on odd shapes, over poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import Ops, choose
from kernels.operands import GroupRouterSpec, IndexKeySpec, MlaSpec, Pages, Ragged, Selection
from kernels.testing.generator import LANDMARKS, fill_pages, generator, pages_of, ragged_of, rope_of
from kernels.testing.numeric import assert_close

REFERENCE = choose("reference")
PAGE = 16
HEADS, RANK, ROPE = 3, 20, 8
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return choose(request.param)


def copy_of(pages: Pages) -> Pages:
    storage = pages.storage.clone()
    array = storage.view(torch.uint16).numpy() if storage.dtype == torch.bfloat16 else storage.numpy()
    return dataclasses.replace(pages, storage=storage, array=array)


def spec_of(norm: torch.Tensor, column: int = 0) -> MlaSpec:
    return MlaSpec(HEADS, 6, ROPE, 5, RANK, column, norm, 1e-6, 0.3, None, None, None)


def written(ragged: Ragged, width: int, dtype: torch.dtype) -> Pages:
    """Rows of every position up to the batch's last, NaN elsewhere."""
    pages = pages_of(ragged, PAGE, 1, width, dtype, 2)
    fill_pages(ragged, pages, 3)
    return pages


def test_norm_matches_the_reference(ops: Ops) -> None:
    draw = generator(1)
    for rows, width in ((1, 1), (5, 33), (13, 128)):
        x, weight = torch.randn(rows, width, generator=draw), torch.rand(width, generator=draw)
        assert_close("latent", ops.norm(x, weight, 1e-6), REFERENCE.norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_match_the_reference_and_touch_nothing_else(ops: Ops, dtype: torch.dtype) -> None:
    draw, ragged = generator(2), ragged_of(LANDMARKS, PAGE, ())
    projected = torch.randn(ragged.rows, 7 + RANK + ROPE + 3, generator=draw)
    spec, pages = spec_of(torch.rand(RANK, generator=draw), 7), pages_of(ragged, PAGE, 1, RANK + ROPE, dtype, 4)
    other = copy_of(pages)
    ops.store_latent(projected, spec, ragged, pages, rope_of(256, ROPE // 2))
    REFERENCE.store_latent(projected, spec, ragged, other, rope_of(256, ROPE // 2))
    assert torch.equal(pages.storage.isnan(), other.storage.isnan())
    name = "latent" if dtype == torch.float32 else "bf16"
    assert_close(name, pages.storage.nan_to_num(), other.storage.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_keys_match_the_reference_and_touch_nothing_else(ops: Ops, dtype: torch.dtype) -> None:
    draw, ragged, width = generator(3), ragged_of(LANDMARKS, PAGE, ()), 18
    projected = torch.randn(ragged.rows, 5 + width, generator=draw) + 2
    spec = IndexKeySpec(5, torch.rand(width, generator=draw), torch.randn(width, generator=draw), 1e-6)
    pages = pages_of(ragged, PAGE, 1, width, dtype, 4)
    other = copy_of(pages)
    ops.store_index_key(projected, spec, ragged, pages, rope_of(256, ROPE // 2))
    REFERENCE.store_index_key(projected, spec, ragged, other, rope_of(256, ROPE // 2))
    assert torch.equal(pages.storage.isnan(), other.storage.isnan())
    name = "latent" if dtype == torch.float32 else "bf16"
    assert_close(name, pages.storage.nan_to_num(), other.storage.nan_to_num())


def selection_of(ragged: Ragged, topk: int) -> Selection:
    """Up to `topk` visible positions of each row, drawn at random; what lies beyond the count is out of range."""
    entries, counts = torch.full((ragged.rows, topk), 10**6, dtype=torch.int32), torch.empty(ragged.rows).int()
    for row, at in enumerate(ragged.positions):
        count = min(topk, int(at) + 1)
        order = torch.randperm(int(at) + 1, generator=generator(row))[:count].sort().values
        entries[row, :count], counts[row] = order.int(), count
    return Selection(entries, counts)


@pytest.mark.parametrize("topk", [None, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_attention_matches_the_reference(ops: Ops, dtype: torch.dtype, topk: int | None) -> None:
    draw, ragged = generator(4), ragged_of(LANDMARKS, PAGE, (1,))
    pages = written(ragged, RANK + ROPE, dtype)
    absorbed = torch.randn(ragged.rows, HEADS * RANK, generator=draw)
    turning = torch.randn(ragged.rows, HEADS * ROPE, generator=draw)
    selection = None if topk is None else selection_of(ragged, topk)
    arguments = (absorbed, turning, spec_of(torch.ones(RANK)), ragged, pages, selection, rope_of(256, ROPE // 2))
    assert_close("attend", ops.attend_latent(*arguments), REFERENCE.attend_latent(*arguments))


@pytest.mark.parametrize("topk", [None, 6])
def test_both_forms_are_one_function(ops: Ops, topk: int | None) -> None:
    """Absorbing the key half into the query and the value half into the output changes no result."""
    draw, ragged = generator(5), ragged_of(((0, 200), (40, 9)), PAGE, (1,))
    pages, spec, rope = written(ragged, RANK + ROPE, torch.float32), spec_of(torch.ones(RANK)), rope_of(256, ROPE // 2)
    keys, values = torch.randn(HEADS, 6, RANK, generator=draw), torch.randn(HEADS, 5, RANK, generator=draw)
    queries = torch.randn(ragged.rows, HEADS * (6 + ROPE), generator=draw)
    selection = None if topk is None else selection_of(ragged, topk)
    still = queries[:, : HEADS * 6].unflatten(1, (HEADS, 6))
    absorbed = torch.einsum("thn,hnr->thr", still, keys).flatten(1)
    turning = queries[:, HEADS * 6 :].contiguous()
    mixed = REFERENCE.attend_latent(absorbed, turning, spec, ragged, pages, selection, rope)
    expected = torch.einsum("thr,hvr->thv", mixed.unflatten(1, (HEADS, RANK)), values).flatten(1)
    for s, (context, new) in enumerate(((0, 200), (40, 9))):
        first, end = int(ragged.starts[s]), int(ragged.starts[s + 1])
        rows = REFERENCE.read_rows(s, ragged, pages, context + new)
        expanded = torch.einsum("kr,hdr->khd", rows[:, :RANK], torch.cat([keys, values], 1)).flatten(1)
        chosen = None
        if selection is not None:
            chosen = torch.zeros(new, context + new, dtype=torch.bool)
            for row in range(new):
                chosen[row, selection.entries[first + row, : int(selection.counts[first + row])].long()] = True
        positions = range(context, context + new)
        for choice in (ops, REFERENCE):
            found = choice.attend_expanded(queries[first:end], expanded, rows[:, RANK:], spec, positions, chosen, rope)
            assert_close("attend", found, expected[first:end])


@pytest.mark.parametrize("is_sigmoid", [True, False])
@pytest.mark.parametrize(("experts", "groups", "kept", "topk"), [(8, 4, 2, 3), (24, 3, 1, 8), (6, 1, 1, 2)])
def test_grouped_routing_matches_the_reference(
    ops: Ops, experts: int, groups: int, kept: int, topk: int, is_sigmoid: bool
) -> None:
    draw, hidden = generator(experts), 20
    gate, x = torch.randn(1, experts, hidden, generator=draw), torch.randn(37, hidden, generator=draw)
    bias = torch.randn(experts, generator=draw) if is_sigmoid else None
    shape = (experts, topk, groups, kept, 2 if is_sigmoid else 1, is_sigmoid, is_sigmoid, 2.5, 2)
    (chosen, weights), (wanted, expected) = (
        choice.route_groups(x, GroupRouterSpec(choice.pack(gate, False), bias, *shape)) for choice in (ops, REFERENCE)
    )
    assert torch.equal(chosen, wanted)
    assert_close("route", weights, expected)
    assert chosen[:, topk:].tolist() == [[experts, experts + 1]] * 37 and bool((weights[:, topk:] == 1).all())


def test_routing_ties_go_to_the_lower_group_and_expert(ops: Ops) -> None:
    x, gate = torch.ones(3, 4), torch.zeros(1, 12, 4)
    for choice in (ops, REFERENCE):
        spec = GroupRouterSpec(choice.pack(gate, False), None, 12, 3, 4, 2, 2, True, True, 1.0, 0)
        assert choice.route_groups(x, spec)[0].tolist() == [[0, 1, 2]] * 3
