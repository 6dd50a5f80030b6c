"""Engines whose caches are published records, handed from one to the other. Knows no kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.requests import PrefillRequest
from tests.support.driving import GREEDY, handoff, run, tokens_of


def check_handed_on(folder: Path, pair: str) -> None:
    """What a decode attends to are the bytes of a prefill's records, block by block, and it answers over them.

    `pair`: the devices of prefill and decode, such as "cpu cuda"; a CPU's operators are the reference's.
    """
    engines = []
    for device in pair.split():
        kernels = "cuda" if device == "cuda" else "reference"
        config = EngineConfig(
            folder, "bfloat16", num_blocks=12, device=device, kernels=kernels, max_sequences=2, kv_cache="records"
        )  # fmt: skip
        engines.append(Engine.open(config, allocate=lambda count: np.zeros(count, np.uint8)))
    source, target = engines
    for length in (1, 40, 150):
        prompt = tuple(3 + (11 * place) % 431 for place in range(length))
        _, reservation = handoff(source, target, PrefillRequest("r", prompt, GREEDY, cache=False))
        sent = target.pool.host_blocks[list(reservation.blocks)].copy()
        assert len(tokens_of(run(target), "r")) == GREEDY.max_tokens - 1
        target.pool.fetch(reservation.blocks)
        kept = target.pool.host_blocks[list(reservation.blocks)]
        for group in target.model.layout.globals:
            first, _ = target.pool.row_of(group.name, 0)
            for layer in range(group.layers):
                begin = first + layer * group.entries * group.record_bytes
                entries = group.valid_entries(min(length, target.model.layout.block_tokens))
                held = slice(begin, begin + entries * group.record_bytes)
                assert np.array_equal(sent[0, held], kept[0, held]), "decode reads what was handed on, where it lies"
