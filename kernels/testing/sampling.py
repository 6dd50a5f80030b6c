"""Logits and parameters of sampling, friendly and hostile, and the check of the kernel. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.sampling` runs it without a GPU, in triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import sampling as definition
from kernels.reference.sampling import ONE, SamplingRows
from kernels.testing.tile import hold

# Of the sum of weights: what exponentials in fp32 may move a border by. Rows whose point lies closer are left out.
CLOSE = 2e-6


def make_case(
    rows: int, vocabulary: int, device: torch.device, seed: int, hostile: bool
) -> tuple[Tensor, SamplingRows]:
    """Logits in longer rows, and every mixture of truncations. Hostile: ties, masks, nothing but masks, NaN, +inf."""
    draw = torch.Generator(device).manual_seed(seed)
    wide = torch.full((rows, vocabulary + 4), torch.nan, device=device)
    logits = wide[:, :vocabulary]
    logits.copy_(torch.randn(rows, vocabulary, generator=draw, device=device) * 3)
    if hostile:
        logits[::6] = logits[::6].round()
        logits[1::6] = 0.0
        logits[2::6, 1:] = -torch.inf
        logits[3::6, vocabulary // 2] = torch.nan
        logits[4::6, 0] = torch.inf
        logits[5::6] = -torch.inf
        logits[-1, 3:5] = -100.0
    index = torch.arange(rows, device=device)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.3, 5.0], device=device)[index % 5]
    top_k = torch.tensor([0, 1, 20, vocabulary, 5, 0, 50], dtype=torch.int32, device=device)[index % 7]
    top_p = torch.tensor([1.0, 0.9, 0.3, 1.0, 0.95, 1e-6], device=device)[index % 6]
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.3], device=device)[index % 4]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=draw, device=device)
    draws = torch.randint(0, 2**40, (rows,), generator=draw, device=device)
    return logits, SamplingRows(temperature, top_k, top_p, min_p, seeds, draws)


def check_sampling(device: torch.device, rows: int, vocabulary: int, block: int, warps: int) -> int:
    """Tokens are the definition's, twice, and each row's alone; how many rows were clear. AssertionError otherwise."""
    from kernels.triton.sampling import sample

    checked = 0
    for hostile in (False, True):
        logits, given = make_case(rows, vocabulary, device, vocabulary, hostile)
        found, again = (torch.full((rows,), -7, dtype=torch.int32, device=device) for _ in range(2))
        sample(logits, given, found, block, warps)
        sample(logits, given, again, block, warps)
        hold(torch.equal(found, again), "a repeat's tokens")
        last = _row(given, rows - 1)
        sample(logits[-1:], last, again[:1], block, warps)
        hold(int(again[0]) == int(found[-1]), "a row alone")
        expected = definition.sample(logits, given)
        for row in range(rows):
            if int(found[row]) != int(expected[row]):
                hold(_is_close(logits[row], given, row), f"token of row {row}, hostile {hostile}")
            else:
                checked += 1
    hold(checked > 1.8 * rows, "too many rows are close to a border")
    return checked


def _row(given: SamplingRows, row: int) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws")
    return SamplingRows(*(getattr(given, name)[row : row + 1] for name in names))


def _is_close(logits: Tensor, given: SamplingRows, row: int) -> bool:
    """Whether exponentials that are off by a little choose another token: by the point, top-p's border, or min-p's."""
    if not bool((logits < torch.inf).all()) or float(given.temperature[row]) <= 0:
        return False
    weights = definition.kept_weights(logits, given, row).double()
    total = float(weights.sum())
    point = definition.fraction(int(given.seeds[row]), int(given.draws[row])) / 2.0**64 * total
    if float((weights.cumsum(0) - point).abs().min()) < CLOSE * total:
        return True
    whole = ((logits - logits.max()).double() / float(given.temperature[row])).exp() * 2.0**ONE
    sums = whole.sort(descending=True).values.cumsum(0)
    border = float(given.top_p[row]) * float(sums[-1])
    light = float(given.min_p[row]) * 2.0**ONE
    near_share = float((sums - border).abs().min()) < CLOSE * border
    return near_share or float((whole - light).abs().min()) < 4 * CLOSE * max(light, 1.0)


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    check_sampling(torch.device("cpu"), 12, 100, 64, 4)
    print("the kernels equal the reference")
