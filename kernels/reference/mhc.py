"""Hyper-connections with Sinkhorn on bf16 streams in torch, step by step as the GPU takes them (arch: mHC).

project: z = x . mix^T and the sum of squares of a row of x [rows, streams * hidden], in parts of the columns.
pre: with z / rms, pre = sigmoid(z_pre * s0 + b) + eps, post = 2 sigmoid(z_post * s1 + b), comb = sinkhorn(z_comb * s2 +
b), collapsed = sum_i pre_i * stream i, normed if a weight is given. post: new stream k = post_k * block + sum_j comb[j,
k] * stream j. Columns of z: pre, post, comb (row by row). Everything in fp32 between bf16 operands and results.
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


@dataclass(frozen=True, slots=True, eq=False)
class MhcSite:
    """mix fp32 [24, 4 * hidden], base fp32 [24], scale fp32 [3]; norm fp32 [hidden] behind the collapse, or None."""

    mix: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor | None
    iterations: int
    hyper_eps: float
    norm_eps: float


def project(x: Tensor, mix: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """x [rows, width], mix [24, width] -> z [parts, rows, 24] and squares [parts, rows], float64."""
    pieces = zip(x.double().chunk(parts, 1), mix.double().chunk(parts, 1), strict=True)
    found = [(piece @ weight.T, piece.square().sum(1)) for piece, weight in pieces]
    return torch.stack([z for z, _ in found]), torch.stack([squares for _, squares in found])


def pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, given: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [rows, 4, hidden] and `project`'s sums -> float64 collapsed [rows, hidden], pre [rows, 4], post [rows, 4], comb
    [rows, 4, 4]. `given` [rows, 4]: collapse by these instead of pre, which then belongs to the next site (V4.1)."""
    m, (rows, _, hidden) = STREAMS, x.shape
    unit = torch.rsqrt(squares.double().sum(0) / (m * hidden) + site.norm_eps)
    z = z.double().sum(0) * unit[:, None]
    scale, base = site.scale.double(), site.base.double()
    mixed = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + site.hyper_eps
    post_weights = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = sinkhorn((z[:, 2 * m :] * scale[2] + base[2 * m :]).view(rows, m, m), site.iterations, site.hyper_eps)
    collapsed = ((mixed if given is None else given.double())[..., None] * x.double()).sum(1)
    if site.norm is not None:
        collapsed = unit_rms(collapsed, site.norm_eps) * site.norm.double()
    return collapsed, mixed, post_weights, comb


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


def check_pre(x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, given: Tensor | None) -> None:
    """Raises KernelError naming the first operand of `pre` that no implementation takes."""
    check_streams("x", x)
    rows, hidden = x.shape[0], x.shape[2]
    wanted = [("z", z, (z.shape[0], rows, COLUMNS)), ("squares", squares, (z.shape[0], rows))]
    wanted += [("base", site.base, (COLUMNS,)), ("scale", site.scale, (3,))]
    if site.norm is not None:
        wanted.append(("norm", site.norm, (hidden,)))
    if given is not None:
        wanted.append(("given", given, (rows, STREAMS)))
    for name, tensor, shape in wanted:
        check_rows(name, tensor, shape, torch.float32)
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous", fix="pass a contiguous tensor")
    if site.iterations < 1:
        raise KernelError(f"{site.iterations} iterations", fix="ask for at least one")
