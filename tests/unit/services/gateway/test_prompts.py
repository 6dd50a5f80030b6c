"""Prompts and accounts: what fits, what adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import Internal, InvalidArgument
from protos.deepinfer.v1 import common_pb2, gateway_pb2, recipe_pb2
from services.gateway import intake, prompts, sampling
from services.gateway.intake import Stamp
from services.gateway.job import Job, ModelLimits
from services.gateway.ledger import Ledger
from services.gateway.tenants import Tenant

LIMITS = ModelLimits(100, 120, vocab_size=50, eos_token_ids=frozenset({2}))
JOB = Job("r", "m", b"s", recipe_pb2.DIALECT_TEXT, SamplingParams(), None, "token_ids", token_ids=(1,))
STAMP = Stamp("id", Tenant("ann", b"salt"), 1)


def test_the_default_length_is_what_the_model_has_room_for() -> None:
    assert prompts.bounded(JOB, LIMITS, [3] * 90, b"", 500, 1).sampling.max_tokens == 30
    assert prompts.bounded(JOB, LIMITS, [3] * 90, b"", 7, 1).sampling.max_tokens == 7


def test_a_seed_is_minted_once_and_kept_where_given() -> None:
    assert prompts.bounded(JOB, LIMITS, [3], b"", 5, 99).sampling.seed == 99
    asked = replace(JOB, sampling=SamplingParams(seed=4))
    assert prompts.bounded(asked, LIMITS, [3], b"", 5, 99).sampling.seed == 4


@pytest.mark.parametrize(
    ("job", "tokens", "field"),
    [
        (JOB, [], "token_ids"),
        (JOB, [3] * 101, "token_ids"),
        (JOB, [50], "token_ids"),
        (replace(JOB, max_tokens=21), [3] * 100, "max_tokens"),
        (replace(JOB, sampling=SamplingParams(min_tokens=30)), [3] * 100, "min_tokens"),
        (replace(JOB, sampling=SamplingParams(stop_token_ids=(50,))), [3], "stop_token_ids"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(job: Job, tokens: list[int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompts.bounded(job, LIMITS, tokens, b"", 5, 1)
    assert caught.value.field == field


def test_absurd_lengths_are_refused_before_rendering() -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompts.refuse_early(replace(JOB, max_tokens=120), LIMITS)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        (SamplingParams(), 2, common_pb2.FINISH_REASON_STOP),
        (SamplingParams(ignore_eos=True), 2, None),
        (SamplingParams(min_tokens=2), 2, None),
        (SamplingParams(stop_token_ids=(9,)), 9, common_pb2.FINISH_REASON_STOP),
        (SamplingParams(max_tokens=1), 5, common_pb2.FINISH_REASON_LENGTH),
        (SamplingParams(max_tokens=1, stop=("x",)), 5, None),
        (SamplingParams(), 5, None),
    ],
)
def test_a_first_token_that_ends_the_answer_is_known(params: SamplingParams, token: int, reason: int | None) -> None:
    prompt = prompts.bounded(
        replace(JOB, sampling=params, max_tokens=params.max_tokens if params.max_tokens == 1 else None),
        LIMITS,
        [3],
        b"",
        50,
        1,
    )
    assert prompts.finish_of(prompt, token, 1) == reason


def test_tokens_must_arrive_densely() -> None:
    ledger = Ledger(10)
    ledger.take(0, 2)
    for index in (1, 3):
        with pytest.raises(Internal):
            ledger.take(index, 1)
    ledger.take(2, 1)
    assert ledger.close(3).completion_tokens == 3
    with pytest.raises(Internal):
        ledger.close(4)


def test_cached_tokens_never_exceed_the_prompt() -> None:
    ledger = Ledger(10)
    ledger.prefilled(10)
    assert ledger.close(0).cached_tokens == 10
    with pytest.raises(Internal):
        ledger.prefilled(11)


def test_sampling_survives_protobuf() -> None:
    params = SamplingParams(0.5, 0.25, 3, 0.125, 1.5, 0.5, -0.5, 7, ("a",), (4,), 2, 1, 9, 1, True)
    assert sampling.unpack(sampling.pack(params), 1) == params


def chat(**fields: Any) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(model="m", messages=[gateway_pb2.ChatMessage(role="user", content="x")], **fields)


def test_a_grpc_chat_passes_through_the_same_checks() -> None:
    job = intake.chat_from_message(chat(sampling=common_pb2.SamplingParams(max_tokens=5, temperature=0)), STAMP)
    assert (job.max_tokens, job.sampling.temperature, job.stream) == (5, 0.0, True)
    with pytest.raises(InvalidArgument) as caught:
        intake.chat_from_message(chat(tools=[gateway_pb2.Tool(name="a b")]), STAMP)
    assert caught.value.field == "tools[0].name"


def test_fewest_tokens_need_no_most_tokens() -> None:
    job = intake.chat_from_message(chat(sampling=common_pb2.SamplingParams(min_tokens=5)), STAMP)
    assert (job.max_tokens, job.sampling.min_tokens) == (None, 5)


@pytest.mark.parametrize("sampling", [{"max_tokens": 120}, {"max_tokens": 30}, {"stop_token_ids": [50]}])
def test_what_only_the_model_can_refuse_is_named_as_each_surface_calls_it(sampling: dict[str, Any]) -> None:
    grpc = intake.chat_from_message(chat(sampling=common_pb2.SamplingParams(**sampling)), STAMP)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **sampling}
    http = intake.chat_from_body(json.dumps(body).encode(), STAMP)
    for job, field in ((grpc, f"sampling.{next(iter(sampling))}"), (http, next(iter(sampling)))):
        with pytest.raises(InvalidArgument) as caught:
            prompts.refuse_early(job, LIMITS)
            prompts.bounded(job, LIMITS, [3] * 100, b"", 5, 1)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (chat(sampling=common_pb2.SamplingParams(temperature=float("nan"))), "sampling.temperature"),
        (chat(sampling=common_pb2.SamplingParams(stop=["a"] * 17)), "sampling.stop"),
        (chat(sampling=common_pb2.SamplingParams(max_tokens=2**31)), "sampling.max_tokens"),
        (chat(sampling=common_pb2.SamplingParams(logprobs=21)), "sampling.logprobs"),
        (chat(sampling=common_pb2.SamplingParams(min_tokens=6, max_tokens=5)), "sampling.min_tokens"),
        (chat(tools=[gateway_pb2.Tool(name="f", parameters_json="{")]), "tools[0].parameters_json"),
        (chat(tools=[gateway_pb2.Tool(name="f", parameters_json="[]")]), "tools[0].parameters_json"),
        (chat(tools=[gateway_pb2.Tool(name="f", parameters_json='{"a": NaN}')]), "tools[0].parameters_json"),
        (chat(tool_choice="no such thing!"), "tool_choice"),
        (gateway_pb2.ChatRequest(model="m"), "messages"),
    ],
)
def test_a_bad_grpc_chat_names_its_field(request_: gateway_pb2.ChatRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        intake.chat_from_message(request_, STAMP)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (gateway_pb2.GatewayServiceGenerateRequest(model="m"), "prompt"),
        (gateway_pb2.GatewayServiceGenerateRequest(text="x"), "model"),
        (
            gateway_pb2.GatewayServiceGenerateRequest(
                model="m", text="x", sampling=common_pb2.SamplingParams(top_p=float("inf"))
            ),
            "sampling.top_p",
        ),
    ],
)
def test_a_bad_generate_names_its_field(request_: gateway_pb2.GatewayServiceGenerateRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        intake.generate_from_message(request_, STAMP)
    assert caught.value.field == field
