"""Batches on a device: every array of a ragged batch in one buffer and one copy. Knows layouts; runs no operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels.operands import Ragged, Staged

Made = TypeVar("Made")
_UNIT = 4  # int32 to 16 bytes: compiled kernels depend on the alignment of what they read


def staged(ragged: Ragged, device: torch.device) -> Staged:
    """The batch on `device`; copied at the first call, remembered with the batch."""
    if ragged.staged is None:
        remember(ragged, views(on_device(flat(ragged), device), ragged))
    assert ragged.staged is not None  # noqa: S101  narrows the type
    return ragged.staged


def tokens_of(ragged: Ragged, device: torch.device) -> Tensor:
    """The batch's tokens [rows] on `device`, to index with."""
    return torch.from_numpy(ragged.tokens) if device.type == "cpu" else staged(ragged, device).tokens


def once(on: Staged, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
    """What `make` makes of the staged batch and of nothing else: made by the first layer that wants it.

    A graph that is captured makes its own: what was made before is not made again when it is replayed.
    """
    captured = on.positions.is_cuda and torch.cuda.is_current_stream_capturing()
    found: Made = on.made.get((*key, captured)) or make()
    on.made[*key, captured] = found
    return found


def remember(ragged: Ragged, found: Staged) -> None:
    """Let `found` be what `staged` returns for this batch."""
    object.__setattr__(ragged, "staged", found)


def flat(ragged: Ragged) -> np.ndarray:
    """Every array one behind the other, int32."""
    pieces = [np.asarray(array, np.int32).reshape(-1) for array in _arrays(ragged)]
    whole = np.zeros(sum(_room(len(piece)) for piece in pieces), np.int32)
    at = 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += _room(len(piece))
    return whole


def views(buffer: Tensor, ragged: Ragged) -> Staged:
    """What `flat` laid into `buffer` (int32 on any device), for batches of this one's shape."""
    found, at = [], 0
    for array in _arrays(ragged):
        found.append(buffer[at : at + array.size].view(array.shape))
        at += _room(array.size)
    rates = list(ragged.windows)
    pairs = {rate: (found[8 + 2 * i], found[9 + 2 * i]) for i, rate in enumerate(rates)}
    return Staged(*found[:8], pairs)


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, in the stream's order: the host does not wait for the copy."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _arrays(ragged: Ragged) -> Iterator[np.ndarray]:
    yield from (ragged.tokens, ragged.positions, ragged.sequences, ragged.starts, ragged.context, ragged.slots)
    yield from (ragged.tables, ragged.window_floors)
    for done in ragged.windows.values():
        yield from (done.sequence, done.window)


def _room(size: int) -> int:
    return -(-size // _UNIT) * _UNIT
