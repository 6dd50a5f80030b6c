"""Rounded index scores: keys and queries by an independent rounding choose the entries that the engine chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.cache.records import Record
from engine.checkpoint.errors import CheckpointError
from engine.families import Family
from engine.families.mla.config import parse
from engine.families.mla.options import Options, parse_options
from engine.families.mla.records import index_e8m0, index_fp8
from engine.families.mla.tiny import TINY
from engine.families.rounding import IndexRounding, hadamard, rounded
from engine.families.v4.ragged import ragged
from engine.families.v4.records import index_fp4
from engine.layout import CacheGroup, GroupKind, Layout
from kernels import choose
from kernels.operands import IndexerSpec, RopeTable
from tests.support.roundings import mixed_by_hadamard, scaled_blocks
from tests.support.tiny_mla import Piece, TinySpec, batch_of, open_tiny, poisoned_pool, random_tokens, write_tiny

WIDTH, HEADS, TOPK, ROWS, BEFORE, ROPE = 128, 16, 8, 6, 40, 16
TOKENS = random_tokens(50, 3)
NUMBERS = {
    "fp8": (index_fp8(WIDTH), (128, "e4m3", False)),
    "fp8 by powers": (index_e8m0(WIDTH), (128, "e4m3", True)),
    "fp4": (index_fp4(WIDTH), (32, "e2m1", True)),
}


def same_share(found: np.ndarray, wanted: np.ndarray) -> float:
    """Share of equal values. Mixing in fp32 moves a few of them to the neighbouring number of the format."""
    return float(np.isclose(found, wanted, rtol=1e-6, atol=0).mean())


@pytest.mark.parametrize("name", NUMBERS)
def test_rounding_equals_arithmetic_on_the_definitions_bit_for_bit(name: str) -> None:
    record, form = NUMBERS[name]
    values = np.random.default_rng(2).normal(size=(200, WIDTH)) * np.logspace(-3, 3, 200)[:, None]
    values = values.astype(np.float32)
    assert np.array_equal(rounded(torch.from_numpy(values), record), scaled_blocks(values, *form).astype(np.float32))


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Trailing interleaved pairs turned."""
    pairs = x[..., -ROPE::2] + 1j * x[..., 1 - ROPE :: 2]
    pairs = pairs * np.exp(1j * angles)
    out = x.copy()
    out[..., -ROPE::2], out[..., 1 - ROPE :: 2] = pairs.real, pairs.imag
    return out


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", NUMBERS)
def test_chosen_entries_equal_an_independent_scoring(name: str, kernels: str) -> None:
    record, form = NUMBERS[name]
    draw, end = np.random.default_rng(5), BEFORE + ROWS
    keys = draw.normal(size=(end, WIDTH)).astype(np.float32)
    queries, weights = draw.normal(size=(ROWS, HEADS, WIDTH)), draw.normal(size=(ROWS, HEADS))
    angles = np.arange(end)[:, None] * 0.3 ** np.arange(ROPE // 2)
    found, held = chosen_by_engine(record, kernels, keys, queries, weights, angles)
    rounded_keys = scaled_blocks(mixed_by_hadamard(keys), *form)
    assert same_share(held[BEFORE:], rounded_keys[BEFORE:]) > 0.99, "the keys of this batch"
    assert np.array_equal(held[:BEFORE], keys[:BEFORE]), "earlier keys are left alone"
    asked = turned(queries.astype(np.float32).astype(np.float64), angles[BEFORE:, None])
    asked = scaled_blocks(mixed_by_hadamard(asked.astype(np.float32)), *form)
    products = np.maximum(np.einsum("rhc,ec->rhe", asked, held) * WIDTH**-0.5, 0)
    scores = np.einsum("rh,rhe->re", weights * HEADS**-0.5, products)
    plain = np.einsum("rhc,ec->rhe", turned(queries, angles[BEFORE:, None]), keys)
    differ = 0
    for row, chosen in enumerate(found):
        visible = BEFORE + row + 1
        assert set(chosen) == set(np.argsort(-scores[row, :visible])[:TOPK])
        exact = np.einsum("h,he->e", weights[row], np.maximum(plain[row], 0))[:visible]
        differ += set(chosen) != set(np.argsort(-exact)[:TOPK])
    assert differ, "rounding that changes no choice would prove nothing"


def chosen_by_engine(
    record: Record, kernels: str, keys: np.ndarray, queries: np.ndarray, weights: np.ndarray, angles: np.ndarray
) -> tuple[list[list[int]], np.ndarray]:
    """The entries that the last rows choose, and the keys as they are cached then."""
    group = CacheGroup("index_key", GroupKind.GLOBAL, 1, 16, 1, WIDTH * 4, "float32", "1")
    pool, ops = CachePool(Layout(16, 0, (group,)), 4, 1, torch.float32), choose(kernels)
    pages, blocks = pool.pages("index_key", 0), (3, 1, 2)
    for at, key in enumerate(keys):
        pages.storage[blocks[at // 16], at % 16 * WIDTH : (at % 16 + 1) * WIDTH] = torch.from_numpy(key)
    rows = ragged(batch_of([Piece([5] * ROWS, BEFORE, blocks, 0)]), ())
    rounding = IndexRounding(ops, record)
    ops.begin()
    rounding.entries(rows, pages)
    spec = IndexerSpec(query_column=3, weight_column=2, heads=HEADS, width=WIDTH, topk=TOPK)
    asked = torch.nn.functional.pad(torch.from_numpy(queries.reshape(ROWS, -1)).float(), (3, 1)).contiguous()
    projected = torch.nn.functional.pad(torch.from_numpy(weights).float(), (2, 0)).contiguous()
    rope = RopeTable(torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float())
    selection = rounding.choose(asked, projected, spec, rows, pages, rope)
    held = pages.storage[list(blocks)].view(-1, WIDTH)[: len(keys)].numpy()
    return [entries[:n].tolist() for entries, n in zip(selection.entries, selection.counts, strict=True)], held


def opened(folder: Path, changes: dict[str, Any]) -> Family:
    return open_tiny(write_tiny(folder, TinySpec("v32", 5, {"index_head_dim": WIDTH, **changes})), batch_invariant=True)


def index_keys(family: Family) -> torch.Tensor:
    """Layer 0's keys of TOKENS, whose inputs no switch changes: [tokens, width]."""
    pool, group = poisoned_pool(family), family.layout.group("index_key")
    family.forward(batch_of([Piece(TOKENS, 0, range(4), 0)]), pool)
    rows = [torch.from_numpy(pool.block_extent("index_key", b)).view(torch.float32) for b in range(4)]
    return torch.cat([row.view(group.layers, group.entries, WIDTH)[0] for row in rows])[: len(TOKENS)]


@pytest.mark.parametrize("power", [False, True])
def test_v32_mixes_its_keys_in_their_published_order(power: bool, tmp_path: Path) -> None:
    """The cache keeps rotary channels last and in pairs; published they are first and in two halves."""
    switched = {"serving": {"fp8_index_scores": True}}
    if power:
        switched["quantization_config"] = {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    plain = index_keys(opened(tmp_path / "plain", {})).numpy()
    found = index_keys(opened(tmp_path / "rounded", switched)).numpy()
    published = np.concatenate([plain[:, -ROPE::2], plain[:, 1 - ROPE :: 2], plain[:, :-ROPE]], 1)
    wanted = scaled_blocks(mixed_by_hadamard(published), 128, "e4m3", power)
    assert same_share(found, wanted) > 0.99
    assert same_share(found, scaled_blocks(mixed_by_hadamard(plain), 128, "e4m3", power)) < 0.1


def test_v32_with_rounded_scores_is_another_layout_and_chunks_change_no_bit(tmp_path: Path) -> None:
    plain = opened(tmp_path / "plain", {})
    rounded = opened(tmp_path / "rounded", {"serving": {"fp8_index_scores": True}})
    assert plain.layout.fingerprint != rounded.layout.fingerprint
    results = []
    for chunk in (50, 7, 1):
        pool = poisoned_pool(rounded)
        pieces = [Piece(TOKENS[at : at + chunk], at, range(4), 0) for at in range(0, 50, chunk)]
        results.append(torch.cat([rounded.forward(batch_of([piece]), pool) for piece in pieces]))
    assert all(torch.equal(result, results[0]) for result in results)
    exact = plain.forward(batch_of([Piece(TOKENS, 0, range(4), 0)]), poisoned_pool(plain))
    assert (exact - results[0]).abs().max() > 1e-3


def test_off_unless_the_config_turns_it_on() -> None:
    given = {**TINY["v32"], "index_head_dim": 128}
    assert not parse_options(given, parse(given)).fp8_index_scores
    on = given | {"serving": {"fp8_index_scores": True}}
    assert parse_options(on, parse(on)) == Options(True, False)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("v3", {"serving": {"fp8_index_scores": True}}, "fp8_index_scores"),  # it has no indexer
        ("v32", {"serving": {"fp8_index_scores": True}}, "fp8_index_scores"),  # 32 channels are no whole block
        ("v32", {"serving": {"fp8_index_scores": "yes"}}, "fp8_index_scores"),
        ("v3", {"serving": {"fake_quantize": True}}, "serving"),
    ],
)
def test_what_cannot_be_rounded_is_refused(name: str, changes: dict[str, Any], key: str) -> None:
    given = json.loads(json.dumps({**TINY[name], **changes}))
    with pytest.raises(CheckpointError) as caught:
        parse_options(given, parse(given))
    assert caught.value.item == key


def test_hadamard_is_orthogonal_and_needs_a_power_of_two() -> None:
    assert torch.equal(hadamard(16) @ hadamard(16).T, 16 * torch.eye(16))
    with pytest.raises(ValueError, match="96"):
        hadamard(96)
