"""The engine's Triton operators against the reference, interpreted: `TRITON_INTERPRET=1 python -m` this module.

fp32 alone: a bf16 model's queries and weights are rounded for the tensor cores, which no tolerance of fp32 sums allows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kernels import Ops, reference
from kernels.csa2 import EngramSpec, csa2_ops
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    ExpertBank,
    GroupRouterSpec,
    HyperSite,
    IndexerSpec,
    MlaLayer,
    MlaSpec,
    Pages,
    Ragged,
    Ring,
    RouterSpec,
    Selection,
)
from kernels.reference.engram import gather as read_by_definition
from kernels.reference.linear import pack
from kernels.reference.norm import unit_rms
from kernels.testing.generator import fill_pages, generator, pages_of, ragged_of, ring_of, rope_of
from kernels.testing.interpreter import require_interpreter
from kernels.testing.numeric import assert_close
from kernels.triton.csa2 import gather
from kernels.triton.engine import rows as norms
from kernels.triton.engine.ops import INVARIANT, OPS
from kernels.triton.engine.precise import precise

_PAGE, _SPANS = 16, ((5, 1), (20, 3), (0, 2))
_FP32 = torch.float32


def check_latent(ops: Ops) -> None:
    """Rows are cached where the reference caches them and nowhere else, and attended alike."""
    rows, rope = ragged_of(_SPANS, _PAGE, (1,)), rope_of(64, 4)
    draw = generator(1)
    spec = MlaSpec(
        heads=3, nope=12, rope=8, value=10, rank=24, column=5, norm=_random(draw, 24), norm_eps=1e-6, scale=0.3,
        absorb=pack(_random(draw, 3, 24, 12), False), output=pack(_random(draw, 3, 10, 24), False), expand=None,
    )  # fmt: skip
    projected, pages = _random(draw, rows.rows, 37), pages_of(rows, _PAGE, 1, 32, _FP32, 2)
    mine, theirs = _copy(pages), _copy(pages)
    ops.store_latent(projected, spec, rows, mine, rope)
    reference.OPS.store_latent(projected, spec, rows, theirs, rope)
    assert_close("latent", mine.storage.nan_to_num(7.0), theirs.storage.nan_to_num(7.0))
    asked = _random(draw, rows.rows, 72), _random(draw, rows.rows, 24)
    chosen = Selection(torch.zeros(rows.rows, 2, dtype=torch.int32), torch.ones(rows.rows, dtype=torch.int32))
    for selection in (None, chosen):
        found = ops.attend_latent(*asked, spec, rows, theirs, selection, rope)
        assert_close("attend", found, reference.OPS.attend_latent(*asked, spec, rows, theirs, selection, rope))


def check_experts(ops: Ops) -> None:
    """Few rows and many, chosen in groups."""
    draw, hidden, inner = generator(3), 20, 9
    banks = [pack(_random(draw, 7, *shape), False) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
    bank = ExpertBank(*banks, 6, inner, math.inf)
    router = GroupRouterSpec(pack(_random(draw, 6, hidden)[None], False), None, 6, 2, 3, 2, 1, False, True, 1.5, 0)
    for rows in (2, 7):
        x = _random(draw, rows, hidden)
        (chosen, weights), expected = ops.route_groups(x, router), reference.OPS.route_groups(x, router)
        _expect_equal(chosen, expected[0])
        assert_close("route", weights, expected[1])
        assert_close("experts", ops.experts(x, *expected, bank), reference.OPS.experts(x, *expected, bank))


def check_rows(ops: Ops) -> None:
    """Norms of rows that stand apart and of sums, rounded where that is asked for; products split over channels."""
    draw = generator(12)
    wide, more, weight = _random(draw, 5, 90), _random(draw, 5, 70), _random(draw, 70)
    x = wide[:, 11:81]
    assert_close("norm", ops.norm(x, weight, 1e-6), reference.OPS.norm(x, weight, 1e-6))
    total, normed, rounded = norms.add_norm(x.contiguous(), more, weight, 1e-6, torch.bfloat16)
    _expect_equal(total, x + more)
    assert_close("norm", normed, reference.OPS.norm(total, weight, 1e-6))
    _expect_equal(rounded, normed.to(torch.bfloat16))
    _expect_equal(norms.norm(x, weight, 1e-6, torch.bfloat16), norms.norm(x, weight, 1e-6).to(torch.bfloat16))
    for count, columns, inner in ((5, 24, 500), (70, 70, 130), (5, 3, 40)):
        x, matrix = _random(draw, count, inner + 3)[:, 2:-1], pack(_random(draw, 1, columns, inner), False)
        expected = reference.OPS.linear(unit_rms(x, 1e-6), matrix)
        assert_close("linear", precise(x, matrix), reference.OPS.linear(x, matrix))
        assert_close("linear", precise(x, matrix, 1e-6), expected)


def check_layer(ops: Ops) -> None:
    """A whole layer of few rows and of many: a router beside its experts, of which one is everybody's, and one wide
    MLP."""
    for spans in (((5, 1), (20, 1)), ((5, 1), (20, 3), (0, 2))):
        _check_layer(ops, ragged_of(spans, _PAGE, (1,)))


def _check_layer(ops: Ops, rows: Ragged) -> None:
    rope, draw, hidden = rope_of(64, 4), generator(1), 20
    spec = MlaSpec(
        heads=3, nope=12, rope=8, value=10, rank=24, column=60, norm=_random(draw, 24), norm_eps=1e-6, scale=0.3,
        absorb=pack(_random(draw, 3, 24, 12), False), output=pack(_random(draw, 3, 10, 24), False), expand=None,
    )  # fmt: skip
    for experts, groups in ((7, 3), (0, 1)):
        shapes = (9, hidden), (9, hidden), (hidden, 9)
        bank = ExpertBank(*(pack(_random(draw, experts + 1, *shape), False) for shape in shapes), experts, 9, math.inf)
        router = GroupRouterSpec(
            pack(_random(draw, 6, hidden)[None], False), _random(draw, 6), 6, 2, groups,
            max(1, groups - 1), min(2, groups), groups > 1, groups > 1, 1.5, 1,
        )  # fmt: skip
        layer = MlaLayer(
            _random(draw, hidden), _random(draw, hidden), 1e-6, pack(_random(draw, 1, 92, hidden), False), None, None,
            spec, pack(_random(draw, 1, hidden, 30), False), router if experts else None, bank,
        )  # fmt: skip
        mine, x = pages_of(rows, _PAGE, 1, 32, _FP32, 2), _random(draw, rows.rows, hidden)
        fill_pages(rows, mine, 8)
        theirs = _copy(mine)
        for _ in range(2):  # what the first leaves behind must not show in the second
            expected = reference.OPS.mla_layer(x, layer, rows, theirs, rope)
            assert_close("layer", ops.mla_layer(x, layer, rows, mine, rope), expected)
        attended = _random(draw, rows.rows, hidden)
        assert ops.after_attention is not None and ops.norm_linear is not None  # noqa: S101  narrows the types
        assert_close("layer", ops.after_attention(x, attended, layer), _after_attention(x + attended, layer))
        expected = reference.OPS.linear(reference.OPS.norm(x, layer.attention_norm, 1e-6), layer.input)
        assert_close("linear", ops.norm_linear(x, layer.attention_norm, 1e-6, layer.input), expected)


def _after_attention(x: Tensor, layer: MlaLayer) -> Tensor:
    by, (nobody, none) = reference.OPS, (x.new_empty(len(x), 0, dtype=torch.int32), x.new_empty(len(x), 0))
    normed = by.norm(x, layer.mlp_norm, layer.norm_eps)
    chosen, weights = (nobody, none) if layer.router is None else by.route_groups(normed, layer.router)
    return x + by.experts(normed, chosen, weights, layer.experts)


def check_compressed(ops: Ops) -> None:
    """A compressor's entries, the indexer's choice among them, and attention over window and entries."""
    rows, rope, draw = ragged_of(_SPANS, _PAGE, (4,)), rope_of(64, 4), generator(4)
    spec = CompressorSpec(0, 4, 20, True, _random(draw, 4, 40), _random(draw, 20), 1e-6)
    projected, pages = _random(draw, rows.rows, 80), pages_of(rows, _PAGE, 4, 20, _FP32, 5)
    ring = ring_of(rows, 8, 80, _FP32, 6)
    mine, theirs, kept, expected = _copy(pages), _copy(pages), _copy(ring), _copy(ring)
    ops.compress(projected, spec, rows, kept, mine, rope)
    reference.OPS.compress(projected, spec, rows, expected, theirs, rope)
    assert_close("compress", mine.storage.nan_to_num(7.0), theirs.storage.nan_to_num(7.0))
    _expect_equal(kept.storage.nan_to_num(7.0), expected.storage.nan_to_num(7.0))
    fill_pages(rows, pages, 8)
    index = IndexerSpec(0, 0, 3, 20, 2)
    queries, weights = _random(draw, rows.rows, 60), _random(draw, rows.rows, 3)
    selection = reference.OPS.index_topk(queries, weights, index, rows, pages, rope)
    found = ops.index_topk(queries, weights, index, rows, pages, rope)
    _expect_equal(found.counts, selection.counts)
    for row, count in enumerate(selection.counts.tolist()):
        _expect_equal(found.entries[row, :count], selection.entries[row, :count])
    attention, window = AttentionSpec(3, 20, 6, _random(draw, 3), 1e-6), ring_of(rows, 8, 20, _FP32, 7)
    for some, chosen in ((None, None), (pages, None), (pages, selection)):
        operands = (queries, _random(generator(9), rows.rows, 20), attention, rows, window, some, chosen, rope)
        assert_close("attend", ops.attend(*operands), reference.OPS.attend(*operands))


def check_likeliest(ops: Ops) -> None:
    """The first of equal ones, in rows of more than one program's tokens; rows that are not finite are found."""
    logits = _random(generator(11), 4, 3000).round()
    logits[1, 2999], logits[2, 0] = math.nan, -math.inf
    found, expected = ops.likeliest(logits), reference.OPS.likeliest(logits)
    _expect_equal(found[1], expected[1])
    _expect_equal(found[0, ::3], expected[0, ::3])


