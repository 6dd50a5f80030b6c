"""Bounded replay through the workers: prefill pushes entries alone, decode checks that, replays and draws tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from fabric.errors import DataLoss, InvalidArgument, from_rpc
from protos.deepinfer.v1 import common_pb2 as common
from tests.support.driving import replayed
from tests.support.flips import flipped
from tests.support.oracle import Oracle
from tests.support.stack import Stack, worker_stack
from tests.support.tiny import random_tokens

TINY = Path(__file__).parents[2] / "data" / "v41" / "tiny-q"
LONG, SHORT = tuple(random_tokens(700, 5, 511)), tuple(random_tokens(16, 6, 511))  # the window holds 16
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)


def served(folder: Path, *switches: str) -> Path:
    """The tiny model with these switches of its `serving` section."""
    copy = Path(shutil.copytree(TINY, folder / "tiny"))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["serving"] = dict.fromkeys(switches, True)
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served(tmp_path_factory.mktemp("models"), "handoff_replay")


def single(folder: Path) -> Engine:
    return Engine.open(EngineConfig(folder, num_blocks=32, num_slots=16, batch_invariant=True, threads=1))


async def generate(stack: Stack, ticket: common.Ticket, receipt: common.Receipt) -> list[int]:
    """Tokens of a Generate call. Raises ServiceError; fails the test if a token came before it."""
    tokens: list[int] = []
    try:
        async for reply in stack.generate("r", LONG, SAMPLED, ticket, receipt):
            tokens += reply.token_ids
    except grpc.aio.AioRpcError as error:
        assert not tokens, "a token came out of a handoff that failed"
        raise from_rpc(error) from error
    return tokens


@pytest.mark.parametrize("transport", ["inproc://", "ucx://"])
async def test_decode_replays_the_last_window_and_draws_the_first_token(replaying: Path, transport: str) -> None:
    expected = replayed(single(replaying), single(replaying), LONG, SAMPLED)
    async with worker_stack(replaying, transport=transport, kvstore=False) as stack:
        answer = await stack.ask(LONG, SAMPLED, use_cache=False)
        assert answer.done is not None and answer.tokens == expected
        receipt = answer.done.receipt
        assert receipt.WhichOneof("ending") == "replay_from" and receipt.replay_from.position == len(LONG) - 16
        windows = {group.name for group in stack.engine("decode").model.layout.windows}
        assert not windows & {extent.group for extent in receipt.extents[0].extents}, "no window is pushed"
        await stack.idle()


async def test_a_prompt_within_the_window_answers_as_one_process_does(replaying: Path) -> None:
    async with worker_stack(replaying, kvstore=False) as stack:
        assert (await stack.ask(SHORT, SAMPLED)).tokens == Oracle(TINY).answer(SHORT, SAMPLED)
        await stack.idle()


async def test_prompt_logprobs_need_every_row_so_prefill_draws_the_first_token(replaying: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    async with worker_stack(replaying, kvstore=False) as stack:
        answer = await stack.ask(LONG, sampling)
        assert answer.done is not None and answer.done.receipt.HasField("first_token")
        assert len(answer.done.prompt_logprobs) == len(LONG) - 1
        assert answer.tokens == Oracle(TINY).answer(LONG, sampling)
        await stack.idle()


async def test_hits_need_no_anchor_in_the_own_cache_and_from_the_store(replaying: Path) -> None:
    async with worker_stack(replaying) as stack:
        await stack.ask(LONG, SAMPLED)
        hit = await stack.ask(LONG, SAMPLED)
        assert hit.done is not None and hit.done.usage.cached_tokens == 640 - 16
        await stack.idle()
        assert (await stack.stats("prefill")).anchors == 0
        await stack.restart("prefill")
        again = await stack.ask(LONG, SAMPLED)
        assert again.done is not None and again.done.usage.cached_tokens == 640 - 16
        assert again.tokens == hit.tokens, "the same blocks, replayed from the same boundary"
        await stack.idle()


async def handoff(stack: Stack) -> tuple[common.Ticket, common.Receipt]:
    ticket = await stack.reserve("r", LONG, len(LONG) + 12)
    return ticket, (await stack.prefilled("r", LONG, SAMPLED, ticket)).receipt


@pytest.mark.parametrize("position", [0, len(LONG) - 17, len(LONG) - 15, len(LONG)])
async def test_a_replay_from_elsewhere_is_refused(replaying: Path, position: int) -> None:
    async with worker_stack(replaying, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        receipt.replay_from.position = position
        with pytest.raises(InvalidArgument, match="replay") as caught:
            await generate(stack, ticket, receipt)
        assert (caught.value.field, caught.value.fix) == ("receipt.replay_from", f"replay from {len(LONG) - 16}")
        await stack.idle()


async def test_entries_that_are_missing_or_were_changed_are_data_loss(replaying: Path) -> None:
    async with worker_stack(replaying, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        del receipt.extents[0].extents[-1]
        with pytest.raises(DataLoss):
            await generate(stack, ticket, receipt)
        extent = receipt.extents[0].extents[0]
        with flipped(stack, extent.group, extent.block) as flips, pytest.raises(DataLoss):
            await generate(stack, *await handoff(stack))
        assert flips == [1]
        await stack.idle()


async def test_a_first_token_without_its_windows_is_data_loss(replaying: Path) -> None:
    async with worker_stack(replaying, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        receipt.first_token.CopyFrom(common.FirstToken(token_id=5, state=receipt.replay_from.state))
        with pytest.raises(DataLoss):
            await generate(stack, ticket, receipt)
        await stack.idle()


async def test_a_model_that_hands_windows_over_refuses_a_replay() -> None:
    async with worker_stack(TINY, kvstore=False) as stack:
        ticket, receipt = await handoff(stack)
        receipt.replay_from.CopyFrom(common.ReplayFrom(position=len(LONG) - 16, state=receipt.first_token.state))
        with pytest.raises(InvalidArgument, match="replay") as caught:
            await generate(stack, ticket, receipt)
        assert caught.value.fix == "hand the windows over"
        await stack.idle()
