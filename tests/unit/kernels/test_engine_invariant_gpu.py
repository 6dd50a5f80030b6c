"""Batch-invariant mode on a GPU: an answer has the same bits alone, among others, and however its prompt is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import FirstToken, TokensOut
from engine.families.tiny import write
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from kernels.choose import missing_for
from tests.unit.kernels.test_engine_gpu import NANO

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKENDS = [name for name in ("triton", "cuda") if not torch.cuda.is_available() or not missing_for(name, "cuda")]
LENGTHS, NEW = (1, 3, 17, 40, 61, 90, 130), 6


def answers(
    folder: Path, kernels: str, dtype: str, sequences: int, batch_tokens: int, kv_cache: str = "rows"
) -> dict[int, list[tuple[int, float]]]:
    """Tokens and their log probabilities, exactly, of prompts of several lengths; `sequences` run at a time."""
    config = EngineConfig(
        folder, dtype, num_blocks=32, kernels=kernels, device="cuda", max_sequences=sequences,
        max_batch_tokens=batch_tokens, batch_invariant=True, block_tokens=32,
        kv_cache=kv_cache,
    )  # fmt: skip
    engine, draw = Engine.open(config), np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    found: dict[int, list[tuple[int, float]]] = {length: [] for length in LENGTHS}
    for length in LENGTHS:
        prompt = tuple(draw.integers(3, engine.model.vocab_size, length).tolist())
        engine.submit(GenerateRequest(str(length), prompt, params, cache=False))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FirstToken):
                assert event.logprob is not None
                found[int(event.request_id)].append((event.token, event.logprob.logprob))
            elif isinstance(event, TokensOut):
                assert event.logprobs is not None
                pairs = zip(event.token_ids, event.logprobs, strict=True)
                found[int(event.request_id)] += [(token, logprob.logprob) for token, logprob in pairs]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["v3", "v32", "nano"])
@pytest.mark.parametrize("kernels", BACKENDS)
def test_an_answer_has_the_same_bits_alone_among_others_and_in_other_chunks(
    kernels: str, family: str, dtype: str, tmp_path: Path
) -> None:
    folder = NANO if family == "nano" else write(family, tmp_path / "model")
    alone = answers(folder, kernels, dtype, 1, 256)
    assert all(len(tokens) == NEW for tokens in alone.values())
    assert answers(folder, kernels, dtype, 4, 256) == alone
    assert answers(folder, kernels, dtype, 4, 24) == alone
