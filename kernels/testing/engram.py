"""Operands of Engram, friendly and hostile, and the checks of its kernels. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.engram` runs them without a GPU, in triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import engram as definition
from kernels.testing.tile import hold, near, poisoned


def make_hash(
    tokens: int, device: torch.device, layers: int = 2, longest: int = 4, heads: int = 8
) -> tuple[Tensor, ...]:
    """recent with tokens that are missing, multipliers up to half of 2**63 over the classes, primes and offsets."""
    draw = torch.Generator(device).manual_seed(tokens)
    recent = torch.randint(0, 99_092, (tokens, longest), generator=draw, device=device)
    recent[torch.rand(tokens, longest, generator=draw, device=device) < 0.1] = definition.NOTHING
    bound = (2**63 - 1) // 99_092 // 2
    multipliers = torch.randint(0, bound, (layers, longest), generator=draw, device=device) * 2 + 1
    columns = (longest - 1) * heads
    primes = 16_000_057 + 2 * torch.arange(layers * columns, device=device).view(layers, columns)
    return recent, multipliers, primes, primes.cumsum(1) - primes


def make_gate(rows: int, hidden: int, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """x, projected, alive, query and key: a row of zeros, a dead one, large and tiny ones among them."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, 4, hidden, generator=draw, device=device)
    projected = torch.randn(rows, 5 * hidden, generator=draw, device=device)
    x[0] = 0
    projected[:, :hidden] += x[:, 0]  # keys like their stream: gates that open
    projected[:, hidden : 2 * hidden] -= x[:, 1]
    x[rows // 2] *= 1e4
    projected[-1] *= 1e-6
    alive = torch.arange(rows, device=device) % 5 != 1
    weights = (torch.rand(4, hidden, generator=draw, device=device) + 0.5 for _ in range(2))
    return x.to(torch.bfloat16), projected.to(torch.bfloat16), alive, *weights


def check_hash(device: torch.device, tokens: int) -> None:
    """Row by row the definition's; AssertionError otherwise."""
    from kernels.triton.engram import hash_rows

    recent, multipliers, primes, offsets = make_hash(tokens, device)
    rows = torch.full((tokens, *primes.shape), -7, dtype=torch.int64, device=device)
    hash_rows(recent, multipliers, primes, offsets, 2, rows)
    hold(torch.equal(rows, definition.hash_rows(recent, multipliers, primes, offsets, 2)), "hashed rows")


def check_gather(device: torch.device, tokens: int, width: int = 256) -> None:
    """Bit for bit the definition's, rows of other shards zero; AssertionError otherwise."""
    from kernels.triton.engram import gather

    draw = torch.Generator(device).manual_seed(tokens)
    codes = torch.randint(0, 126, (50, width), generator=draw, device=device, dtype=torch.uint8)
    codes = codes.view(torch.float8_e4m3fn)
    scales = torch.randint(100, 140, (50, width // 32), generator=draw, device=device, dtype=torch.uint8)
    rows = torch.randint(80, 170, (tokens, 24), generator=draw, device=device)
    rows[0] = 2**40
    out = poisoned((tokens, 24 * width), torch.bfloat16, device)
    gather(rows, codes, scales, out, 100)
    hold(torch.equal(out.double(), definition.gather(rows, codes, scales, 100)), "gathered rows")


def check_gate(device: torch.device, rows: int, hidden: int) -> None:
    """By a program for each row, by few in turns, and in place; AssertionError where one differs."""
    from kernels.triton.engram import gate
    from kernels.triton.rms_norm import Turns

    given = make_gate(rows, hidden, device, hidden)
    expected, first = definition.gate(*given, 1e-20), None
    for turns in (Turns(4), Turns(4, 8, 1), Turns(4, 8, 3)):
        out = poisoned(tuple(given[0].shape), torch.bfloat16, device)
        gate(*given, 1e-20, out, turns)
        near(out, expected, "gated streams")
        first = out if first is None else first
        hold(torch.equal(out, first), "the bits of programs that take turns")
    x = given[0].clone()
    gate(x, *given[1:], 1e-20, x, Turns(4))
    hold(torch.equal(x, first), "streams in place")


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    cpu = torch.device("cpu")
    check_hash(cpu, 21)
    check_gather(cpu, 3)
    check_gate(cpu, 6, 768)
    print("the kernels equal the reference")
