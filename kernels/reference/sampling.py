"""Choice of a token for every row of logits in torch: temperature, top-k, top-p, min-p and one seeded draw.

A token weighs floor(2**40 exp((logit - best) / temperature)): integers, whose sums no order changes. Top-k keeps the k
best logits and what equals the last of them; top-p the fewest best of these that weigh p of their sum, with what equals
the last; min-p what weighs at least that share of the best. The point is 53 bits of Philox-4x32-10 (key: seed, counter
the draw) times the sum of what is left; the token is the first, by id, whose running sum exceeds it. Temperature 0: the
best logit, of the lowest id. A row with NaN, +inf or nothing but -inf gets -1. Nothing is dropped by top_k 0, top_p 1
and min_p 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.rms_norm import check_rows

ONE = 40  # bits of the best token's weight
_MULTIPLIERS, _WEYL, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """[rows] each: temperature, top_p and min_p fp32, top_k int32, seeds and draws int64 with the bits of a uint64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    draws: Tensor


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """logits fp32 [rows, vocabulary] -> tokens int32 [rows]."""
    check_sampling(logits, rows)
    tokens = [_token(logits[row], rows, row) for row in range(len(logits))]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def kept_weights(logits: Tensor, rows: SamplingRows, row: int) -> Tensor:
    """Weights int64 [vocabulary] of one row, 0 where a truncation drops a token."""
    best, heat = logits.max(), float(rows.temperature[row])
    weights = (((logits - best).double() / heat).exp() * 2.0**ONE).to(torch.int64)
    count, share = int(rows.top_k[row]), float(rows.top_p[row])
    if 0 < count < len(logits):
        weights = weights.masked_fill(logits < logits.topk(count).values[-1], 0)
    if share < 1:
        ordered = logits.masked_fill(weights == 0, -torch.inf).sort(descending=True)
        need = max(1, int(share * 2**32) * int(weights.sum()) >> 32)
        place = int((weights[ordered.indices].cumsum(0) < need).sum())
        weights = weights.masked_fill(logits < ordered.values[min(place, len(logits) - 1)], 0)
    return weights.masked_fill(weights < float(rows.min_p[row]) * 2.0**ONE, 0)


def fraction(seed: int, draw: int) -> int:
    """The point of a draw, 53 bits of 64."""
    seed, draw = seed & (1 << 64) - 1, draw & (1 << 64) - 1
    counter, key = [draw & _WORD, draw >> 32, 0, 0], [seed & _WORD, seed >> 32]
    for _ in range(10):
        left, right = _MULTIPLIERS[0] * counter[0], _MULTIPLIERS[1] * counter[2]
        counter = [right >> 32 ^ counter[1] ^ key[0], right & _WORD, left >> 32 ^ counter[3] ^ key[1], left & _WORD]
        key = [(key[lane] + _WEYL[lane]) & _WORD for lane in range(2)]
    return (counter[0] << 32 | counter[1]) >> 11 << 11


def check_sampling(logits: Tensor, rows: SamplingRows) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    count = len(logits)
    check_rows("logits", logits, tuple(logits.shape), torch.float32)
    for name, dtype in (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
                        ("min_p", torch.float32), ("seeds", torch.int64), ("draws", torch.int64)):  # fmt: skip
        check_rows(name, getattr(rows, name), (count,), dtype)
    if not 1 <= logits.shape[1] <= 1 << 22:
        raise KernelError(f"a vocabulary of {logits.shape[1]}", fix="use at most 4,194,304 tokens")


def _token(logits: Tensor, rows: SamplingRows, row: int) -> int:
    best = logits.max()
    if not bool((logits < torch.inf).all()) or not bool(best > -torch.inf):
        return -1
    if float(rows.temperature[row]) <= 0:
        return int((logits == best).nonzero()[0])
    weights = kept_weights(logits, rows, row)
    point = fraction(int(rows.seeds[row]), int(rows.draws[row])) * int(weights.sum()) >> 64
    return int((weights.cumsum(0) <= point).sum())
