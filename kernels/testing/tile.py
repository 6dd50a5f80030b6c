"""Checks of casts, SwiGLU, norms and rope on any device that runs their kernels. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.tile` runs them without a GPU, in triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from kernels.reference import cast as definition
from kernels.reference import rms_norm as norms
from kernels.reference import rope as ropes
from kernels.reference.cast import CastSpec, Code, Scale
from kernels.reference.swiglu import swiglu

SPECS = {
    "e4m3 per 128, fp32": CastSpec(Code.E4M3, 128, Scale.FP32),
    "e4m3 per 128, e8m0": CastSpec(Code.E4M3, 128, Scale.E8M0),
    "e4m3 per 64, e8m0": CastSpec(Code.E4M3, 64, Scale.E8M0),
    "e4m3 per 32, e8m0": CastSpec(Code.E4M3, 32, Scale.E8M0),
    "e4m3 per 32, fp32": CastSpec(Code.E4M3, 32, Scale.FP32),
    "e2m1 per 32, e8m0": CastSpec(Code.E2M1, 32, Scale.E8M0),
    "e2m1 per 16, e4m3": CastSpec(Code.E2M1, 16, Scale.E4M3),
}
# Of a group's largest magnitude: what fp32 arithmetic may move a number, and a scale, before it is rounded to a code.
MOVED = 3e-6
EPS = 1e-6


def make_rows(rows: int, width: int, device: torch.device, seed: int, hostile: bool = False) -> Tensor:
    """bf16 [rows, width] in longer rows whose rest is NaN. Hostile: zeros, ties, extremes, NaN and infinities."""
    draw = torch.Generator(device).manual_seed(seed)
    wide = torch.full((rows, width + 16), torch.nan, dtype=torch.bfloat16, device=device)
    x = wide[:, :width]
    x.copy_(torch.randn(rows, width, generator=draw, device=device))
    if hostile:
        values = [0.0, -0.0, 1e-30, -1e-38, 3.3e38, 448.0, 1.0625, 0.25, 6.0, 2.5]
        for row in range(rows):
            x[row, :: 3 + row % 5] = values[row % len(values)]
        x[rows // 2] = 0
        x[1::7, 3] = torch.nan
        x[2::7, width - 1] = -torch.inf
    return x


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory in which an element that nobody wrote is seen."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((*shape, size), 0x7F, dtype=torch.uint8, device=device).view(dtype).squeeze(-1)


def places(spec: CastSpec, rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Poisoned places for codes and, standing by columns, scales."""
    codes = poisoned((rows, spec.code_columns(width)), spec.code_type, device)
    return codes, poisoned((width // spec.group, rows), spec.scale_type, device).T


def assert_cast(codes: Tensor, scales: Tensor, spec: CastSpec, expected: Tensor) -> None:
    """Codes and scales mean `expected` (float64 [rows, width]) but for one rounding. Raises AssertionError."""
    groups = expected.unflatten(1, (-1, spec.group))
    largest, found = groups.abs().amax(-1), definition.scale_values(scales)
    good = largest.isfinite()
    wanted = largest.clamp(min=spec.floor) / spec.code.value
    ratio = found / wanted
    low, high = {Scale.FP32: (1.0, 1.0), Scale.E8M0: (1.0, 2.0), Scale.E4M3: (0.9375, 1.0625)}[spec.scale]
    near = (ratio >= low * (1 - MOVED)) & (ratio <= high * (1 + MOVED))
    if spec.scale is Scale.E4M3:
        near |= (found - wanted).abs() <= 2.0**-10 * (1 + MOVED)
        near |= (wanted > 448) & (found == 448)
    hold(bool((near | ~good).all()), "a scale")
    hold(not bool(found[~good].isfinite().any()), "a group with NaN or infinity has a finite scale")
    hold(bool((found[good] > 0).all()), "a scale is not positive")
    size = (groups.abs() / found[..., None]).clamp(max=spec.code.value)
    step = torch.where(size > 2.0**-6, torch.exp2(size.clamp(min=2.0**-6).log2().floor() - 3), 2.0**-9)
    if spec.code is Code.E2M1:
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    meant = definition.decode(codes, scales, spec).unflatten(1, (-1, spec.group))
    clipped = groups.clamp(-spec.code.value * found[..., None], spec.code.value * found[..., None])
    off = (meant - clipped).abs() - step / 2 * found[..., None] * (1 + 1e-6) - MOVED * largest[..., None]
    hold(bool((off[good] <= 0).all()), "a code")


def near(found: Tensor, expected: Tensor, case: str) -> None:
    """bf16 of float64: one unit in the last place beside a boundary, and what fp32 sums move."""
    off = (found.double() - expected).abs() - 2.0**-8 * expected.abs() - 1e-5 * expected.abs().amax(-1, keepdim=True)
    hold(bool((off <= 1e-9).all()), case)


def hold(holds: bool, case: str) -> None:
    """AssertionError that names the case."""
    if not holds:
        raise AssertionError(f"the kernels differ from their definition: {case}")


def check_casts(
    device: torch.device, rows: int, widths: tuple[int, ...], names: Iterable[str] = SPECS, by: str = "triton.cast",
    wide: bool = True,
) -> None:  # fmt: skip
    """Casts equal their definition bit for bit, where groups are finite; AssertionError otherwise.

    `by`: the implementation, within kernels. `wide`: where a scale is fp32, what is cast is as well.
    """
    cast = import_module(f"kernels.{by}")
    for name in names:
        spec = SPECS[name]
        for width in widths:
            for hostile in (False, True):
                x = make_rows(rows, width, device, width, hostile)
                given = x.float() if wide and spec.scale is Scale.FP32 else x
                found = _twice(partial(cast.cast_rows, given, spec), spec, rows, width, device)
                _equal(found, definition.cast_rows(given, spec), spec, f"{name}, width {width}, hostile {hostile}")


def check_block_casts(device: torch.device, rows: int, width: int) -> None:
    """Casts by blocks equal their definition bit for bit."""
    from kernels.triton import cast

    for size, scale in ((128, Scale.FP32), (32, Scale.E8M0)):
        x = make_rows(rows, width - 16, device, 3, True).nan_to_num(1.0, 2.0, -2.0)
        codes = poisoned(tuple(x.shape), torch.float8_e4m3fn, device)
        spec = CastSpec(Code.E4M3, 128, scale)
        scales = poisoned((-(-rows // size), -(-x.shape[1] // size)), spec.scale_type, device)
        cast.cast_blocks(x, scale, codes, scales, size)
        expected = definition.cast_blocks(x, size, scale)
        hold(torch.equal(scales, expected[1]), f"scales of blocks of {size}")
        hold(torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8)), f"codes of blocks of {size}")


def check_swiglu(
    device: torch.device, rows: int, inner: int, names: Iterable[str] = SPECS, by: str = "triton.swiglu"
) -> None:
    """SwiGLU with and without clamp and weights, every kind of cast."""
    swiglu_cast = import_module(f"kernels.{by}").swiglu_cast
    weights = torch.rand(rows, generator=torch.Generator(device).manual_seed(5), device=device)
    for spec in (SPECS[name] for name in names):
        for limit, given in ((None, None), (1.5, weights), (10.0, None)):
            for hostile in (False, True):
                x = make_rows(rows, 2 * inner, device, inner, hostile)
                if hostile and limit is None:
                    x.clamp_(-1e18, 1e18)  # the product of two extremes is none of this cast's business
                run = partial(swiglu_cast, x, limit, given, spec)
                codes, scales = _twice(run, spec, rows, inner, device)
                assert_cast(codes, scales, spec, swiglu(x.double(), limit, None if given is None else given.double()))


def check_norms(
    device: torch.device, rows: int, widths: tuple[int, ...], names: Iterable[str] = SPECS, by: str = "triton.rms_norm"
) -> None:
    """Norms plain, cast, and behind an addition; of Triton's by a program for each row and by few in turns."""
    kernel = import_module(f"kernels.{by}")
    ways = (None, kernel.Turns(4, 2), kernel.Turns(8, 3, 3)) if hasattr(kernel, "Turns") else (None,)
    for width in widths:
        x, residual = (make_rows(rows, width, device, seed) for seed in (1, 2))
        x[0] = 0
        x[-1] *= 1e4
        weight = torch.randn(width, generator=torch.Generator(device).manual_seed(3), device=device)
        for turns in ways:
            given_turns = {} if turns is None else {"turns": turns}
            for given in (weight, weight.to(torch.bfloat16)):
                out = poisoned((rows, width), torch.bfloat16, device)
                kernel.rms_norm(x, given, EPS, out, **given_turns)
                near(out, norms.rms_norm(x, given, EPS), f"norm of {width}")
            for spec in (SPECS[name] for name in names):
                if width % spec.group:
                    continue
                run = partial(kernel.rms_norm_cast, x, weight, EPS, spec, **given_turns)
                assert_cast(*_twice(run, spec, rows, width, device), spec, norms.rms_norm(x, weight, EPS))
                total, (codes, scales) = residual.clone(), places(spec, rows, width, device)
                kernel.add_rms_norm_cast(x, total, weight, EPS, spec, codes, scales, **given_turns)
                hold(torch.equal(total, norms.add(x, residual)), "the new residual")
                assert_cast(codes, scales, spec, norms.rms_norm(total, weight, EPS))


def check_ropes(device: torch.device, rows: int, heads: int, width: int, pairs: int) -> None:
    """Rope in place and back, and norm and rope with and without a cast."""
    from kernels.triton import rope as kernel

    draw, x, positions, cosine, sine = _heads(device, rows, heads, width, pairs)
    check_turns(device, rows, heads, width, pairs)
    for weight in (None, torch.rand(width, generator=draw, device=device) + 0.5):
        expected = ropes.norm_rope(x, weight, EPS, positions, cosine, sine)
        out = poisoned(tuple(x.shape), torch.bfloat16, device)
        kernel.norm_rope(x, weight, EPS, positions, cosine, sine, out)
        near(out, expected, "norm and rope")
        for spec in SPECS.values():
            if spec.code is Code.E4M3 and width % spec.group == 0:
                codes = poisoned(tuple(x.shape), spec.code_type, device)
                scales = poisoned((rows, heads, width // spec.group), spec.scale_type, device)
                kernel.norm_rope_cast(x, weight, EPS, positions, cosine, sine, spec, codes, scales)
                assert_cast(codes.flatten(0, 1), scales.flatten(0, 1), spec, expected.flatten(0, 1))


def check_turns(device: torch.device, rows: int, heads: int, width: int, pairs: int, by: str = "triton.rope") -> None:
    """Rope in place and back."""
    kernel = import_module(f"kernels.{by}")
    _, x, positions, cosine, sine = _heads(device, rows, heads, width, pairs)
    for inverse in (False, True):
        found = x.clone()
        kernel.rope(found, positions, cosine, sine, inverse)
        near(found, ropes.rope(x, positions, cosine, sine, inverse), "rope")
        hold(torch.equal(found[..., : -2 * pairs], x[..., : -2 * pairs]), "channels that do not turn")


def _heads(
    device: torch.device, rows: int, heads: int, width: int, pairs: int
) -> tuple[torch.Generator, Tensor, Tensor, Tensor, Tensor]:
    """Where the rest is drawn from, heads, their positions, and tables of cosines and sines."""
    draw = torch.Generator(device).manual_seed(7)
    angle = torch.rand(64, pairs, generator=draw, device=device) * 6
    positions = torch.randint(0, 64, (rows,), generator=draw, device=device, dtype=torch.int32)
    x = torch.randn(rows, heads, width, generator=draw, device=device).to(torch.bfloat16)
    return draw, x, positions, angle.cos(), angle.sin()


def _twice(
    run: Callable[[Tensor, Tensor], None], spec: CastSpec, rows: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """What two runs into poisoned memory write alike."""
    first, second = (places(spec, rows, width, device) for _ in range(2))
    run(*first)
    run(*second)
    for one, other in zip(first, second, strict=True):
        hold(torch.equal(_bytes(one), _bytes(other)), "a repeat's bits")
    return first


def _equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], spec: CastSpec, case: str) -> None:
    """Bit for bit where the scale is finite; elsewhere neither is."""
    good = definition.scale_values(expected[1]).isfinite()
    hold(torch.equal(definition.scale_values(found[1]).isfinite(), good), f"finite scales of {case}")
    scales = [_bytes(each[good]) for each in (found[1], expected[1])]
    hold(torch.equal(*scales), f"scales of {case}")
    codes = [each.view(torch.uint8).unflatten(1, (good.shape[1], -1))[good] for each in (found[0], expected[0])]
    hold(torch.equal(*codes), f"codes of {case}")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    cpu = torch.device("cpu")
    check_casts(cpu, 4, (384,))
    check_block_casts(cpu, 50, 160)
    check_swiglu(cpu, 3, 256, ("e4m3 per 128, fp32", "e4m3 per 32, e8m0", "e2m1 per 32, e8m0"))
    check_norms(cpu, 4, (384,))
    check_ropes(cpu, 3, 5, 128, 32)
    check_casts(cpu, 2, (384,), ("e4m3 per 32, e8m0",), "tile")
    check_swiglu(cpu, 2, 256, ("e4m3 per 32, e8m0",), "tile")
    check_norms(cpu, 2, (384,), ("e4m3 per 32, e8m0",), "tile")
    check_turns(cpu, 2, 5, 64, 32, "tile")
    print("the kernels equal the reference")
