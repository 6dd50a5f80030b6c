"""Time of GPU work by the device's clock, with a cold L2, and the ceilings of the device. Knows no kernel of ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 512 << 20  # several times the L2; writing it also covers the host's time to launch
_REST_S = 0.2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at most."""

    gb_per_s: float
    tflop_per_s: float


def measure_ceilings() -> Ceilings:
    return Ceilings(copy_gb_per_s(), bf16_tflop_per_s())


def median_us(work: Callable[[], object], rounds: int = 30, warmup: int = 3) -> float:
    """Median microseconds of `work` between two events, the L2 overwritten before each round."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = []
    for _ in range(warmup + rounds):
        flush.fill_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs[warmup:])


def rested_us(work: Callable[[], object]) -> float:
    """As `median_us`, after a rest: the check in float64 before it leaves the chip at its power limit, and what keeps
    the tensor cores busy would be measured at the clock of that check."""
    torch.cuda.synchronize()
    time.sleep(_REST_S)
    return median_us(work)


def copy_gb_per_s() -> float:
    """Bytes read and written each second by a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source), 10) / 1e3


def bf16_tflop_per_s() -> float:
    """Rate of an 8192^3 bf16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_us(lambda: a @ b, 10) / 1e6
