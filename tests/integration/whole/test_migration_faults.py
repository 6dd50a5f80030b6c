"""The real stack: an answer that moved is the answer that one undisturbed process gives (promises 10 and 17)."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.sampling.params import SamplingParams
from fabric import failpoints
from tests.support.engines import stats_of
from tests.support.oracle import Oracle
from tests.support.promises import Recorder
from tests.support.wholestack import WholeStack, whole_stack

V41 = Path(__file__).parents[2] / "data" / "v41" / "tiny-q"
PROMPT = [3 + (7 * index) % 250 for index in range(200)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=24, ignore_eos=True)
PENALISED = replace(SEEDED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=20)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])


@pytest.mark.promise(10)
@SAMPLINGS
async def test_an_answer_that_moves_equals_an_undisturbed_one(
    model: Path, oracle: Oracle, sampling: SamplingParams, promise: Recorder
) -> None:
    """One failure at each kind of line, early, late and twice in one answer."""
    expected = await asyncio.to_thread(oracle.answer, PROMPT, sampling)
    specs = [
        *(f"decode.token=error@{nth}" for nth in (1, 2, 13, 23)),
        "decode.token=error:data_loss@5,decode.verified=error:data_loss@2",
        "decode.token=error:stale_ticket@9,prefill.pushed=error@2",
        "decode.verified=error:data_loss@1",
        "prefill.chunk=error@2",
    ]
    wanted = replace(sampling, logprobs=0)
    async with whole_stack(model) as stack:
        undisturbed = await stack.ask(PROMPT, wanted)
        assert undisturbed.tokens == expected
        for spec in specs:
            with failpoints.armed(spec):
                answer = await stack.ask(PROMPT, wanted)
            assert answer.tokens == expected, spec
            assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-4), spec
            assert answer.finish is not None
            usage = answer.finish.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(expected)), spec
            assert usage.cached_tokens <= usage.prompt_tokens
            await stack.until_idle(10.0)
    promise(10, f"engines: of {len(specs)} kinds of failure, answers as one undisturbed process", len(specs), exactly=8)


async def finished(stack: WholeStack) -> int:
    """Requests that decode workers of this process brought to their end, the warm-up included."""
    decodes = [servicer for name, servicer in stack.workers.items() if name.startswith("decode")]
    return sum([(await stats_of(servicer)).finished for servicer in decodes])


@pytest.mark.promise(10)
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_kill_9_or_freezing_of_a_decode_process_changes_no_token(
    model: Path, oracle: Oracle, tmp_path: Path, how: str, promise: Recorder
) -> None:
    """Two streams on one process that dies or stands still; the other decode comes while they run."""
    samplings = [replace(sampling, max_tokens=600) for sampling in (GREEDY, SEEDED)]
    expected = [await asyncio.to_thread(oracle.answer, PROMPT, sampling) for sampling in samplings]
    async with whole_stack(model, decodes=0, transport="ucx://") as stack:
        async with stack.decode_process(tmp_path, "--failpoints", "decode.token=delay:0.05") as child:
            await stack.until_decodes(1)
            asking = [asyncio.create_task(stack.ask(PROMPT, sampling)) for sampling in samplings]
            await stack.start_decode()
            await stack.until_decodes(2)
            assert not any(task.done() for task in asking)
            before = await finished(stack)
            await asyncio.to_thread(getattr(child, how))
            answers = await asyncio.gather(*asking)
        for answer, tokens in zip(answers, expected, strict=True):
            assert answer.tokens == tokens
            assert answer.finish is not None and answer.finish.usage.completion_tokens == len(tokens)
        assert await finished(stack) == before + len(answers), "an answer did not end on the spare"
        await stack.until_idle(10.0)
    promise(10, f"decode process, {how}: a greedy and a seeded stream as undisturbed", len(answers), exactly=2)


async def test_where_decode_replays_windows_a_moved_answer_is_whole(tmp_path: Path) -> None:
    """Replay is approximate, so what follows a move has no truth to be compared with: it must follow, and end."""
    folder = Path(await asyncio.to_thread(shutil.copytree, V41, tmp_path / "tiny"))
    config = json.loads((V41 / "config.json").read_text()) | {"serving": {"handoff_replay": True}}
    (folder / "config.json").write_text(json.dumps(config))
    async with whole_stack(folder) as stack:
        for sampling in (GREEDY, SEEDED):
            for nth in (1, 2, 4):
                with failpoints.armed(f"decode.token=error@{nth}"):
                    answer = await stack.ask(PROMPT, sampling)
                    assert failpoints.hits("decode.token") > nth
                assert len(answer.tokens) == sampling.max_tokens and answer.finish is not None
        await stack.until_idle(10.0)
