"""Engram in torch, as the GPU takes it: table rows by hash, their lookup, and the gated memory (arch: Engram).

hash: a token's classes, nearest first, times odd multipliers, are xor-ed from the nearest on; after two, three, ... of
them the sum modulo `heads` primes plus offsets names rows. From the first NOTHING on, classes count as padding.
gather: a row is 256 (any multiple of 32) E4M3 codes times an E8M0 scale per 32; rows outside the shard are zero.
gate: stream i += sigmoid(signed root of d_i) * value, d_i = sum(q_i k_i stream_i key_i) / (rms(stream_i) rms(key_i)
sqrt(hidden)), the root's argument at least 1e-6 in size; 0 where the token is dead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, Code, Scale, decode
from kernels.reference.mhc import check_streams
from kernels.reference.rms_norm import check_rows

NOTHING = -1
ROW = CastSpec(Code.E4M3, 32, Scale.E8M0)


def hash_rows(recent: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """recent int64 [tokens, longest], multipliers [layers, longest], primes and offsets [layers, columns] (by length,
    then head), all int64 -> int64 [tokens, layers, columns]."""
    broken = (recent == NOTHING).int().cummax(1).values.bool()
    mixed = recent.masked_fill(broken, pad)[:, None, :] * multipliers
    for place in range(1, recent.shape[1]):
        mixed[..., place] ^= mixed[..., place - 1]
    heads = primes.shape[1] // (recent.shape[1] - 1)
    return mixed[..., 1:].repeat_interleave(heads, 2) % primes + offsets


def gather(rows: Tensor, codes: Tensor, scales: Tensor, first: int = 0) -> Tensor:
    """rows int64 [tokens, columns], codes E4M3 [n, width], scales E8M0 [n, width / 32]: table rows from `first` on ->
    float64 [tokens, columns * width]."""
    at = rows - first
    inside = (at >= 0) & (at < len(codes))
    found = decode(*(each[at.clamp(0, len(codes) - 1).flatten()] for each in (codes, scales)), ROW)
    return (found.view(*rows.shape, -1) * inside[..., None]).flatten(1)


def gate(x: Tensor, projected: Tensor, alive: Tensor, query: Tensor, key: Tensor, eps: float) -> Tensor:
    """x [rows, 4, hidden], projected [rows, 5 * hidden] (keys, then the value), alive bool [rows], query and key fp32
    [4, hidden] -> float64 streams."""
    rows, streams, hidden = x.shape
    wide, projected = x.double(), projected.double()
    keys, value = projected[:, : streams * hidden].view(rows, streams, hidden), projected[:, None, streams * hidden :]
    unit = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    dot = (wide * keys * (query.double() * key.double())).sum(-1) * unit * hidden**-0.5
    root = torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)
    return wide + (torch.sigmoid(root) * alive[:, None])[..., None] * value


def check_hash(recent: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    tokens, longest = recent.shape
    layers, columns = primes.shape
    wanted = (("recent", recent, (tokens, longest)), ("multipliers", multipliers, (layers, longest)),
              ("primes", primes, (layers, columns)), ("offsets", offsets, (layers, columns)),
              ("rows", rows, (tokens, layers, columns)))  # fmt: skip
    for name, tensor, shape in wanted:
        check_rows(name, tensor, shape, torch.int64)
        if not tensor.is_contiguous():
            raise KernelError(f"{name} is not contiguous", fix="pass a contiguous tensor")
    if longest < 2 or columns % (longest - 1):
        raise KernelError(f"{columns} columns for {longest - 1} lengths", fix="use the same heads for every length")


def check_gather(rows: Tensor, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    width = codes.shape[1]
    check_rows("rows", rows, tuple(rows.shape), torch.int64)
    check_rows("codes", codes, tuple(codes.shape), torch.float8_e4m3fn)
    check_rows("scales", scales, (codes.shape[0], width // 32), torch.uint8)
    check_rows("out", out, (rows.shape[0], rows.shape[1] * width))
    if width & (width - 1) or width < 32 or not all(each.is_contiguous() for each in (rows, codes, scales, out)):
        raise KernelError(f"rows of {width} codes", fix="use a power of two from 32 and contiguous tensors")


def check_gate(x: Tensor, projected: Tensor, alive: Tensor, query: Tensor, key: Tensor, out: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    check_streams("x", x)
    check_streams("out", out)
    rows, streams, hidden = x.shape
    check_rows("projected", projected, (rows, (streams + 1) * hidden))
    check_rows("alive", alive, (rows,), torch.bool)
    check_rows("query", query, (streams, hidden), torch.float32)
    check_rows("key", key, (streams, hidden), torch.float32)
    if out.shape != x.shape or not all(each.is_contiguous() for each in (projected, query, key)):
        raise KernelError(
            "an operand has gaps or out another shape", fix=f"pass contiguous tensors, out {list(x.shape)}"
        )
