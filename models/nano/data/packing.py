"""Packing samples into fixed rows: each document starts on a block of 128 tokens. Knows numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.nano.config import BLOCK_TOKENS
from models.nano.data.render import ANSWER_WEIGHT, Sample

PAD = 2
WAITING = 24
Array = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, targets, weights [rows, tokens] (targets[p] is the token after p, weights how much predicting it counts),
    documents [rows, blocks] numbers the document of each block, marks [rows, tokens] is 1 + the index of the sample
    whose answer the target belongs to (0: none)."""

    ids: Array
    targets: Array
    weights: Array
    documents: Array
    marks: Array

    def probes(self, rng: np.random.Generator, number: int) -> Array:
        """[rows, number] blocks on which the indexer learns: mostly where answers are, far into their document."""
        rows, blocks = self.documents.shape
        answers = (self.weights == ANSWER_WEIGHT).reshape(rows, blocks, BLOCK_TOKENS).sum(-1)
        depth = np.zeros((rows, blocks))
        for block in range(1, blocks):
            same = self.documents[:, block] == self.documents[:, block - 1]
            depth[:, block] = np.where(same, depth[:, block - 1] + 1, 0)
        weight = (answers + 2.0) * (depth + 0.05) + rng.random((rows, blocks)) * 1e-6
        keys = rng.random((rows, blocks)) ** (1.0 / weight)
        return np.argsort(-keys, axis=1)[:, :number].astype(np.int64)


def blocks_of(sample: Sample) -> int:
    return -(-len(sample.ids) // BLOCK_TOKENS)


def rows_of(samples: Iterable[Sample], row_blocks: int) -> Iterator[list[Sample]]:
    """Rows of samples that fit in `row_blocks`, the largest waiting sample first. Longer samples are left out."""
    waiting: list[Sample] = []
    source = iter(samples)
    exhausted = False
    while True:
        while len(waiting) < WAITING and not exhausted:
            sample = next(source, None)
            exhausted = sample is None
            if sample is not None and blocks_of(sample) <= row_blocks:
                waiting.append(sample)
        if not waiting:
            return
        yield _take(waiting, row_blocks)


def _take(waiting: list[Sample], room: int) -> list[Sample]:
    row = [waiting.pop(0)]
    room -= blocks_of(row[0])
    for sample in sorted(waiting, key=blocks_of, reverse=True):
        if blocks_of(sample) <= room:
            waiting.remove(sample)
            row.append(sample)
            room -= blocks_of(sample)
    return row


def batch_of(rows: Sequence[Sequence[Sample]], row_blocks: int) -> Batch:
    """Arrays of packed rows; marks count samples in order."""
    tokens = row_blocks * BLOCK_TOKENS
    ids = np.full((len(rows), tokens), PAD, np.int32)
    targets, weights, marks = np.zeros_like(ids), np.zeros_like(ids), np.zeros_like(ids)
    documents = np.zeros((len(rows), row_blocks), np.int32)
    number = 0
    for row, samples in enumerate(rows):
        start = 0
        for place, sample in enumerate(samples):
            number += 1
            end = start + len(sample.ids)
            ids[row, start:end] = sample.ids
            targets[row, start : end - 1] = sample.ids[1:]
            weights[row, start : end - 1] = sample.weights[1:]
            marks[row, start + sample.prompt_length - 1 : end - 1] = number
            start += blocks_of(sample) * BLOCK_TOKENS
            documents[row, start // BLOCK_TOKENS - blocks_of(sample) : start // BLOCK_TOKENS] = place
        documents[row, start // BLOCK_TOKENS :] = len(samples)
    return Batch(ids, targets, weights, documents, marks)
