"""Casts, SwiGLU, norms, rope and records beside their bars. Knows their shapes; the clock is elsewhere.

Every shape is compared with its definition before it is timed. The other tile kernels: kernels_tile_mix.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels_rows import checked
from bench.kernels_timing import Ceilings, median_us
from bench.table import Row
from kernels import tile as ops
from kernels.reference import cast as casts
from kernels.reference import rms_norm as norms
from kernels.reference import rope as ropes
from kernels.reference.cast import CastSpec, Code, Scale
from kernels.reference.kv_record import Packed
from kernels.reference.swiglu import swiglu
from kernels.testing import kv_record as records
from kernels.testing.tile import assert_cast, hold, near, places
from kernels.triton import cast, kv_record, rope

CUDA = torch.device("cuda")
E4M3 = CastSpec(Code.E4M3, 128, Scale.FP32)
E4M3_32 = CastSpec(Code.E4M3, 32, Scale.FP32)
E8M0_32 = CastSpec(Code.E4M3, 32, Scale.E8M0)
E2M1 = CastSpec(Code.E2M1, 32, Scale.E8M0)


@dataclass(frozen=True, slots=True)
class Shape:
    """One timed shape. `prepare` makes operands and returns the launch and its check; `nbytes` must be moved at least;
    `public_us`: TileKernels' or DeepGEMM's; `wanted`: how much faster; `of_copy`: share of the copy rate to reach."""

    name: str
    nbytes: float
    prepare: Callable[[], tuple[Callable[[], object], Callable[[], None]]]
    public_us: float | None = None
    wanted: float = 1.0
    of_copy: float | None = None


def measured(shape: Shape, ceilings: Ceilings) -> Iterator[Row]:
    """Check and time of a shape."""
    run, check = shape.prepare()
    run()
    yield checked(f"{shape.name}: checked", check)
    time_us, floor = median_us(run), shape.nbytes / ceilings.gb_per_s / 1e3
    yield Row(shape.name, time_us, "us", shape.public_us and shape.public_us / shape.wanted)
    bar = shape.of_copy and 100 * shape.of_copy
    yield Row("  of floor", 100 * floor / time_us, f"% ({floor:.1f} us)", bar, ">=")
    if bar:  # the copy rate is that of 2 GiB: what a copy of so few bytes reaches limits every kernel
        copy_us = copied_us(shape.nbytes)
        yield Row("  a copy of as many bytes", 100 * floor / copy_us, f"% of the copy rate ({copy_us:.1f} us)")


def copied_us(nbytes: float) -> float:
    """Time of a copy that reads and writes `nbytes` in all."""
    source = torch.randint(0, 255, (int(nbytes) // 2,), dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    return median_us(lambda: target.copy_(source))


def tile_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """All shapes."""
    torch.manual_seed(seed)
    for shape in shapes():
        yield from measured(shape, ceilings)


def shapes() -> Iterator[Shape]:
    """What is timed."""
    for rows, inner, public, of_copy in ((8192, 2048, 31.3, 0.8), (8192, 3072, 42.8, None), (65_536, 2048, 196.6, 0.8),
                                         (128, 2048, 5.9, None)):  # fmt: skip
        nbytes = rows * inner * 5 + rows * inner // 32
        name = f"swiglu + cast {rows} x {2 * inner}"
        yield Shape(name, nbytes, lambda r=rows, i=inner: _swiglu(r, i), public, of_copy=of_copy)
    for name, spec, rows, by_columns, public in (
        ("e4m3/128", E4M3, 8192, False, 48.8), ("e4m3/128, scales by columns", E4M3, 8192, True, 49.4),
        ("e4m3/32 e8m0", E8M0_32, 8192, True, 49.2), ("e2m1/32", E2M1, 8192, False, 185.2),
        ("e4m3/128", E4M3, 128, False, 5.5), ("e4m3/32 e8m0", E8M0_32, 128, True, 5.4),
    ):  # fmt: skip
        nbytes = rows * 7168 * (3 if spec.code is Code.E4M3 else 2.5) + rows * 7168 / spec.group * _bytes(spec)
        prepare = lambda s=spec, r=rows, c=by_columns: _cast(s, r, c)  # noqa: E731
        yield Shape(f"cast {name}, {rows} x 7168", nbytes, prepare, public)
    yield Shape("cast e4m3, blocks of 128 x 128, 8192 x 7168", 8192 * 7168 * 3, _blocks, 51.2)
    yield Shape("norm 8192 x 7168", 8192 * 7168 * 4, _norm, 61.5)
    for spec in (E4M3_32, E8M0_32):
        nbytes = 8192 * 7168 * (7 + _bytes(spec) / 32)
        name = f"add + norm + cast e4m3/32 {spec.scale.name.lower()}, 8192 x 7168"
        yield Shape(name, nbytes, lambda s=spec: _add_norm(s), 105.1)
    yield Shape("rope in place 4096 x 128 x 64", 4096 * 128 * 64 * 4, _rope, 37.3)
    yield Shape("norm + rope 4096 x 64 x 512", 4096 * 64 * 512 * 4, lambda: _norm_rope(None))
    yield Shape("norm + rope + cast e4m3/128 4096 x 64 x 512", 4096 * 64 * 512 * 3, lambda: _norm_rope(E4M3))
    for kind in Packed:
        nbytes = 8192 * (kind.value.width * 2 + kind.value.size)
        yield Shape(f"norm + rope + record {kind.name}, 8192", nbytes, lambda k=kind: _record(k))


def _swiglu(rows: int, inner: int) -> tuple[Callable[[], object], Callable[[], None]]:
    x, (codes, scales) = _bf16(rows, 2 * inner), places(E4M3, rows, inner, CUDA)
    expected = lambda: swiglu(x[:8192].double(), 10.0, None)  # noqa: E731
    check = lambda: assert_cast(codes[:8192], scales[:8192], E4M3, expected())  # noqa: E731
    return lambda: ops.swiglu_cast(x, 10.0, None, E4M3, codes, scales), check


def _cast(spec: CastSpec, rows: int, by_columns: bool) -> tuple[Callable[[], object], Callable[[], None]]:
    x, (codes, scales) = _bf16(rows, 7168), places(spec, rows, 7168, CUDA)
    scales = scales if by_columns else scales.contiguous()

    def check() -> None:
        wanted = casts.cast_rows(x, spec)
        hold(torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)), "codes")
        hold(torch.equal(scales, wanted[1]), "scales")

    return lambda: ops.cast_rows(x, spec, codes, scales), check


def _blocks() -> tuple[Callable[[], object], Callable[[], None]]:
    x, codes = _bf16(8192, 7168), torch.empty(8192, 7168, dtype=torch.float8_e4m3fn, device=CUDA)
    scales = torch.empty(64, 56, device=CUDA)

    def check() -> None:
        wanted = casts.cast_blocks(x, 128, Scale.FP32)
        hold(torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8)), "codes")
        hold(torch.equal(scales, wanted[1]), "scales")

    return lambda: cast.cast_blocks(x, Scale.FP32, codes, scales), check


def _norm() -> tuple[Callable[[], object], Callable[[], None]]:
    x, weight = _bf16(8192, 7168), torch.rand(7168, device=CUDA)
    out = torch.empty_like(x)
    return (
        lambda: ops.rms_norm(x, weight, 1e-6, out),
        lambda: near(out, norms.rms_norm(x, weight, 1e-6), "norm"),
    )


def _add_norm(spec: CastSpec) -> tuple[Callable[[], object], Callable[[], None]]:
    x, residual, weight = _bf16(8192, 7168), _bf16(8192, 7168), torch.rand(7168, device=CUDA)
    codes, scales = places(spec, 8192, 7168, CUDA)
    codes, scales = codes, scales.contiguous()
    check = lambda: assert_cast(codes, scales, spec, norms.rms_norm(residual, weight, 1e-6))  # noqa: E731
    return lambda: ops.add_rms_norm_cast(x, residual, weight, 1e-6, spec, codes, scales), check


def _rope() -> tuple[Callable[[], object], Callable[[], None]]:
    x, positions, tables = _bf16(4096, 128, 64), torch.arange(4096, device=CUDA, dtype=torch.int32), _tables()
    once = x.clone()
    ops.rope(once, positions, *tables)
    given = x.clone()
    return lambda: ops.rope(x, positions, *tables), lambda: near(once, ropes.rope(given, positions, *tables), "rope")


def _norm_rope(spec: CastSpec | None) -> tuple[Callable[[], object], Callable[[], None]]:
    x, positions, tables = _bf16(4096, 64, 512), torch.arange(4096, device=CUDA, dtype=torch.int32), _tables()
    part = slice(0, 512)
    expected = lambda: ropes.norm_rope(x[part], None, 1e-6, positions[part], *tables)  # noqa: E731
    if spec is None:
        out = torch.empty_like(x)
        run = lambda: rope.norm_rope(x, None, 1e-6, positions, *tables, out)  # noqa: E731
        return run, lambda: near(out[part], expected(), "norm and rope")
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=CUDA)
    scales = torch.empty(4096, 64, 512 // spec.group, device=CUDA)
    check = lambda: assert_cast(codes[part].flatten(0, 1), scales[part].flatten(0, 1), spec, expected().flatten(0, 1))  # noqa: E731
    return lambda: rope.norm_rope_cast(x, None, 1e-6, positions, *tables, spec, codes, scales), check


def _record(kind: Packed) -> tuple[Callable[[], object], Callable[[], None]]:
    x, _, pages, norm, turn = records.make_operands(kind, 8192, 64, CUDA, 1)
    slots = torch.randperm(8192, device=CUDA)
    run = lambda: kv_record.pack(kind, x, slots, pages, 64, norm, turn)  # noqa: E731
    return run, lambda: records.check_pack(CUDA, 101, 64, (kind,))


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(torch.bfloat16)


def _tables() -> tuple[Tensor, Tensor]:
    angle = torch.rand(4096, 32, device=CUDA) * 6
    return angle.cos(), angle.sin()


def _bytes(spec: CastSpec) -> int:
    return 4 if spec.scale is Scale.FP32 else 1
