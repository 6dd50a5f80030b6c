"""Services as processes on a GPU: gateway, recipe, prefill and decode answer with the tokens of an engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from cli import ports
from engine.config import EngineConfig
from engine.engine import Engine
from engine.families.mla.tiny import TinySpec, write_tiny
from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support import bytemodel, procs
from tests.support.driving import whole
from tests.support.stack import pack_sampling

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = "cuda"
NANO = Path(__file__).parents[2] / "models" / "nano"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LENGTHS = (5, 127, 300)  # a tail alone, a block less one, blocks and a tail
TEXT = "What is 17 + 25?"


@dataclass(frozen=True)
class Served:
    """A model, what its caches hold, and its gateway's address."""

    model: Path
    kv_cache: str
    address: str


def write_wide(folder: Path) -> Path:
    """A tiny V3.2 whose caches have the widths of published records, with a tokenizer of bytes."""
    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 128}
    write_tiny(folder, TinySpec("v32", changes=changes))
    built = Tokenizer.from_str(bytemodel.tokenizer().to_str())
    unused = range(512 - built.get_vocab_size())
    built.add_special_tokens([AddedToken(f"<|unused {index}|>", special=True, normalized=False) for index in unused])
    built.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(
    scope="module",
    params=["rows", pytest.param("records", marks=pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU"))],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Nano over rows, V3.2 over records. Workers copy KV over TCP: which lane carries it is tested elsewhere."""
    logs, services = tmp_path_factory.mktemp("stack"), ("recipe", "prefill", "decode", "gateway")
    model = NANO if request.param == "rows" else write_wide(logs / "wide")
    at = {name: f"127.0.0.1:{ports.free()}" for name in services}
    listed = ",".join(f"{name}={address}" for name, address in at.items() if name != "gateway")
    shared = {name: ("--listen", address, "--discovery", f"static://{listed}") for name, address in at.items()}
    worker = ("--model", str(model), "--device", DEVICE, "--transport", "tcp://127.0.0.1:0", "--no-kvstore")
    worker = (*worker, "--kv-cache", request.param)
    with ExitStack() as running:
        for name, more in (
            ("recipe", ("--model", str(model))),
            ("prefill", worker),
            ("decode", worker),
            ("gateway", ("--http", "127.0.0.1:0")),
        ):
            running.enter_context(procs.service(name, logs, *shared[name], *more))
        yield Served(model, request.param, at["gateway"])


@pytest.fixture(scope="module")
def alone(served: Served) -> Engine:
    """An engine like the workers' own, in this process."""
    config = EngineConfig(served.model, "bfloat16", device=DEVICE, num_blocks=64, kv_cache=served.kv_cache)
    return Engine.open(config)


def ask(served: Served, **prompt: object) -> list[int]:
    name, sampling = served.model.name, pack_sampling(GREEDY)
    request = gateway_pb2.GatewayServiceGenerateRequest(model=name, sampling=sampling, **prompt)
    with grpc.insecure_channel(served.address) as channel:
        replies = list(gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, timeout=60, wait_for_ready=True))
    assert replies[-1].HasField("finish")
    return [token for reply in replies for token in reply.token_ids]


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_an_engine_alone(length: int, served: Served, alone: Engine) -> None:
    prompt = tuple(3 + (11 * place) % 431 for place in range(length))
    found = ask(served, token_ids=gateway_pb2.TokenIds(ids=prompt))
    assert found == whole(alone, prompt, GREEDY, cache=False)


def test_text_goes_through_the_recipe(served: Served) -> None:
    assert len(ask(served, text=TEXT)) == GREEDY.max_tokens
