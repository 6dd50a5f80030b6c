"""Hyper-connections with Sinkhorn on bf16 streams in torch, step by step as the GPU takes them (arch: mHC).

project: z = x . mix^T and the sum of squares of a row of x [rows, streams * hidden], in parts of the columns.
coefficients: with z / rms, pre = sigmoid(z_pre * s0 + b) + eps, post = 2 sigmoid(z_post * s1 + b), comb = sinkhorn of
z_comb * s2 + b; columns of z: pre, post, comb (row by row). collapse: sum_i pre_i * stream i, normed if asked for.
post: new stream k = post_k * block + sum_j comb[j, k] * stream j. fp32 between bf16 operands and results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference import hyper
from kernels.reference.norm import unit_rms
from kernels.reference.rms_norm import check_rows

STREAMS = 4
COLUMNS = STREAMS * (STREAMS + 2)  # of z
PACKED = 64  # rows of a packed weight: two for each column, to what a matrix product takes
_PART = 1024  # columns, at most: their weight stays in a multiprocessor's shared memory beside rows on their way


@dataclass(frozen=True, slots=True, eq=False)
class MhcSite:
    """mix fp32 [24, 4 * hidden], base fp32 [24], scale fp32 [3]."""

    mix: Tensor
    base: Tensor
    scale: Tensor
    iterations: int
    hyper_eps: float
    norm_eps: float


def project(x: Tensor, mix: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """x [rows, width], mix [24, width] -> z [parts, rows, 24] and squares [parts, rows], float64."""
    pieces = zip(x.double().chunk(parts, 1), mix.double().chunk(parts, 1), strict=True)
    found = [(piece @ weight.T, piece.square().sum(1)) for piece, weight in pieces]
    return torch.stack([z for z, _ in found]), torch.stack([squares for _, squares in found])


def coefficients(z: Tensor, squares: Tensor, width: int, site: MhcSite) -> tuple[Tensor, Tensor, Tensor]:
    """`project`'s sums over `width` columns -> float64 pre [rows, 4], post [rows, 4], comb [rows, 4, 4]."""
    m = STREAMS
    unit = torch.rsqrt(squares.double().sum(0) / width + site.norm_eps)
    z = z.double().sum(0) * unit[:, None]
    scale, base = site.scale.double(), site.base.double()
    mixed = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + site.hyper_eps
    post_weights = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    logits = (z[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m)
    return mixed, post_weights, sinkhorn(logits, site.iterations, site.hyper_eps)


def collapse(x: Tensor, weights: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """x [rows, 4, hidden], weights [rows, 4], norm [hidden] or None for no norm -> float64 [rows, hidden]. V4.1 takes
    the weights that the site before this one made."""
    collapsed = (weights.double()[..., None] * x.double()).sum(1)
    return collapsed if norm is None else unit_rms(collapsed, eps) * norm.double()


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[rows, 4, 4] -> its softmax over the last dimension plus eps, made doubly stochastic, columns last."""
    return hyper.sinkhorn(logits.softmax(-1) + eps, iterations, eps)


def post(x: Tensor, block: Tensor, weights: Tensor, comb: Tensor) -> Tensor:
    """New streams [rows, 4, hidden] of x [rows, 4, hidden], block [rows, hidden], weights [rows, 4], comb; float64."""
    return hyper.hyper_post(x.double(), block.double(), weights.double(), comb.double())


def check_streams(name: str, x: Tensor) -> None:
    """Raises KernelError unless x is contiguous bf16 [rows, 4, hidden], hidden a multiple of 256."""
    if x.dtype != torch.bfloat16 or x.ndim != 3 or x.shape[1] != STREAMS or x.shape[2] % 256 or not x.is_contiguous():
        found = f"{x.dtype} {list(x.shape)}"
        raise KernelError(f"{name} is {found}", fix="pass contiguous bf16 [rows, 4, hidden], hidden a multiple of 256")


def check_coefficients(rows: int, **tensors: Tensor) -> None:
    """Raises KernelError unless these are contiguous fp32, [rows, 4, 4] if called comb, else [rows, 4]."""
    for name, tensor in tensors.items():
        _check(name, tensor, (rows, STREAMS, STREAMS) if name == "comb" else (rows, STREAMS))


def check_sums(z: Tensor, squares: Tensor, site: MhcSite) -> None:
    """Raises KernelError naming the first operand of `coefficients` that no implementation takes."""
    parts, rows = squares.shape
    _check("z", z, (parts, rows, COLUMNS))
    _check("squares", squares, (parts, rows))
    _check("base", site.base, (COLUMNS,))
    _check("scale", site.scale, (3,))
    if site.iterations < 1:
        raise KernelError(f"{site.iterations} iterations", fix="ask for at least one")


def parts_of(width: int) -> int:
    """Into how many parts `project` cuts a row: the fewest of equal length, a multiple of 128, up to 1,024 columns."""
    return next(parts for parts in range(-(-width // _PART), width) if width % (parts * 128) == 0)


def pack(mix: Tensor) -> Tensor:
    """mix fp32 [24, width] -> bf16 [64, width]: beside each other a coefficient's rounding and the rest."""
    high = mix.to(torch.bfloat16)
    packed = torch.zeros(PACKED, mix.shape[1], dtype=torch.bfloat16, device=mix.device)
    packed[0 : 2 * COLUMNS : 2] = high
    packed[1 : 2 * COLUMNS : 2] = (mix - high.to(torch.float32)).to(torch.bfloat16)
    return packed


def check_project(x: Tensor, packed: Tensor, z: Tensor, squares: Tensor) -> None:
    """Raises KernelError naming the first operand of `project` on a GPU that no implementation takes."""
    rows, width = x.shape
    check_rows("x", x, (rows, width))
    check_rows("packed", packed, (PACKED, width))
    if width % 128:
        raise KernelError(f"{width} columns", fix="use a multiple of 128")
    parts = parts_of(width)
    check_rows("z", z, (parts, rows, COLUMNS), torch.float32)
    check_rows("squares", squares, (parts, rows), torch.float32)
    if not (z.is_contiguous() and squares.is_contiguous() and packed.is_contiguous()):
        raise KernelError("packed, z or squares is not contiguous", fix="pass contiguous tensors")


def check_pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, norm: Tensor | None, collapsed: Tensor, mixed: Tensor,
    post_weights: Tensor, comb: Tensor, given: Tensor | None,
) -> None:  # fmt: skip
    """Raises KernelError naming the first operand of coefficients and collapse that no implementation takes."""
    check_streams("x", x)
    check_sums(z, squares, site)
    rows, _, hidden = x.shape
    check_coefficients(rows, mixed=mixed, post_weights=post_weights, comb=comb)
    if given is not None:
        check_coefficients(rows, given=given)
    check_rows("collapsed", collapsed, (rows, hidden))
    if norm is not None:
        check_rows("norm", norm, (hidden,), torch.float32)
    if not collapsed.is_contiguous() or squares.shape[1] != rows:
        raise KernelError("collapsed has gaps, or z other rows than x", fix=f"pass contiguous tensors of {rows} rows")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    check_rows(name, tensor, shape, torch.float32)
    if not tensor.is_contiguous():
        raise KernelError(f"{name} is not contiguous", fix="pass a contiguous tensor")
