from protos.deepinfer.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dialect(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIALECT_UNSPECIFIED: _ClassVar[Dialect]
    DIALECT_TEXT: _ClassVar[Dialect]
    DIALECT_OPENAI_CHAT: _ClassVar[Dialect]
    DIALECT_OPENAI_RESPONSES: _ClassVar[Dialect]
    DIALECT_ANTHROPIC_MESSAGES: _ClassVar[Dialect]
DIALECT_UNSPECIFIED: Dialect
DIALECT_TEXT: Dialect
DIALECT_OPENAI_CHAT: Dialect
DIALECT_OPENAI_RESPONSES: Dialect
DIALECT_ANTHROPIC_MESSAGES: Dialect

class RecipeServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecipeServiceInfoResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "dialects", "max_request_bytes", "encoding")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DIALECTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    dialects: _containers.RepeatedScalarFieldContainer[Dialect]
    max_request_bytes: int
    encoding: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., dialects: _Optional[_Iterable[_Union[Dialect, str]]] = ..., max_request_bytes: _Optional[int] = ..., encoding: _Optional[str] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("dialect", "body", "text")
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    dialect: Dialect
    body: bytes
    text: str
    def __init__(self, dialect: _Optional[_Union[Dialect, str]] = ..., body: _Optional[bytes] = ..., text: _Optional[str] = ...) -> None: ...

class ImageSlot(_message.Message):
    __slots__ = ("token_offset", "token_count", "source")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    token_count: int
    source: str
    def __init__(self, token_offset: _Optional[int] = ..., token_count: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("token_ids", "images", "parsing_options", "constraint_kind", "constraint", "default_max_tokens", "thinking")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PARSING_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_KIND_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[ImageSlot]
    parsing_options: bytes
    constraint_kind: str
    constraint: str
    default_max_tokens: int
    thinking: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[ImageSlot, _Mapping]]] = ..., parsing_options: _Optional[bytes] = ..., constraint_kind: _Optional[str] = ..., constraint: _Optional[str] = ..., default_max_tokens: _Optional[int] = ..., thinking: _Optional[bool] = ...) -> None: ...

class ParseRequest(_message.Message):
    __slots__ = ("start", "tokens", "finish")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    start: ParseStart
    tokens: ParseTokens
    finish: ParseFinish
    def __init__(self, start: _Optional[_Union[ParseStart, _Mapping]] = ..., tokens: _Optional[_Union[ParseTokens, _Mapping]] = ..., finish: _Optional[_Union[ParseFinish, _Mapping]] = ...) -> None: ...

class ParseStart(_message.Message):
    __slots__ = ("dialect", "parsing_options", "request_id", "model", "prompt_tokens", "cached_tokens", "created", "stream", "include_usage", "stop")
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    PARSING_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    dialect: Dialect
    parsing_options: bytes
    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    created: int
    stream: bool
    include_usage: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, dialect: _Optional[_Union[Dialect, str]] = ..., parsing_options: _Optional[bytes] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., created: _Optional[int] = ..., stream: _Optional[bool] = ..., include_usage: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class ParseTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class ParseFinish(_message.Message):
    __slots__ = ("reason", "stop", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop: str
    usage: _common_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ...) -> None: ...

class ParseResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ParseEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[ParseEvent, _Mapping]]] = ...) -> None: ...

class ParseEvent(_message.Message):
    __slots__ = ("reasoning", "content", "tool_call", "wire", "done")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    content: str
    tool_call: ToolCallDelta
    wire: bytes
    done: ParseDone
    def __init__(self, reasoning: _Optional[str] = ..., content: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallDelta, _Mapping]] = ..., wire: _Optional[bytes] = ..., done: _Optional[_Union[ParseDone, _Mapping]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ParseDone(_message.Message):
    __slots__ = ("reason", "reasoning_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    reasoning_tokens: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...
