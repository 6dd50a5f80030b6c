"""The Hopper operators' Triton parts against the reference, interpreted: `TRITON_INTERPRET=1 python -m` this module.

The CUDA kernels are stood in for by their definitions: what is checked is which rows of the caches they are told to
read, and what becomes of what they say. Caches are bf16, and so are queries on their way to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import reference
from kernels.cuda import dense_decode, sparse_prefill
from kernels.cuda.engine import domain
from kernels.cuda.engine.attend import attend
from kernels.cuda.engine.latent import attend_latent
from kernels.cuda.spans import Split, Workspace
from kernels.operands import AttentionSpec, MlaSpec, Selection
from kernels.reference import dense_decode as dense_definition
from kernels.reference import sparse_prefill as named_definition
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
    for check in (check_latent, check_window):
        check()
