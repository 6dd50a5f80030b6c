"""Between protobuf and the recipe's own values. Knows both forms and no dialect."""

from __future__ import annotations

from collections.abc import Iterable

from protos.deepinfer.v1 import common_pb2, recipe_pb2
from services.recipe.chat_wire import TokenUsage
from services.recipe.deltas import Delta, Kind
from services.recipe.dialect import Rendered, TokenLogprobs
from services.recipe.parse import End, Step

REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "tool_calls": common_pb2.FINISH_REASON_TOOL_CALLS,
}
_NAMES: dict[int, str] = {int(value): name for name, value in REASONS.items()}


def pack_rendered(rendered: Rendered) -> recipe_pb2.RenderResponse:
    return recipe_pb2.RenderResponse(
        token_ids=rendered.token_ids,
        parsing_options=rendered.parsing_options,
        constraint_kind=rendered.constraint_kind,
        constraint=rendered.constraint,
        default_max_tokens=rendered.default_max_tokens,
        thinking=rendered.thinking,
    )


def unpack_logprobs(entries: Iterable[common_pb2.TokenLogprob]) -> TokenLogprobs | None:
    """(logprob, alternatives) per token, or None where there are none."""
    unpacked = [(entry.logprob, [(alt.token_id, alt.logprob) for alt in entry.alternatives]) for entry in entries]
    return unpacked or None


def unpack_reason(reason: int) -> str:
    """Name of a finish reason; what an engine cannot say counts as "stop"."""
    return _NAMES.get(reason, "stop")


def unpack_usage(usage: common_pb2.Usage) -> TokenUsage:
    return TokenUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens)


def pack_step(step: Step) -> recipe_pb2.ParseResponse:
    return recipe_pb2.ParseResponse(events=_events(step))


def pack_end(end: End) -> recipe_pb2.ParseResponse:
    done = recipe_pb2.ParseDone(reason=REASONS[end.reason], reasoning_tokens=end.reasoning_tokens)
    return recipe_pb2.ParseResponse(events=[*_events(end.step), recipe_pb2.ParseEvent(done=done)])


def _events(step: Step) -> list[recipe_pb2.ParseEvent]:
    neutral = [_event(delta) for delta in step.deltas]
    return neutral + [recipe_pb2.ParseEvent(wire=chunk) for chunk in step.wire]


def _event(delta: Delta) -> recipe_pb2.ParseEvent:
    if delta.kind is Kind.REASONING:
        return recipe_pb2.ParseEvent(reasoning=delta.text)
    if delta.kind is Kind.CONTENT:
        return recipe_pb2.ParseEvent(content=delta.text)
    call = recipe_pb2.ToolCallDelta(index=delta.call_index, id=delta.call_id, name=delta.name, arguments=delta.text)
    return recipe_pb2.ParseEvent(tool_call=call)
