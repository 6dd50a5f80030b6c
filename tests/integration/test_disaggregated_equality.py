"""Promise 1: what prefill and decode answer together is, token for token, what one process answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.families.mla import tiny as mla_tiny
from engine.families.v4 import tiny as v4_tiny
from tests.support.oracle import Case, Oracle, cases
from tests.support.promises import Recorder
from tests.support.stack import Stack, worker_stack

V41 = Path(__file__).parents[1] / "data" / "v41" / "tiny-q"  # fake-quantization off: one FP4 flip moves a selection
VOCABULARY = int(v4_tiny.TINY["vocab_size"])


@pytest.fixture(scope="module", params=["v4", "v41", "v3", "v32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V4 and V4.1 have window groups, both exact here, and need anchors; V3 and V3.2 have neither."""
    if request.param == "v41":
        config = json.loads((V41 / "config.json").read_text())
        assert config["text_config"]["vocab_size"] == VOCABULARY
        folder = Path(shutil.copytree(V41, tmp_path_factory.mktemp("v41") / "tiny-q"))
        exact = json.dumps(config | {"serving": {"encoder_replay": False}})
        (folder / "config.json").write_text(exact, encoding="utf-8")
        return folder
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "v4":
        return v4_tiny.write_tiny(folder)
    assert mla_tiny.TINY[request.param]["vocab_size"] == VOCABULARY
    return mla_tiny.write_tiny(folder, mla_tiny.TinySpec(request.param))


async def _compare(stack: Stack, oracle: Oracle, batch: Sequence[Case], use_cache: bool) -> int:
    """Runs `batch` at once; how many prompt tokens came from caches. Asserts equality of each."""
    answers = await asyncio.gather(*(stack.ask(case.tokens, case.sampling, use_cache=use_cache) for case in batch))
    cached = 0
    for case, answer in zip(batch, answers, strict=True):
        expected = await asyncio.to_thread(oracle.answer, case.tokens, case.sampling)
        assert answer.tokens == expected, f"case {case.number}: {len(case.tokens)} tokens, {case.sampling}"
        assert answer.done is not None and answer.finish is not None
        assert answer.done.usage.cached_tokens <= answer.done.usage.prompt_tokens == len(case.tokens)
        assert answer.finish.completion_tokens == len(expected)
        cached += answer.done.usage.cached_tokens
    return cached


async def _compare_all(stack: Stack, oracle: Oracle, wanted: Sequence[Case]) -> None:
    """Alone and 8 at a time; cold, from the own prefix cache and, with a new prefill, from the kvstore."""
    half = len(wanted) // 2
    for case in wanted[:half]:
        await _compare(stack, oracle, [case], use_cache=True)
    for start in range(half, len(wanted), 8):
        await _compare(stack, oracle, wanted[start : start + 8], use_cache=bool(start // 8 % 2))
    longest = max(wanted[:half], key=lambda case: len(case.tokens))
    assert await _compare(stack, oracle, [longest], use_cache=True) > 0, "the own prefix cache was never used"
    await stack.idle()
    await stack.restart("prefill")
    assert await _compare(stack, oracle, [longest], use_cache=True) > 0, "the kvstore was never used"
    await stack.idle()


@pytest.mark.parametrize("transport", ["inproc://", "ucx://"])
async def test_some_prompts_answer_as_one_process_does(model: Path, transport: str) -> None:
    async with worker_stack(model, transport=transport) as stack:
        await _compare_all(stack, Oracle(model), cases(12, 400, VOCABULARY, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.promise(1)
@pytest.mark.parametrize("chunk_tokens", [128, 2048])
async def test_200_prompts_answer_as_one_process_does(model: Path, chunk_tokens: int, promise: Recorder) -> None:
    """Half of the 200 with short chunks, half with chunks longer than any prompt."""
    half = cases(100, 2000, VOCABULARY, seed=chunk_tokens)
    settings = {"chunk_tokens": chunk_tokens, "kv_memory_mb": 256}
    async with worker_stack(model, prefill=settings, decode={"kv_memory_mb": 256}, store={"memory_mb": 256}) as stack:
        await _compare_all(stack, Oracle(model), half)
    promise(1, f"{model.name.rstrip('0')}, chunks of {chunk_tokens}: prompts answered the same", len(half), exactly=100)
