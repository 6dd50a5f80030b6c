"""Policies for window state through the workers: hits of prefill's own cache and of the kvstore, and who refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families.mla import tiny as mla_tiny
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from fabric.channels import call
from fabric.errors import ServiceError, StartError
from protos.deepinfer.v1 import decode_pb2, prefill_pb2
from services.kvstore.records import RecordKind
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings
from tests.support.driving import run, tokens_of
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack
from tests.support.tiny import random_tokens

V41 = Path(__file__).parents[2] / "data" / "v41" / "tiny-q"
TOKENS = tuple(random_tokens(700, 5, 511))
HIT = 640  # whole blocks of 128 that leave something to compute
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["v4", "v41"])
def folder(request: pytest.FixtureRequest, model: Path) -> Path:
    return model if request.param == "v4" else V41


def policies(window_state: str) -> dict[str, dict[str, object]]:
    """Settings of both workers."""
    return {role: {"window_state": window_state} for role in ("prefill", "decode")}


def replayed(folder: Path) -> list[int]:
    """What one process answers after a hit that it replays."""
    engine = Engine.open(
        EngineConfig(folder, num_blocks=32, num_slots=16, batch_invariant=True, threads=1, window_state="replay")
    )
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for prompt, sampling in ((TOKENS[: HIT + 1], one), (TOKENS, GREEDY)):
        engine.submit(GenerateRequest("r", prompt, sampling))
        answer = tokens_of(run(engine), "r")
    return answer


def stored(stack: Stack) -> dict[object, str]:
    """Digest of every record's bytes, by record."""
    tier = stack.running["kvstore"].servicer.store.tier
    return {
        name: xxhash.xxh3_64_hexdigest(tier.memory[record.offset : record.offset + record.size])
        for name, record in tier._records.items()
    }


@pytest.mark.parametrize("window_state", ["exact", "replay", "recompute"])
async def test_hits_of_the_own_cache_and_of_the_store_answer_as_their_policy_says(
    folder: Path, window_state: str
) -> None:
    cold = Oracle(folder).answer(TOKENS, GREEDY)
    expected = replayed(folder) if window_state == "replay" else cold
    async with worker_stack(folder, transport="ucx://", **policies(window_state)) as stack:
        assert (await stack.ask(TOKENS, GREEDY)).tokens == cold
        await stack.idle()
        records = stored(stack)
        anchors = [name for name in records if name.kind is RecordKind.ANCHOR]
        assert bool(anchors) == (window_state == "exact"), "only exact needs any"
        for whence in ("own cache", "kvstore"):
            if whence == "kvstore":
                await stack.restart("prefill")
            computed = (await stack.stats("prefill")).computed_tokens
            hit = await stack.ask(TOKENS, GREEDY)
            recomputed = stack.engine("prefill").model.layout.replay.tokens
            assert hit.done is not None and hit.done.usage.cached_tokens == HIT - recomputed, whence
            assert hit.tokens == expected, whence
            assert (await stack.stats("prefill")).computed_tokens - computed == len(TOKENS) - HIT + recomputed
            await stack.idle()
        assert {name: stored(stack)[name] for name in records} == records, "what was stored is never written again"
        metrics = stack.running["kvstore"].servicer.store._metrics._metrics.registry
        assert metrics.get_sample_value("deepinfer_kvstore_hits_total") == 1
        assert not metrics.get_sample_value("deepinfer_kvstore_misses_total", {"reason": "no_anchor"})


async def test_prefill_counts_what_is_not_computed_again_as_cached_from_its_first_word_on(folder: Path) -> None:
    async with worker_stack(folder, transport="ucx://", kvstore=False, **policies("replay")) as stack:
        await stack.ask(TOKENS, GREEDY)
        ticket = await stack.reserve("again", TOKENS, len(TOKENS) + 1)
        counts = {}
        async for reply in stack.progress("again", TOKENS, GREEDY, ticket):
            match reply.WhichOneof("progress"):
                case "started":
                    counts["started"] = reply.started.cached_tokens
                case "done":
                    counts["done"] = reply.done.usage.cached_tokens
        recomputed = stack.engine("prefill").model.layout.replay.tokens
        assert recomputed and counts == dict.fromkeys(("started", "done"), HIT - recomputed)
        await stack.release(ticket, decode_pb2.WRITER_STATE_FINISHED)
        await stack.idle()


async def test_another_policy_hits_nothing_of_what_is_stored(model: Path) -> None:
    async with worker_stack(model, **policies("exact")) as stack:
        await stack.ask(TOKENS, GREEDY)
        await stack.idle()
        for window_state in ("recompute", "replay"):
            for role in ("decode", "prefill"):
                start = stack._starts[role]
                settings = start.args[0].model_copy(update={"window_state": window_state})
                await stack.stop(role)
                await stack.start(role, settings, start.args[1])
            answer = await stack.ask(TOKENS, GREEDY)
            assert answer.done is not None and answer.done.usage.cached_tokens == 0
            await stack.idle()


async def test_info_tells_the_policy(model: Path) -> None:
    told = {}
    for window_state in ("exact", "replay", "recompute"):
        async with worker_stack(model, kvstore=False, **policies(window_state)) as stack:
            infos = (
                await call(stack.prefill.Info, prefill_pb2.PrefillServiceInfoRequest()),
                await call(stack.decode.Info, decode_pb2.DecodeServiceInfoRequest()),
            )
            assert infos[0].model.layout == infos[1].model.layout
            replay = infos[0].model.layout.replay
            told[window_state] = (infos[0].model.layout.HasField("replay"), replay.tokens, replay.stacked)
    assert told == {"exact": (False, 0, False), "replay": (True, 16, False), "recompute": (True, 112, True)}


async def test_workers_of_different_policies_do_not_hand_over(model: Path) -> None:
    async with worker_stack(model, kvstore=False, prefill={"window_state": "recompute"}) as stack:
        with pytest.raises(ServiceError, match="layout"):
            await stack.ask(TOKENS, GREEDY)


async def test_a_policy_that_the_model_has_no_use_for_is_a_start_error(tmp_path: Path) -> None:
    folder = mla_tiny.write_tiny(tmp_path / "tiny", mla_tiny.TinySpec("v3"))
    settings = PrefillSettings(model=folder, discovery="memory://x", transport="inproc://", window_state="replay")
    with pytest.raises(StartError) as caught:
        async with prefill_service.build(settings):
            pass
    assert (caught.value.field, caught.value.fix) == ("window_state", "leave it at auto")
