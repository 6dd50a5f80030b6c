"""Prefix parity: a second process resumes from the bytes of the pool's extents, and once without each group.

Every dropped group must show, or the check would not see it missing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from bench.parity_run import BLOCKS, difference, fresh, open_tiny, run
from bench.table import Row
from engine.cache.pool import CachePool
from engine.layout import GroupKind

BAR, CONTROL_BAR = 1e-3, 5e-2


def prefix_rows(
    label: str, folder: Path, kernels: str, tokens: Sequence[int], expected: torch.Tensor, boundaries: Sequence[int],
    open_at: Mapping[str, int],
) -> Iterator[Row]:  # fmt: skip
    """One row per boundary and dropped group; `open_at`: groups that hold nothing at multiples of their rate.

    `expected` are the logits of all `tokens`. State files are written into `folder`, the model's.
    """
    for boundary in boundaries:
        family, pool = open_tiny(folder, kernels)
        run(family, pool, tokens[:boundary], boundary)
        state, result = folder / f"state-{boundary}.npz", folder / f"result-{boundary}.npz"
        np.savez(state, tokens=np.array(tokens), boundary=boundary, **_extents(pool))
        command = [sys.executable, "-m", "bench.parity", "--resume", str(state), str(result), "--kernels", kernels]
        subprocess.run(command, check=True, timeout=300)
        for dropped, logits in np.load(result).items():
            worst = difference(torch.from_numpy(logits), expected[boundary:])
            nothing_open = dropped in open_at and boundary % open_at[dropped] == 0
            yield _row(f"{label}: resume at {boundary}", dropped, nothing_open, worst)


def resume(state: Path, result: Path, kernels: str) -> None:
    """The second process: restore, continue, and again with each group's bytes left zero."""
    family, _ = open_tiny(state.parent, kernels)
    saved = np.load(state)
    tokens, boundary = saved["tokens"].tolist(), int(saved["boundary"])
    results = {}
    for dropped in ["nothing", *(group.name for group in family.layout.groups)]:
        pool = fresh(family)
        for group in family.layout.groups:
            if group.name != dropped:
                _restore(pool, group.name, group.kind, saved[group.name])
        results[dropped] = run(family, pool, tokens, len(tokens), boundary).numpy()
    np.savez(result, **results)


def _row(name: str, dropped: str, nothing_open: bool, worst: float) -> Row:
    """The bar of one resume: exact when whole, and where what was dropped held nothing."""
    if dropped == "nothing":
        return Row(f"{name}, second process", worst, "", BAR)
    if nothing_open:
        return Row(f"{name} without {dropped} (none is open)", worst, "", BAR)
    return Row(f"{name} without {dropped}", worst, "", CONTROL_BAR, ">=")


def _extents(pool: CachePool) -> dict[str, np.ndarray]:
    """Every extent of every group: what a transfer would move."""
    return {
        group.name: np.stack(
            [pool.block_extent(group.name, block) for block in range(BLOCKS)]
            if group.kind is GroupKind.GLOBAL
            else [pool.slot_extent(group.name, 1)]
        )
        for group in pool.layout.groups
    }


def _restore(pool: CachePool, group: str, kind: GroupKind, data: np.ndarray) -> None:
    """Write one group's extents."""
    for at, record in enumerate(data):
        (pool.block_extent(group, at) if kind is GroupKind.GLOBAL else pool.slot_extent(group, 1))[:] = record
