"""The adapter to deepseek-recipe: requests to tokens, tokens to neutral deltas. The only module that imports it.

It has the encodings of V4 and V4.1, and reads the requests of every dialect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import deepseek_recipe as recipe

from fabric.errors import InvalidArgument, NotFound, StartError
from services.recipe import faults, options
from services.recipe.deltas import Delta, Kind, call_id
from services.recipe.dialect import Ending, Rendered, TokenLogprobs
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.plain import PlainDialect
from services.recipe.reasoning import Marks, ReasoningCount
from services.recipe.text import TextParser

_Chunk = recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent

_Encoding = type[recipe.DeepseekV4Encoding] | type[recipe.DeepseekV41Encoding]
_ENCODINGS: dict[str, tuple[_Encoding, recipe.ModelVersion]] = {
    "v4": (recipe.DeepseekV4Encoding, recipe.ModelVersion.DeepseekV4Pro),
    "v4.1": (recipe.DeepseekV41Encoding, recipe.ModelVersion.DeepseekV41Flash),
}
_STAGES = {
    "reasoning_start": recipe.ThinkingInitialStage.ReasoningStart,
    "reasoning_continuation": recipe.ThinkingInitialStage.ReasoningContinuation,
    "content_continuation": recipe.ThinkingInitialStage.ContentContinuation,
}
# Calls in the `auto` choice need no enforcement: the parser finds them wherever they come.
_FREE_CONSTRAINTS = frozenset({"tool_call"})


DIALECT = "v4"
# What tells the encodings apart: V4 does without it.
_ONLY_V41 = recipe.SpecialToken.System
_BOTH = (
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.ThinkingEnd,
    recipe.SpecialToken.Dsml,
)
_MODEL_TYPES = ("deepseek_v4", "deepseek_v41")


def missing_tokens(files: ModelFiles) -> list[str]:
    """Control tokens of the encodings that a vocabulary lacks."""
    return [token.default_str() for token in _BOTH if token.default_str() not in files.control.ids]


def encoding_of(files: ModelFiles) -> str:
    """The encoding that fits a vocabulary best.

    Raises:
        StartError: none does; names the file and the fix.
    """
    if missing := missing_tokens(files):
        raise StartError(
            f"{files.tokenizer_path} has no token {missing[0]!r}",
            field="dialect",
            fix="choose --dialect auto, or use the tokenizer of a model with V4's encoding",
        )
    return detect_encoding(files) or "v4"


def detect_encoding(files: ModelFiles) -> str:
    """Which encoding a model folder was made for; empty if for none."""
    if missing_tokens(files):
        return ""
    if _ONLY_V41.default_str() in files.control.ids:
        return "v4.1"
    return "v4" if files.model_type in _MODEL_TYPES else ""


def read_request(body: bytes, model: str, conversion: recipe.ConversionOptions) -> recipe.ConversationRequest:
    """An OpenAI Chat Completions request to `model`, checked.

    Raises:
        InvalidArgument: the request is not one; names the field.
        NotFound: it names another model.
    """
    try:
        request = recipe.ChatCompletionRequest(body)
        if request.model != model:
            raise NotFound(f"this recipe renders for {model!r} only", field="model", fix="see ListModels")
        return request.convert(conversion)
    except (recipe.ConversionError, ValueError) as error:
        raise faults.explain(str(error), body) from error


def conversion_for(model: str, encoding: str = "v4") -> recipe.ConversionOptions:
    """How requests to `model` are read. The checks are the same for every encoding."""
    return recipe.ConversionOptions().with_model_versions_by_name({model: _ENCODINGS[encoding][1]})


def finished(
    converted: recipe.ConversationRequest, token_ids: list[int], parsing: ParsingOptions, context_tokens: int
) -> Rendered:
    """A rendered request with its output length and constraint.

    Raises:
        InvalidArgument: it asks for more output than fits.
    """
    try:
        max_tokens = converted.resolve_max_tokens(len(token_ids), context_tokens)
    except recipe.ConversionError as error:
        raise InvalidArgument(
            f"the prompt has {len(token_ids)} tokens of a context of {context_tokens}: "
            f"max_tokens must be at most {context_tokens - len(token_ids)}",
            field="max_tokens",
            fix="ask for fewer tokens or shorten the messages",
        ) from error
    constraint = converted.inference_options.output_constraint
    bound = constraint is not None and constraint.kind not in _FREE_CONSTRAINTS
    return Rendered(
        token_ids,
        options.dump(parsing),
        constraint.kind if constraint is not None and bound else "",
        constraint.schema if constraint is not None and bound else "",
        max_tokens,
        parsing.stage.startswith("reasoning"),
    )


class Codec(PlainDialect):
    """V4's dialect: one model's encoding with its tokenizer."""

    chats = True

    def __init__(self, model: str, files: ModelFiles, encoding: str) -> None:
        """Raises StartError where the tokenizer lacks what the encoding needs; names the file and the fix."""
        super().__init__(model, files)
        make, version = _ENCODINGS[encoding]
        self.encoding = encoding
        self._version = version
        self._tokenizer = _tokenizer(files)
        self._renderer = make()
        self._encoder = make().with_tokenizer(self._tokenizer)
        self._conversion = conversion_for(model, encoding)
        self._marks = Marks(
            eos=files.eos_token_ids | {self._special(recipe.SpecialToken.Eos)},
            reasoning_end=self._special(recipe.SpecialToken.ThinkingEnd),
            call=self._special(recipe.SpecialToken.Dsml),
        )
        structure = (recipe.SpecialToken.ThinkingStart, recipe.SpecialToken.ThinkingEnd)
        spellings = map(files.spelled, sorted(self._marks.eos))
        self.silent = (*filter(None, spellings), *(token.default_str() for token in structure))

    def render_chat(self, body: bytes) -> Rendered:
        """Renders one OpenAI Chat Completions request.

        Raises:
            InvalidArgument: the request is not one, or does not fit the context; names the field.
            NotFound: it names another model.
        """
        converted = read_request(body, self.model, self._conversion)
        self._refuse_overlong(len(self._renderer.render_conversation(converted.conversation).prompt), "messages")
        token_ids = self._encoder.encode(converted.conversation)
        self._room(len(token_ids), "messages")
        return finished(converted, token_ids, _pack_options(converted.parsing_options), self.max_context_tokens)

    def chat_parser(self, parsing: ParsingOptions, request_id: str) -> TokenParser:
        """A parser for the answer to one rendered conversation."""
        return TokenParser(self._tokenizer, self._version, parsing, request_id, self._marks)

    def text_parser(self) -> TextParser:
        """A parser for the continuation of a plain prompt."""
        return TextParser(self._files.full, self._marks.eos)

    def _special(self, token: recipe.SpecialToken) -> int:
        ids = self._tokenizer.encode(token.default_str())
        if len(ids) != 1:
            raise StartError(
                f"{self._files.tokenizer_path} has no token {token.default_str()!r}",
                field="model",
                fix=f"use the tokenizer of a model with the {self.encoding} encoding, or choose another encoding",
            )
        return ids[0]


class TokenParser:
    """Reads the tokens of one answer. Single use: `push` any number of times, then `finish`."""

    def __init__(
        self,
        tokenizer: recipe.Tokenizer,
        version: recipe.ModelVersion,
        parsing: ParsingOptions,
        request_id: str,
        marks: Marks,
    ) -> None:
        # The generator shapes chunks by thinking mode alone; the conversation itself plays no part in parsing.
        shape = recipe.ConversationRequest(recipe.Conversation(thinking_mode=parsing.thinking), version)
        generator = recipe.ChatCompletionRequest.chunk_generator(shape, request_id, "")
        self._processor = recipe.StreamProcessor(generator, _unpack_options(parsing), tokenizer)
        self._last: _Chunk | None = None
        self._request_id = request_id
        self._marks = marks
        self._reasoning = ReasoningCount(marks, parsing)

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> list[Delta]:
        """Deltas that these tokens complete; text waits until it is whole UTF-8. End-of-sequence tokens say nothing.

        Raises:
            InvalidArgument: as many logprobs as tokens are needed, or none.
        """
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise InvalidArgument(
                f"{len(logprobs)} logprobs for {len(token_ids)} tokens", field="logprobs", fix="send one per token"
            )
        kept = [index for index, token in enumerate(token_ids) if token not in self._marks.eos]
        if not kept:
            return []
        spoken = [token_ids[index] for index in kept]
        self._reasoning.push(spoken)
        chunk = recipe.InferenceChunk.tokens(spoken, None if logprobs is None else [logprobs[i] for i in kept])
        return self._read(self._advance(chunk))

    def finish(self) -> Ending:
        """Ends the input. A half-received character is dropped."""
        chunks = self._advance(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
        if self._last is None:
            raise RuntimeError("deepseek-recipe ended without a final chunk: pin the version in pyproject.toml")
        called = json.loads(self._last.to_json())["choices"][0]["finish_reason"] == "tool_calls"
        return Ending(self._read(chunks), called, self._reasoning.total(called))

    def _advance(self, chunk: recipe.InferenceChunk) -> list[_Chunk]:
        if self._last is not None:
            return []
        chunks = self._processor.push(chunk)
        self._last = chunks[-1] if self._processor.finished else None
        return chunks

    def _read(self, chunks: Sequence[_Chunk]) -> list[Delta]:
        deltas: list[Delta] = []
        for chunk in chunks:
            choice = json.loads(chunk.to_json())["choices"][0]
            deltas += self._deltas(choice["delta"], choice["logprobs"] or {})
        return deltas

    def _deltas(self, delta: dict[str, object], logprobs: dict[str, list[dict[str, object]]]) -> list[Delta]:
        found: list[Delta] = []
        if reasoning := delta.get("reasoning_content"):
            found.append(Delta(Kind.REASONING, str(reasoning), tuple(logprobs.get("reasoning_content") or ())))
        if content := delta.get("content"):
            found.append(Delta(Kind.CONTENT, str(content), tuple(logprobs.get("content") or ())))
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            found += [self._call(call) for call in calls]
        return found

    def _call(self, call: dict[str, object]) -> Delta:
        index, function = call["index"], call["function"]
        if not isinstance(index, int) or not isinstance(function, dict):
            raise TypeError("deepseek-recipe changed the form of a tool call: pin the version in pyproject.toml")
        own_id = call_id(self._request_id, index) if call.get("id") else ""  # the library draws ids at random
        return Delta(Kind.TOOL_CALL, function.get("arguments") or "", (), index, own_id, function.get("name") or "")


def _tokenizer(files: ModelFiles) -> recipe.Tokenizer:
    try:
        return recipe.Tokenizer.from_str(files.tokenizer_json)
    except (ValueError, RuntimeError) as error:
        raise StartError(
            f"{files.tokenizer_path} is not a tokenizer that deepseek-recipe reads",
            field="model",
            fix="download the file again",
        ) from error


def _pack_options(parsing: recipe.ParsingOptions) -> ParsingOptions:
    stage = next((name for name, value in _STAGES.items() if value == parsing.thinking_initial_stage), "")
    return ParsingOptions(
        stage=stage,
        tools=parsing.parse_tool_calls,
        starts_in_tools=parsing.starts_in_tool_calls,
        json_output=parsing.parse_json_output,
    )


def _unpack_options(parsing: ParsingOptions) -> recipe.ParsingOptions:
    # Stop strings stay with StopTrim: the library ends at them by itself, and in content only.
    return recipe.ParsingOptions(
        parse_tool_calls=parsing.tools,
        starts_in_tool_calls=parsing.starts_in_tools,
        parse_json_output=parsing.json_output,
        thinking_initial_stage=_STAGES.get(parsing.stage),
    )
