"""mHC, Engram and sampling beside their bars. Knows their shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import kernels_read
from bench.kernels_tile import CUDA, E4M3, E4M3_32, E8M0_32, Shape, measured
from bench.kernels_timing import Ceilings
from bench.table import Row
from kernels import tile as ops
from kernels.cuda import cast, mhc_pre, mhc_project, rms_norm, rope, swiglu
from kernels.reference.mhc import pack, parts_of
from kernels.reference.sampling import SamplingRows
from kernels.testing import engram as engrams
from kernels.testing import mhc, sampling
from kernels.testing.tile import hold
from kernels.triton import engram, mhc_post, mhc_sinkhorn
from kernels.triton.sampling import sample

Prepared = tuple[Callable[[], object], Callable[[], None]]
VOCABULARY = 129_280
_PROJECTIONS = ((4096, 28_672, 83.3), (128, 28_672, 13.1), (4096, 16_384, 56.4), (8192, 7168, 63.1))  # DeepGEMM's us


def mix_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """All shapes."""
    torch.manual_seed(seed)
    for rows, width, public in _PROJECTIONS:
        nbytes = rows * width * 2 + parts_of(width) * rows * 100 + 128 * width
        shape = Shape(f"mhc project m{rows} k{width}", nbytes, lambda r=rows, w=width: _project(r, w), public, 1.3)
        yield from measured(shape, ceilings)
        alone = kernels_read.reading_us(torch.randn(rows, width, device=CUDA).to(torch.bfloat16))
        yield Row("  reading x alone, which the projection has to", alone, "us")
    for shape in shapes():
        yield from measured(shape, ceilings)


def shapes() -> Iterator[Shape]:
    """What is timed but the projection. Bars are TileKernels' times."""
    for rows, hidden, pre_us, post_us in (
        (8192, 7168, 153.2, 259.0),
        (8192, 4096, 92.3, 150.0),
        (128, 7168, 11.5, 10.8),
    ):
        nbytes = rows * hidden * 10 + parts_of(4 * hidden) * rows * 100
        yield Shape(f"mhc pre {rows} x 4 x {hidden}", nbytes, lambda r=rows, h=hidden: _pre(r, h, False), pre_us)
        yield Shape(f"mhc pre, normed {rows} x 4 x {hidden}", nbytes, lambda r=rows, h=hidden: _pre(r, h, True))
        yield Shape(
            f"mhc post {rows} x 4 x {hidden}", rows * hidden * 18, lambda r=rows, h=hidden: _post(r, h), post_us
        )
    yield Shape("sinkhorn 8192, 10 iterations", 8192 * 128, _sinkhorn, 6.4)
    yield Shape("engram gate 8192 x 4 x 4096", 8192 * 4096 * 26, _gate, 232.1)
    yield Shape("engram hash 8192, 2 layers, 3-grams, 8 heads", 8192 * (24 + 256), lambda: _hash(3), 7.6)
    yield Shape("engram hash 8192, 2 layers, 4-grams, 8 heads", 8192 * (32 + 384), lambda: _hash(4))
    yield Shape("engram gather 8192 x 24 x 256", 8192 * 24 * 776, _gather)
    for name, heat, count, share in (("greedy", 0.0, 0, 1.0), ("temperature", 1.0, 0, 1.0), ("top-k 50", 1.0, 50, 1.0),
                                     ("top-p 0.95", 1.0, 0, 0.95), ("both", 1.0, 50, 0.95)):  # fmt: skip
        prepare = lambda h=heat, c=count, s=share: _sampling(h, c, s)  # noqa: E731
        yield Shape(f"sampling 128 x {VOCABULARY}, {name}", 128 * VOCABULARY * 4, prepare)


def sources() -> list[tuple[Path, str, dict[str, int]]]:
    """What is compiled before it is timed, of these and of kernels_tile."""
    plans = [
        mhc_project.plan_for(width, tile) for width, tile in ((28_672, 64), (28_672, 32), (16_384, 64), (7168, 64))
    ]
    for hidden in (7168, 4096):
        parts = parts_of(4 * hidden)
        plans += [mhc_pre.plan_for(hidden, parts, 20, normed, given=False) for normed in (False, True)]
    plans += [swiglu.plan_for(inner, True, False, E4M3, short) for inner in (2048, 3072) for short in (False, True)]
    plans += [cast.plan_for(E8M0_32), rms_norm.plan_for(7168, False, True, None)]
    plans += [rms_norm.plan_for(7168, True, True, spec) for spec in (E4M3_32, E8M0_32)]
    plans.append(rope.plan_for(128, 64, inverse=False))
    return kernels_read.sources() + [(plan.source, "sm_90a", dict(plan.defines)) for plan in plans]


