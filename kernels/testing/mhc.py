"""Operands of mHC, friendly and hostile, and the checks of its kernels against float64. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.mhc` runs them without a GPU, in triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kernels.reference import mhc as definition
from kernels.reference.mhc import COLUMNS, STREAMS, MhcSite
from kernels.testing.tile import hold, near, poisoned

# Of the root of the sum of squares that a sum may reach: fp32 sums of rounded weights (2**-17 each).
PROJECTED, COEFFICIENT = 2e-5, 2e-5


def make_site(hidden: int, device: torch.device, seed: int, iterations: int = 20) -> MhcSite:
    draw = torch.Generator(device).manual_seed(seed)
    mix = torch.randn(COLUMNS, STREAMS * hidden, generator=draw, device=device) / (STREAMS * hidden) ** 0.5
    base = torch.randn(COLUMNS, generator=draw, device=device)
    return MhcSite(mix, base, torch.rand(3, generator=draw, device=device) * 4, iterations, 1e-6, 1e-6)


def make_streams(rows: int, hidden: int, device: torch.device, seed: int) -> Tensor:
    """bf16 [rows, 4, hidden]: a row of zeros, one of large and one of tiny numbers among them."""
    x = torch.randn(rows, STREAMS, hidden, generator=torch.Generator(device).manual_seed(seed), device=device)
    x[0] = 0
    x[rows // 2] *= 1e4
    x[-1] *= 1e-5
    return x.to(torch.bfloat16)


def check_project(device: torch.device, rows: int, width: int, by: str = "triton.mhc_project") -> None:
    """The projection, twice, into poisoned memory; AssertionError where it differs. `by`: what of kernels does it."""
    kernel = import_module(f"kernels.{by}")
    site = make_site(width // STREAMS, device, width)
    x = make_streams(rows, width // STREAMS, device, rows).flatten(1)
    parts = definition.parts_of(width)
    packed = definition.pack(site.mix)
    z, squares = poisoned((parts, rows, COLUMNS), torch.float32, device), poisoned((parts, rows), torch.float32, device)
    kernel.project(x, packed, z, squares)
    expected_z, expected_squares = definition.project(x, site.mix, parts)
    size = expected_squares.sqrt()[..., None] * site.mix.double().square().sum(1).sqrt()
    hold(bool(((z - expected_z).abs() <= PROJECTED * size + 1e-30).all()), "z")
    hold(bool(((squares - expected_squares).abs() <= 1e-5 * expected_squares).all()), "squares")
    again, alone = torch.zeros_like(z), torch.zeros_like(z[:, 1:2].contiguous())
    kernel.project(x, packed, again, squares)
    hold(torch.equal(again, z), "a repeat's bits")
    kernel.project(x[1:2], packed, alone, squares[:, 1:2].contiguous())
    hold(torch.equal(alone[:, 0], z[:, 1]), "a row's bits alone and in the batch")


def check_pre(device: torch.device, rows: int, hidden: int, parts: int, by: str = "cuda.mhc_pre") -> None:
    """Pre with and without a norm and weights of another site; AssertionError where one differs."""
    kernel = import_module(f"kernels.{by}")
    site, width = make_site(hidden, device, 2), STREAMS * hidden
    x = make_streams(rows, hidden, device, hidden)
    draw = torch.Generator(device).manual_seed(1)
    z, squares = (each.float().contiguous() for each in definition.project(x.flatten(1), site.mix, parts))
    expected = definition.coefficients(z, squares, width, site)
    given = torch.rand(rows, STREAMS, generator=draw, device=device)
    weight = torch.rand(hidden, generator=draw, device=device) + 0.5
    for norm, others in ((None, None), (weight, None), (None, given), (weight, given)):
        shapes = ((rows, STREAMS), (rows, STREAMS), (rows, STREAMS, STREAMS))
        collapsed = poisoned((rows, hidden), torch.bfloat16, device)
        found = [poisoned(shape, torch.float32, device) for shape in shapes]
        kernel.pre(x, z, squares, site, norm, collapsed, *found, others)
        for name, one, wanted in zip(("pre", "post", "comb"), found, expected, strict=True):
            hold(bool(((one - wanted).abs() <= COEFFICIENT).all()), name)
        by_weights = expected[0] if others is None else others
        near(collapsed, definition.collapse(x, by_weights, norm, site.norm_eps), "collapsed")


def check_post(device: torch.device, rows: int, hidden: int) -> None:
    """Post and post in place; AssertionError where one differs."""
    from kernels.triton import mhc_post as kernel

    x, draw = make_streams(rows, hidden, device, hidden), torch.Generator(device).manual_seed(1)
    weights = torch.rand(rows, STREAMS, generator=draw, device=device) * 2
    comb = torch.rand(rows, STREAMS, STREAMS, generator=draw, device=device)
    block = torch.randn(rows, hidden, generator=draw, device=device).to(torch.bfloat16)
    out = poisoned(tuple(x.shape), torch.bfloat16, device)
    kernel.post(x, block, weights, comb, out)
    near(out, definition.post(x, block, weights, comb), "post")
    aliased = x.clone()
    kernel.post(aliased, block, weights, comb, aliased)
    hold(torch.equal(aliased, out), "post in place")


def check_sinkhorn(device: torch.device, rows: int) -> None:
    """Friendly and hostile matrices; AssertionError where one differs."""
    from kernels.triton.mhc_sinkhorn import sinkhorn

    logits = torch.randn(rows, STREAMS, STREAMS, generator=torch.Generator(device).manual_seed(3), device=device) * 4
    logits[0] = 0
    logits[-1] = torch.eye(STREAMS, device=device) * 60
    for iterations in (1, 10, 20):
        comb = poisoned(tuple(logits.shape), torch.float32, device)
        sinkhorn(logits, iterations, 1e-6, comb)
        expected = definition.sinkhorn(logits.double(), iterations, 1e-6)
        hold(bool(((comb - expected).abs() <= COEFFICIENT).all()), f"Sinkhorn after {iterations}")


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    cpu = torch.device("cpu")
    check_project(cpu, 5, 1024)
    check_post(cpu, 35, 256)
    check_sinkhorn(cpu, 37)
    print("the kernels equal the reference")
