"""What is expected of chosen keys: those of the reference, but where two scores lie alike. Knows no kernel."""

from __future__ import annotations

import torch

from kernels.operands import Selection


def hold(condition: bool, what: str) -> None:
    """Raises AssertionError, also where Python drops its own assertions."""
    if not condition:
        raise AssertionError(what)


def expect_chosen(found: Selection, wanted: Selection, share: float) -> None:
    """Each row's choices are as many as the reference's, ascending, each once, and this share of all the same.

    Raises:
        AssertionError: they are not; says what was chosen.
    """
    hold(torch.equal(found.counts, wanted.counts), f"counts {found.counts.tolist()}, not {wanted.counts.tolist()}")
    same = total = 0
    for mine, theirs, count in zip(found.entries, wanted.entries, wanted.counts.tolist(), strict=True):
        chosen = mine[:count].tolist()
        hold(chosen == sorted(set(chosen)), f"chosen {chosen}")
        same, total = same + len(set(chosen) & set(theirs[:count].tolist())), total + count
    hold(same >= share * total, f"{same} of {total} choices are the reference's")
