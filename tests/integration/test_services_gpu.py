"""Services as processes on a GPU: gateway, recipe, prefill and decode answer with the tokens of an engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch

from cli import ports
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support import procs
from tests.support.driving import whole
from tests.support.stack import pack_sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"
NANO = Path(__file__).parents[2] / "models" / "nano"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (5, 127, 300)  # a tail alone, a block less one, blocks and a tail
TEXT = "What is 17 + 25?"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The gateway's address. Workers copy KV over TCP: which lane carries it is tested elsewhere."""
    logs, services = tmp_path_factory.mktemp("stack"), ("recipe", "prefill", "decode", "gateway")
    at = {name: f"127.0.0.1:{ports.free()}" for name in services}
    listed = ",".join(f"{name}={address}" for name, address in at.items() if name != "gateway")
    shared = {name: ("--listen", address, "--discovery", f"static://{listed}") for name, address in at.items()}
    worker = ("--model", str(NANO), "--device", DEVICE, "--transport", "tcp://127.0.0.1:0", "--no-kvstore")
    with ExitStack() as running:
        for name, more in (
            ("recipe", ("--model", str(NANO))),
            ("prefill", worker),
            ("decode", worker),
            ("gateway", ("--http", "127.0.0.1:0")),
        ):
            running.enter_context(procs.service(name, logs, *shared[name], *more))
        yield at["gateway"]


@pytest.fixture(scope="module")
def alone() -> Engine:
    """An engine like the workers' own, in this process."""
    dtype = "float32" if DEVICE == "cpu" else "bfloat16"
    return Engine.open(EngineConfig(NANO, dtype, device=DEVICE, num_blocks=64))


def ask(address: str, **prompt: object) -> list[int]:
    request = gateway_pb2.GatewayServiceGenerateRequest(model=NANO.name, sampling=pack_sampling(GREEDY), **prompt)
    with grpc.insecure_channel(address) as channel:
        replies = list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=60, wait_for_ready=True))
    assert replies[-1].HasField("finish")
    return [token for reply in replies for token in reply.token_ids]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_an_engine_alone(length: int, stack: str, alone: Engine) -> None:
    prompt = tuple(3 + (11 * place) % 431 for place in range(length))
    found = ask(stack, token_ids=gateway_pb2.TokenIds(ids=prompt))
    assert found == whole(alone, prompt, GREEDY, cache=False)


def test_text_goes_through_the_recipe(stack: str) -> None:
    assert len(ask(stack, text=TEXT)) == GREEDY.max_tokens