def check_streams(ops: Ops) -> None:
    """Three streams: no power of two."""
    draw, m, hidden = generator(10), 3, 7
    site = HyperSite(
        pack(_random(draw, 1, (2 + m) * m, m * hidden), False), _random(draw, (2 + m) * m), _random(draw, 3),
        _random(draw, hidden), m, 5, 1e-6, 1e-6,
    )  # fmt: skip
    for count in (2, 6):
        x = _random(draw, count, m, hidden)
        for mine, theirs in zip(ops.hyper_pre(x, site), reference.OPS.hyper_pre(x, site), strict=True):
            assert_close("hyper", mine, theirs)


def check_memory(_ops: Ops) -> None:
    """The n-gram memory of three streams, of rows that are dead and alive: its numbers, its rows and its gate."""
    draw, mine, theirs = generator(13), csa2_ops("triton"), csa2_ops("reference")
    x, projected = _random(draw, 5, 3, 20), _random(draw, 5, 80)
    alive = torch.tensor([True, False, True, True, True])
    spec = EngramSpec(_random(draw, 3, 20), _random(draw, 3, 20), 1e-6)
    operands = (x, projected, alive, spec)
    assert_close("memory", mine.engram(*operands), theirs.engram(*operands))
    recent, multipliers = (torch.randint(0, 90, shape, generator=draw) for shape in ((5, 4), (2, 4)))
    recent[2, 1], recent[3, 3] = -1, -1
    primes = torch.tensor([[31, 37, 41, 43, 47, 53]] * 2)
    hashed = (recent, multipliers * 2 + 1, primes, primes.cumsum(1) - primes, 7)
    named = mine.hash_rows(*hashed)
    _expect_equal(named, theirs.hash_rows(*hashed))
    table = torch.randn(260, 64, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 131, (260, 2), generator=draw, dtype=torch.uint8)
    found = gather(named[:, 0].contiguous(), table, scales)
    _expect_equal(found, read_by_definition(named[:, 0], table, scales).to(torch.float32))


