"""V4.1's recorded bounded replays: cold, decoder side, encoder side, both. Computes no reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from bench.parity_prefix import BAR, CONTROL_BAR
from bench.parity_run import difference, fresh, open_tiny, piece, run
from bench.table import Row
from engine.batch import Replay
from engine.cache.pool import CachePool
from engine.families.v41.model import V41

CHUNKS = (7, 1000)
REACH = 3  # ids before a replay that n-grams need
Tensors = dict[str, torch.Tensor]


def replay_rows(label: str, kernels: str, fixtures: Path) -> Iterator[Row]:
    """One row per recorded run, the worst of all chunkings; the controls leave one part of the definition out."""
    expected = load_file(fixtures / "v41-replay.safetensors")
    family, _ = open_tiny(fixtures / "v41-tiny", kernels)
    if not isinstance(family, V41):
        raise ValueError(f"{fixtures / 'v41-tiny'} is no V4.1 checkpoint")
    for name in sorted(name for name in expected if not name.startswith("ids_")):
        kind, length, *hit = name.split("_")
        tokens, at = expected[f"ids_{length}"].tolist(), int(hit[0]) if hit else 0
        worst = max(difference(rows_of(family, tokens, kind, at, chunk), expected[name]) for chunk in CHUNKS)
        end = f", hit at {at}" if hit else ""
        yield Row(f"{label} replay {kind}: {length} tokens{end}", worst, "", BAR)
    yield from _control_rows(label, family, expected)


def rows_of(family: V41, tokens: Sequence[int], kind: str, hit: int, chunk: int, told: bool = True) -> torch.Tensor:
    """The logits that a run of this kind records: the last window, or every row from the replay's start on.

    The hit's entries are those of a whole run; nothing else of it is left. `told`: with the ids before the replay.
    """
    pool, window = fresh(family), family.config.window
    run(family, pool, tokens, len(tokens))
    pool.slots.fill_(0xFF)  # NaN: what is not replayed must not be read
    upper = len(tokens) - window if kind in ("decoder", "both") else 0
    start = max(0, hit - window)
    first = start if kind == "encoder" else len(tokens) - window
    found = [
        _forward(family, pool, tokens, (at, at + chunk), (hit, upper, first), told)
        for at in range(start, len(tokens), chunk)
    ]
    return torch.cat(found)


def _forward(
    family: V41, pool: CachePool, tokens: Sequence[int], span: tuple[int, int], bounds: tuple[int, int, int], told: bool
) -> torch.Tensor:
    (at, end), (hit, upper, first) = span, bounds
    batch = piece(tokens[at:end], at)
    before = [[tokens[at - back] if told and at >= back else -1 for back in range(1, REACH + 1)]]
    hits, uppers = (np.array([position], np.int32) for position in (hit, upper))
    replay = Replay(hits, np.array(before, np.int64), uppers, family.config.window)
    asked = np.arange(max(0, first - at), max(batch.rows, first - at))
    return family.forward(replace(batch, logit_rows=asked, replay=replay), pool)


def _control_rows(label: str, family: V41, expected: Tensors) -> Iterator[Row]:
    tokens = expected["ids_90"].tolist()
    cold, window = expected["cold_90"], family.config.window
    worst = difference(rows_of(family, tokens, "decoder", 0, 90), cold)
    yield Row(f"{label} decoder-side replay, held against a cold run", worst, "", CONTROL_BAR, ">=")
    worst = difference(rows_of(family, tokens, "encoder", 64, 90)[-window:], cold)
    yield Row(f"{label} encoder-side replay, held against a cold run", worst, "", CONTROL_BAR, ">=")
    worst = difference(rows_of(family, tokens, "encoder", 64, 90, told=False), expected["encoder_90_64"])
    yield Row(f"{label} encoder-side replay without the ids before it", worst, "", CONTROL_BAR, ">=")
    worst = difference(
        rows_of(family, tokens, "encoder", 44, 90)[-len(expected["encoder_90_64"]) :], expected["encoder_90_64"]
    )
    yield Row(f"{label} encoder-side replay of another hit", worst, "", CONTROL_BAR, ">=")
