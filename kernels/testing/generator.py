"""Random and hostile operands for the operators: ragged batches over scattered pages, poisoned elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.operands import Pages, Ragged, Ring, RopeTable, Windows

LANDMARKS = ((0, 1), (0, 37), (5, 1), (15, 2), (16, 16), (130, 1), (200, 9))  # (context, new) around rates and windows


def generator(seed: int) -> torch.Generator:
    """The one source of randomness of a test."""
    return torch.Generator().manual_seed(seed)


def ragged_of(spans: Sequence[tuple[int, int]], page_tokens: int, rates: Sequence[int], vocabulary: int = 64) -> Ragged:
    """A batch of (context, new) spans whose pages are scattered and whose slots run backwards."""
    context = np.array([c for c, _ in spans], np.int32)
    new = np.array([n for _, n in spans], np.int32)
    need = [-(-(c + n) // page_tokens) for c, n in spans]
    order = np.random.default_rng(len(spans)).permutation(sum(need)).astype(np.int32)
    tables = np.zeros((len(spans), max(need)), np.int32)
    for s, count in enumerate(need):
        tables[s, :count] = order[sum(need[:s]) : sum(need[: s + 1])]
    positions = np.concatenate([np.arange(c, c + n, dtype=np.int32) for c, n in spans])
    windows = {}
    for rate in rates:
        pairs = [(s, w) for s, (c, n) in enumerate(spans) for w in range(c // rate, (c + n) // rate)]
        listed = np.array(pairs, np.int32).reshape(-1, 2)
        windows[rate] = Windows(np.ascontiguousarray(listed[:, 0]), np.ascontiguousarray(listed[:, 1]))
    return Ragged(
        tokens=positions.astype(np.int64) % vocabulary,
        positions=positions,
        sequences=np.repeat(np.arange(len(spans), dtype=np.int32), new),
        starts=np.concatenate(([0], np.cumsum(new))).astype(np.int32),
        context=context,
        slots=np.arange(len(spans) - 1, -1, -1, dtype=np.int32),
        tables=tables,
        windows=windows,
    )


def pages_of(
    ragged: Ragged, page_tokens: int, rate: int, width: int, dtype: torch.dtype, seed: int, margin: int | None = None
) -> Pages:
    """Pages holding every entry finished before the batch and NaN elsewhere; `margin` elements before and behind, by
    default so few that no row is aligned."""
    entries, offset, behind = page_tokens // rate, *((4, 2) if margin is None else (margin, margin))
    storage = torch.full((int(ragged.tables.max()) + 1, offset + entries * width + behind), torch.nan, dtype=dtype)
    draw = generator(seed)
    for s, context in enumerate(ragged.context):
        for e in range(int(context) // rate):
            row, first = int(ragged.tables[s, e // entries]), offset + e % entries * width
            storage[row, first : first + width] = torch.randn(width, generator=draw).to(dtype)
    return Pages(storage, _array(storage), offset, entries, width, rate)


def fill_pages(ragged: Ragged, pages: Pages, seed: int) -> None:
    """Also fill the entries that this batch finishes, as the compressor would have."""
    draw = generator(seed)
    done = ragged.windows[pages.rate]
    for s, w in zip(done.sequence, done.window, strict=True):
        row, first = int(ragged.tables[s, w // pages.entries]), pages.offset + int(w) % pages.entries * pages.width
        value = torch.randn(pages.width, generator=draw)
        pages.storage[row, first : first + pages.width] = value.to(pages.storage.dtype)


def ring_of(
    ragged: Ragged, capacity: int, width: int, dtype: torch.dtype, seed: int, margin: int = 6
) -> Ring:  # fmt: skip
    """Rings holding the last `capacity` rows before the batch and NaN elsewhere, `margin` elements before them."""
    offset = margin
    storage = torch.full((len(ragged.slots), offset + capacity * width), torch.nan, dtype=dtype)
    draw = generator(seed)
    for slot, context in zip(ragged.slots, ragged.context, strict=True):
        for p in range(max(0, int(context) - capacity), int(context)):
            first = offset + p % capacity * width
            storage[int(slot), first : first + width] = torch.randn(width, generator=draw).to(dtype)
    return Ring(storage, _array(storage), offset, capacity, width)


def rope_of(positions: int, pairs: int) -> RopeTable:
    """A table of plausible angles."""
    angles = torch.arange(positions).float()[:, None] * 10.0 ** (-torch.arange(pairs).float() / 2)
    return RopeTable(angles.cos(), angles.sin())


def _array(storage: torch.Tensor) -> np.ndarray:
    return storage.view(torch.uint16).numpy() if storage.dtype == torch.bfloat16 else storage.numpy()