def check_products(ops: Ops) -> None:
    """Groups, and rows, outputs and channels that fill no tile; a choice by score and one by token."""
    draw = generator(11)
    weight, x = pack(_random(draw, 2, 37, 41), False), _random(draw, 5, 82)
    assert_close("linear", ops.linear(x, weight), reference.OPS.linear(x, weight))
    gate, tokens = pack(_random(draw, 1, 6, 20), False), torch.tensor([3, 0, 2])
    table = torch.stack([torch.randperm(6, generator=draw)[:2] for _ in range(4)])
    for spec in (RouterSpec(gate, _random(draw, 6), None, 6, 2, 1.5), RouterSpec(gate, None, table, 6, 2, 1.5)):
        x = _random(draw, 3, 20)
        (chosen, weights), expected = ops.route(x, tokens, spec), reference.OPS.route(x, tokens, spec)
        _expect_equal(chosen, expected[0])
        assert_close("route", weights, expected[1])


def _expect_equal(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise AssertionError(f"{found} differs from {expected}")


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def _copy(view: Pages | Ring) -> Pages | Ring:
    return replace(view, storage=view.storage.clone(), array=None)


if __name__ == "__main__":
    require_interpreter()
    for check in (
        check_latent,
        check_experts,
        check_rows,
        check_layer,
        check_compressed,
        check_streams,
        check_memory,
        check_products,
        check_likeliest,
    ):
        for ops in (OPS, INVARIANT):
            check(ops)
