"""Whoever reads bytes of others refuses what is none of theirs in its own words, and soon (promise 40)."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from fabric.errors import ServiceError
from fabric.kvlink import messages
from fabric.records import Extent
from protos.deepinfer.v1 import gateway_pb2
from services.gateway.body_faults import read_chat
from services.kvstore.nvme.format import PAGE, Stored, pack_head, parse_head
from services.kvstore.records import ROOT, Identity, RecordId, RecordKind
from services.recipe import options
from services.recipe.chat_wire import ChunkWriter, Heading, TokenUsage
from services.recipe.codec import Codec, conversion_for, read_request
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.parse import ChatSession
from services.recipe.trim import StopTrim
from tests.support import bytemodel
from tests.support.damage import damaged
from tests.support.promises import Recorder

EXAMPLES, SLOW_S = 2_000, 1.0
USAGE = TokenUsage(1, 0, 1, 0)
FUNCTION = {
    "name": "add",
    "description": "é",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODY = {
    "model": "bytes",
    "messages": [
        {"role": "system", "content": "you"},
        {"role": "user", "content": [{"type": "text", "text": "<｜User｜>\ud83d\ude00"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto", "stop": ["a", "b"], "temperature": 1e300, "max_tokens": 2**31, "stream": True,
}  # fmt: skip
ANSWER = (
    'why</think>é\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n<｜DSML｜ parameter name="a" string="false">12'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>"
)
RECORD = Stored(
    RecordId(RecordKind.BLOCK, bytes(32)), Identity("rev", "layout"), bytes(512), ROOT, PAGE,
    (Extent("latent", 0, 1, 0, 1000, 7), Extent("index", 0, 1, 1000, PAGE - 1000, 8)), 1000.0,
)  # fmt: skip
REQUEST = gateway_pb2.ChatRequest(model="m", messages=[gateway_pb2.ChatMessage(role="user", content="x")])


@cache
def codec() -> Codec:
    return Codec("bytes", ModelFiles.read(bytemodel.write(Path(mkdtemp()) / "bytes")), "v4.1")


def parse(payload: bytes) -> None:
    """As what a model answered: its tokens are whatever they are."""
    parsing = ParsingOptions(stage="reasoning_start", tools=True)
    writer = ChunkWriter(Heading("r", "bytes", 1, parsing.thinking), include_usage=False)
    chat = ChatSession(codec().chat_parser(parsing, "r"), StopTrim(()), writer)
    for at in range(0, len(payload), 7):
        chat.push(list(payload[at : at + 7]))
    chat.finish("stop", "", USAGE)


READERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "KV message": (messages.unpack, messages.GaveUp("transfer").pack()),
    "record on disk": (lambda payload: parse_head(payload, 1), pack_head(RECORD, 1)),
    "chat over HTTP": (read_chat, json.dumps(BODY, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    "chat at the recipe": (
        lambda payload: read_request(payload, "bytes", conversion_for("bytes")),
        json.dumps(BODY).encode(),
    ),
    "parsing options": (options.load, options.dump(ParsingOptions("reasoning_start", tools=True))),
    "protobuf": (gateway_pb2.ChatRequest.FromString, REQUEST.SerializeToString()),
    "answer of a model": (parse, bytes(token % 256 for token in bytemodel.encode(ANSWER))),
}


@pytest.mark.slow
@pytest.mark.promise(40)
@pytest.mark.parametrize("what", READERS)
def test_bytes_of_others_are_refused_in_our_own_words(what: str, promise: Recorder) -> None:
    read, well = READERS[what]
    runs, foreign, slowest_s = count(), Counter[str](), 0.0

    @seed(40)
    @settings(max_examples=EXAMPLES, database=None)
    @given(damaged(st.sampled_from([well, well[::-1]])))
    def feed(payload: bytes) -> None:
        nonlocal slowest_s
        next(runs)
        began = time.perf_counter()
        try:
            read(payload)
        except (ServiceError, DecodeError):  # gRPC itself answers what is no message
            pass
        except Exception as error:  # what nobody expects is what is looked for
            foreign[type(error).__name__] += 1
            print(payload, repr(error))
        slowest_s = max(slowest_s, time.perf_counter() - began)

    feed()
    print(what, dict(foreign))
    promise(40, f"{what}: hostile examples", next(runs), at_least=EXAMPLES)
    promise(40, f"{what}: exceptions that are no domain error", foreign.total(), exactly=0)
    promise(40, f"{what}: slowest reading", slowest_s, at_most=SLOW_S, unit="s")
