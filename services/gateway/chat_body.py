"""The body of a chat completion request as we accept it: every field named, typed and bounded. Knows no model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from engine.sampling.params import (
    MAX_NEW_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from fabric.retention import RetentionClass

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_PARTS = 256

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """Refuses unknown fields, numbers in quotes, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, hide_input_in_errors=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
Content = str | Parts


class FunctionCall(Strict):
    name: FunctionName
    arguments: str


class ToolCall(Strict):
    id: Name
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None  # comes back when a client sends an answer of ours again


class SystemMessage(Strict):
    role: Literal["system", "latest_reminder"]
    content: Content


class UserMessage(Strict):
    role: Literal["user"]
    content: Content


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    prefix: bool = False
    # The official client echoes these, empty, when a program appends an answer to its messages.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    tool_call_id: Name
    content: Content


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: FunctionName
    description: Annotated[str, StringConstraints(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: FunctionName


class NamedChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    include_usage: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled"]


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatBody(Strict):
    """`POST /v1/chat/completions`: OpenAI's fields, DeepSeek's `thinking`, and the extensions that engines share."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    thinking: Thinking | None = None
    reasoning_effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    n: Literal[1] | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_NEW_TOKENS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    retention: Literal["chat", "agent", "default"] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if (self.min_tokens or 0) > (self.output_limit or MAX_NEW_TOKENS):
            raise ValueError("min_tokens exceeds max_tokens")
        return self

    @property
    def output_limit(self) -> int | None:
        """Most output tokens asked for."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def retention_class(self) -> RetentionClass | None:
        """What the prompt's KV was said to be kept for."""
        return RetentionClass(self.retention) if self.retention is not None else None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, default_max_tokens: int) -> SamplingParams:
        """The parameters exactly as asked for: temperature 0 stays greedy in thinking mode, too."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS if getattr(self, name) is not None}
        stop = self.stop or ()
        return SamplingParams(
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=self.output_limit or default_max_tokens,
            **given,
        )


_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
