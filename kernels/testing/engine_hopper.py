"""The Hopper operators' Triton parts against the reference, interpreted: `TRITON_INTERPRET=1 python -m` this module.

The CUDA kernels are stood in for by their definitions: what is checked is which rows of the caches they are told to
read, and what becomes of what they say. Caches are bf16, and so are queries on their way to them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels import reference
from kernels.cuda import dense_decode, sparse_prefill
from kernels.cuda import gemm as products
from kernels.cuda.engine import domain, scaled
from kernels.cuda.engine.attend import attend
from kernels.cuda.engine.latent import attend_latent
from kernels.cuda.spans import Split, Workspace
from kernels.operands import AttentionSpec, ExpertBank, MlaSpec, Selection
from kernels.reference import dense_decode as dense_definition
from kernels.reference import scaled as definition
from kernels.reference import sparse_prefill as named_definition
from kernels.reference.gemm import Activations, Fp8Weights, check_operands, gemm, quantize_fp8, written
from kernels.reference.linear import pack
from kernels.testing.generator import fill_pages, generator, pages_of, ragged_of, ring_of, rope_of
from kernels.testing.interpreter import require_interpreter

_PAGE, _SPANS = 16, ((5, 1), (20, 3), (0, 2), (33, 3))
_BF16, _RELATIVE = torch.bfloat16, 1e-2  # queries, weights and mixtures are rounded to bf16


def check_latent() -> None:
    """All cached rows and chosen ones, of sequences of unlike length and unlike numbers of new rows."""
    rows, rope, draw = ragged_of(_SPANS, _PAGE, (1,)), rope_of(64, 32), generator(1)
    spec = MlaSpec(
        heads=3, nope=8, rope=64, value=8, rank=512, column=0, norm=torch.ones(512), norm_eps=1e-6, scale=0.05,
        absorb=pack(torch.zeros(3, 512, 8), True), output=pack(torch.zeros(3, 8, 512), True), expand=None,
    )  # fmt: skip
    pages = pages_of(rows, _PAGE, 1, 576, _BF16, 2, margin=8)
    fill_pages(rows, pages, 3)
    absorbed, turning = _random(draw, rows.rows, 3 * 512), _random(draw, rows.rows, 3 * 64)
    counts = torch.from_numpy(rows.positions // 2 + 1)
    chosen = Selection(torch.arange(40, dtype=torch.int32).expand(rows.rows, 40).contiguous(), counts.int())
    for selection in (None, chosen):
        operands = (absorbed, turning, spec, rows, pages, selection, rope)
        _expect_close("latent", attend_latent(*operands), reference.OPS.attend_latent(*operands))


def check_window() -> None:
    """A window that is partly cached and partly new, alone, with all entries and with chosen ones."""
    rows, rope, draw = ragged_of(_SPANS, _PAGE, (4,)), rope_of(64, 32), generator(4)
    pages, ring = pages_of(rows, _PAGE, 4, 512, _BF16, 5, margin=8), ring_of(rows, 12, 512, _BF16, 6, margin=8)
    fill_pages(rows, pages, 7)
    spec = AttentionSpec(3, 512, 9, _random(draw, 3), 1e-6)
    queries, fresh = _random(draw, rows.rows, 3 * 512), _random(draw, rows.rows, 512).to(_BF16)
    counts = torch.from_numpy((rows.positions + 1) // 4).clamp_max(2)
    entries = torch.stack([counts - counts, counts.clamp_min(1) - counts.clamp_min(1) + 1], 1).int()
    for some, selection in ((None, None), (pages, None), (pages, Selection(entries, counts.int()))):
        operands = (queries, fresh, spec, rows, ring, some, selection, rope)
        _expect_close("window", attend(*operands), reference.OPS.attend(*operands))


def check_scaled() -> None:
    """A product of groups in another order, of normed rows that stand apart, and experts: with few rows, and with so
    many that they lie in runs."""
    draw = generator(10)
    weights = quantize_fp8(_random(draw, 2, 24, 256))
    x, order = _random(draw, 3, 512), torch.randperm(48, generator=draw)
    expected = reference.OPS.linear(x, definition.keep(weights, order))
    _expect_close("product", scaled.linear(x, scaled.keep(weights, order)), expected)
    one, wide, norm = quantize_fp8(_random(draw, 1, 24, 384)), _random(draw, 3, 400), _random(draw, 384)
    found = scaled.norm_linear(wide[:, 7:391], norm, 1e-6, scaled.keep(one))
    normed = reference.OPS.norm(wide[:, 7:391], norm, 1e-6)
    _expect_close("product of a norm", found, reference.OPS.linear(normed, definition.keep(one)))
    shapes = ((5, 256, 256), (5, 256, 128), (1, 256, 256), (1, 256, 128))
    entering, leaving, *shared = (definition.keep(quantize_fp8(_random(draw, *shape))) for shape in shapes)
    for routed, limit in (((entering, leaving), 1.5), ((entering, leaving), math.inf), (None, 2.0)):
        kept, slots = definition.ScaledExperts(routed, (shared[0], shared[1])), 2 if routed else 0
        bank = ExpertBank(kept, None, None, 5 if routed else 0, 128, limit)
        for rows in (2, 7):
            x, residual, shares = (_random(draw, rows, width) for width in (256, 256, slots))
            chosen = torch.stack([torch.randperm(5, generator=draw)[:slots] for _ in range(rows)]).int()
            expected = reference.OPS.experts(x, chosen, shares, bank)
            _expect_close("experts", scaled.experts(x, chosen, shares, bank), expected)
            _expect_close("experts", scaled.experts(x, chosen, shares, bank, residual), expected + residual)


def _gemm(
    activations: Activations, weights: Fp8Weights, counts: Tensor | None, experts: Tensor | None, output: Tensor,
    _cut: object,
) -> None:  # fmt: skip
    check_operands(activations, weights, counts, experts, output)
    valid = written(activations, counts, experts)
    output[valid] = gemm(activations, weights, counts, experts)[valid].to(_BF16)


def _dense(
    query: Tensor, cache: dense_definition.PagedLatents, scale: float, _split: Split, _room: Workspace, output: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    dense_definition.check_operands(query, cache, output, lse)
    for into, found in zip((output, lse), dense_definition.dense_decode(query, cache, scale), strict=True):
        into.copy_(found)


def _named(
    query: Tensor, named: named_definition.NamedLatents, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor
) -> None:
    named_definition.check_operands(query, named, sink, output, lse)
    for into, found in zip((output, lse), named_definition.sparse_prefill(query, named, sink, scale), strict=True):
        into.copy_(found)


def _expect_close(what: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    if not error < _RELATIVE or found.dtype != torch.float32:
        raise AssertionError(f"{what}: {found.dtype}, relative error {error:.3g}")


def _random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


if __name__ == "__main__":
    require_interpreter()
    dense_decode.dense_decode, sparse_prefill.sparse_prefill = _dense, _named
    domain._LEAST_ROWS = domain._LEAST_BLOCKS = 1
    products.gemm, scaled._FEW_ROWS = _gemm, 4
    for check in (check_latent, check_window, check_scaled):
        check()
