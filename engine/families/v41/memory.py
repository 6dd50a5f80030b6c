"""Engram's view of a batch: the recent classes of every row, kept across batches in a ring. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.batch import Replay
from engine.checkpoint.table import RowTable
from engine.families.v41.hashing import NOTHING, EngramHash
from engine.families.v41.recall import Recall
from kernels import Ops
from kernels.operands import Ragged, Ring
from kernels.staging import on_device


class EngramMemory:
    """Table rows of every token. Its only state is the ring of each sequence's last classes, in the cache."""

    def __init__(
        self, classes: np.ndarray, hashing: EngramHash, longest: int, image_token: int | None, ops: Ops
    ) -> None:
        self._classes, self._hash, self._image_token, self._ops = classes, hashing, image_token, ops
        self.before = longest - 1  # tokens that an n-gram reaches back

    def recall(self, tables: Sequence[RowTable]) -> Recall:
        """The same for decode steps, without the host; `tables` in the order of their layers."""
        return Recall(self._classes, self._hash, tables, self._ops)

    def rows(self, rows: Ragged, dead: np.ndarray, ring: Ring, replay: Replay | None) -> torch.Tensor:
        """int64 [rows, layers, columns]; `dead` (bool [rows]) tokens take part in no n-gram; updates the ring."""
        classes = np.where(dead, NOTHING, self._classes[rows.tokens])
        recent = np.empty((rows.rows, self.before + 1), np.int64)
        recent[:, 0] = classes
        earlier = self._earlier(rows, ring, replay)
        for back in range(1, self.before + 1):
            within = rows.positions - back - rows.context[rows.sequences]
            fresh = classes[np.maximum(rows.starts[rows.sequences] + within, 0)]
            old = earlier[rows.sequences, np.clip(-within - 1, 0, self.before - 1)]
            recent[:, back] = np.where(within >= 0, fresh, old)
        self._ops.store_rows(on_device(classes.astype(np.float32), ring.storage.device)[:, None], 0, rows, ring)
        return torch.from_numpy(self._hash.rows(recent))

    def _earlier(self, rows: Ragged, ring: Ring, replay: Replay | None) -> np.ndarray:
        """Classes before each sequence's context, int64 [sequences, longest - 1], nearest first."""
        positions = rows.context[:, None] - 1 - np.arange(self.before)
        at = rows.slots[:, None], ring.offset + positions % ring.capacity
        held = ring.storage[at].cpu().numpy() if ring.array is None else ring.array[at]
        found = np.where(positions < 0, NOTHING, held)
        if replay is None:
            return found.astype(np.int64)
        ids = replay.before[:, : self.before]
        nothing = (ids < 0) | (ids == (-1 if self._image_token is None else self._image_token))
        told = np.where(nothing, NOTHING, self._classes[ids])
        return np.where((replay.hits > rows.context)[:, None], told, found).astype(np.int64)