def _project(rows: int, width: int) -> Prepared:
    site, x = mhc.make_site(width // 4, CUDA, 1), torch.randn(rows, width, device=CUDA).to(torch.bfloat16)
    packed, parts = pack(site.mix), parts_of(width)
    z, squares = torch.empty(parts, rows, 24, device=CUDA), torch.empty(parts, rows, device=CUDA)
    return lambda: ops.project(x, packed, z, squares), lambda: mhc.check_project(CUDA, rows, width, "tile")


def _pre(rows: int, hidden: int, normed: bool) -> Prepared:
    x, site, parts = (
        mhc.make_streams(rows, hidden, CUDA, 1),
        mhc.make_site(hidden, CUDA, 1),
        parts_of(4 * hidden),
    )
    z, squares = torch.randn(parts, rows, 24, device=CUDA), torch.rand(parts, rows, device=CUDA) * hidden
    norm = torch.rand(hidden, device=CUDA) if normed else None
    collapsed = torch.empty(rows, hidden, dtype=torch.bfloat16, device=CUDA)
    made = (torch.empty(rows, 4, device=CUDA), torch.empty(rows, 4, device=CUDA), torch.empty(rows, 4, 4, device=CUDA))
    run = lambda: ops.pre(x, z, squares, site, norm, collapsed, *made)  # noqa: E731
    return run, lambda: mhc.check_pre(CUDA, min(rows, 1000), hidden, parts)


def _post(rows: int, hidden: int) -> Prepared:
    x, block = (torch.randn(rows, *shape, device=CUDA).to(torch.bfloat16) for shape in ((4, hidden), (hidden,)))
    weights, comb, out = torch.rand(rows, 4, device=CUDA), torch.rand(rows, 4, 4, device=CUDA), torch.empty_like(x)
    return lambda: mhc_post.post(x, block, weights, comb, out), lambda: mhc.check_post(CUDA, 200, hidden)


def _sinkhorn() -> Prepared:
    logits, comb = torch.randn(8192, 4, 4, device=CUDA), torch.empty(8192, 4, 4, device=CUDA)
    return lambda: mhc_sinkhorn.sinkhorn(logits, 10, 1e-6, comb), lambda: mhc.check_sinkhorn(CUDA, 8192)


def _gate() -> Prepared:
    given = engrams.make_gate(8192, 4096, CUDA, 1)
    out = torch.empty_like(given[0])
    return lambda: engram.gate(*given, 1e-20, out), lambda: engrams.check_gate(CUDA, 1200, 4096)


def _hash(longest: int) -> Prepared:
    recent, multipliers, primes, offsets = engrams.make_hash(8192, CUDA, 2, longest)
    rows = torch.empty(8192, *primes.shape, dtype=torch.int64, device=CUDA)
    run = lambda: engram.hash_rows(recent, multipliers, primes, offsets, 2, rows)  # noqa: E731
    return run, lambda: engrams.check_hash(CUDA, 8192)


def _gather() -> Prepared:
    table = 1 << 20
    codes = torch.randint(0, 120, (table, 256), dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
    scales = torch.randint(110, 130, (table, 8), dtype=torch.uint8, device=CUDA)
    rows = torch.randint(0, table, (8192, 24), device=CUDA)
    out = torch.empty(8192, 24 * 256, dtype=torch.bfloat16, device=CUDA)
    return lambda: engram.gather(rows, codes, scales, out), lambda: engrams.check_gather(CUDA, 8192)


def _sampling(heat: float, count: int, share: float) -> Prepared:
    logits, tokens = torch.randn(128, VOCABULARY, device=CUDA) * 3, torch.empty(128, dtype=torch.int32, device=CUDA)
    index = torch.arange(128, device=CUDA)
    floats = (torch.full((128,), value, device=CUDA) for value in (heat, share, 0.0))
    temperature, top_p, min_p = floats
    rows = SamplingRows(temperature, torch.full_like(tokens, count), top_p, min_p, index, index)

    def check() -> None:
        hold(sampling.check_sampling(CUDA, 35, VOCABULARY, 4096, 16) > 60, "sampling")

    return lambda: sample(logits, rows, tokens), check
