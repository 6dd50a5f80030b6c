"""Worker processes that generate, render and pack training rows without end. Knows no model."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.nano.corpus import read_archive
from models.nano.data.mixture import TrainingMixture
from models.nano.data.packing import Array, Batch, batch_of, rows_of
from models.nano.data.render import Renderer, Sample
from models.nano.tokenizer import load

QUEUE_BATCHES = 48
WAIT_S = 60.0
TEXT_SHARE = 0.018
PROBES = 2


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """What workers produce: batches of `rows` rows of `row_blocks` blocks; `corpus` is a text archive or None."""

    rows: int
    row_blocks: int
    seed: int
    workers: int
    corpus: Path | None


def samples(plan: LoaderPlan, worker: int, distance: Any) -> Iterator[Sample]:
    """Training documents of one worker: generated problems and, a few times in a hundred, text or code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    renderer, rng = Renderer(load()), random.Random(f"train:{plan.seed}:{worker}")
    mixture = TrainingMixture(renderer.count, rng)
    texts = read_archive(plan.corpus) if plan.corpus else []
    while True:
        if texts and rng.random() < TEXT_SHARE:
            yield renderer.document(rng.choice(texts))
        else:
            yield renderer.sample(mixture.next(distance.value))


def batches(plan: LoaderPlan, worker: int, distance: Any) -> Iterator[tuple[Batch, Array]]:
    """Packed batches of one worker with their probe blocks."""
    chance = np.random.default_rng([plan.seed, worker])
    rows = rows_of(samples(plan, worker, distance), plan.row_blocks)
    while True:
        batch = batch_of([next(rows) for _ in range(plan.rows)], plan.row_blocks)
        yield batch, batch.probes(chance, PROBES)


def _work(plan: LoaderPlan, worker: int, distance: Any, out: Any) -> None:
    for batch, probes in batches(plan, worker, distance):
        out.put((batch.ids, batch.targets, batch.weights, batch.documents, probes))


class Loader:
    """Owns the worker processes. Start it before CUDA is touched; `close` ends them."""

    def __init__(self, plan: LoaderPlan) -> None:
        context = mp.get_context("fork")
        self._queue: Any = context.Queue(QUEUE_BATCHES)
        self._distance: Any = context.Value("i", 400)
        self._processes = [
            context.Process(target=_work, args=(plan, worker, self._distance, self._queue), daemon=True)
            for worker in range(plan.workers)
        ]
        for process in self._processes:
            process.start()

    def set_distance(self, tokens: int) -> None:
        """Largest recall distance of the problems generated from now on."""
        self._distance.value = tokens

    def next(self) -> tuple[Array, ...]:
        """(ids, targets, weights, documents, probes) of the next batch. Raises RuntimeError when workers stall."""
        try:
            batch: tuple[Array, ...] = self._queue.get(timeout=WAIT_S)
        except queue.Empty:
            raise RuntimeError(f"no batch within {WAIT_S:.0f} s: are the loader's workers alive?") from None
        return batch

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(timeout=5)
