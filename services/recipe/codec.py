"""The adapter to deepseek-recipe: requests to tokens, tokens to neutral deltas. The only module that imports it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe
from blake3 import blake3

from fabric.errors import InvalidArgument, NotFound, StartError
from services.recipe import faults, options
from services.recipe.deltas import Delta, Kind
from services.recipe.model_files import ModelFiles
from services.recipe.options import ParsingOptions
from services.recipe.reasoning import Marks, ReasoningCount
from services.recipe.text import TextParser

_Chunk = recipe.ChatCompletionChunk | recipe.ResponsesStreamEvent | recipe.MessagesStreamEvent
TokenLogprobs = Sequence[tuple[float, Sequence[tuple[int, float]]]]

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


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt ready for the engine, and what Parse must know of it."""

    token_ids: list[int]
    parsing_options: bytes
    constraint_kind: str
    constraint: str
    default_max_tokens: int
    thinking: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """How the parser ended: its last deltas, whether the model called tools, and how long it reasoned."""

    deltas: list[Delta]
    called_tools: bool
    reasoning_tokens: int


class Codec:
    """One model's encoding with its tokenizer. Holds no request; safe to use from several threads.

    `silent` are the spellings of control tokens that its parsers may show as no text.
    """

    def __init__(self, model: str, model_dir: Path, encoding: str) -> None:
        """Loads `tokenizer.json` and `config.json` of `model_dir`.

        Raises:
            StartError: a file is missing or unreadable, or lacks what the encoding needs; names the file and the fix.
        """
        make, version = _ENCODINGS[encoding]
        files = ModelFiles.read(model_dir)
        self.model, self.encoding = model, encoding
        self.max_context_tokens, self.vocab_size = files.max_context_tokens, files.vocab_size
        self._files = files
        self._version = version
        self._tokenizer = _tokenizer(files)
        self._renderer = make()
        self._encoder = make().with_tokenizer(self._tokenizer)
        self._conversion = recipe.ConversionOptions().with_model_versions_by_name({model: version})
        self._marks = Marks(
            eos=files.eos_token_ids | {self._special(recipe.SpecialToken.Eos)},
            reasoning_end=self._special(recipe.SpecialToken.ThinkingEnd),
            call=self._special(recipe.SpecialToken.Dsml),
        )
        structure = (recipe.SpecialToken.ThinkingStart, recipe.SpecialToken.ThinkingEnd)
        spellings = (files.full.decode([token], skip_special_tokens=False) for token in sorted(self._marks.eos))
        self.silent = (*filter(None, spellings), *(token.default_str() for token in structure))

    def render_chat(self, body: bytes) -> Rendered:
        """Renders one OpenAI Chat Completions request.

        Raises:
            InvalidArgument: the request is not one, or does not fit the context; names the field.
            NotFound: it names another model.
        """
        try:
            request = recipe.ChatCompletionRequest(body)
            if request.model != self.model:
                raise NotFound(f"this recipe renders for {self.model!r} only", field="model", fix="see ListModels")
            converted = request.convert(self._conversion)
        except (recipe.ConversionError, ValueError) as error:
            raise faults.explain(str(error), body) from error
        self._refuse_overlong(self._renderer.render_conversation(converted.conversation).prompt, "messages")
        token_ids = self._encoder.encode(converted.conversation)
        return self._rendered(converted, token_ids)

    def render_text(self, text: str) -> Rendered:
        """Encodes plain text as it is: nothing in it becomes a control token and none is added.

        Raises:
            InvalidArgument: the text is empty or does not fit the context.
        """
        if not text:
            raise InvalidArgument("the prompt is empty", field="text", fix="send at least one character")
        self._refuse_overlong(text, "text")
        token_ids = self._files.plain.encode(text, add_special_tokens=False).ids
        room = self._room(len(token_ids), "text")
        return Rendered(token_ids, options.dump(ParsingOptions()), "", "", room, False)

    def chat_parser(self, parsing: ParsingOptions, request_id: str) -> TokenParser:
        """A parser for the answer to one rendered conversation."""
        return TokenParser(self._tokenizer, self._version, parsing, request_id, self._marks)

    def text_parser(self) -> TextParser:
        """A parser for the continuation of a plain prompt."""
        return TextParser(self._files.full, self._marks.eos)

    def _rendered(self, converted: recipe.ConversationRequest, token_ids: list[int]) -> Rendered:
        parsing = _pack_options(converted.parsing_options)
        self._room(len(token_ids), "messages")
        try:
            max_tokens = converted.resolve_max_tokens(len(token_ids), self.max_context_tokens)
        except recipe.ConversionError as error:
            raise InvalidArgument(
                f"the prompt has {len(token_ids)} tokens of a context of {self.max_context_tokens}: "
                f"max_tokens must be at most {self.max_context_tokens - len(token_ids)}",
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

    def _refuse_overlong(self, text: str, field: str) -> None:
        # A token stands for a bounded number of characters: what cannot fit is refused before it costs an encoding.
        if len(text) > self.max_context_tokens * self._files.longest_token_chars:
            raise self._too_long(f"more than {self.max_context_tokens} tokens", field)

    def _room(self, prompt_tokens: int, field: str) -> int:
        if prompt_tokens >= self.max_context_tokens:
            raise self._too_long(f"{prompt_tokens} tokens", field)
        return self.max_context_tokens - prompt_tokens

    def _too_long(self, size: str, field: str) -> InvalidArgument:
        return InvalidArgument(
            f"the prompt has {size}, the context of {self.model!r} holds {self.max_context_tokens} with the answer",
            field=field,
            fix="shorten the prompt",
        )

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
        # The library draws ids at random; ours follow from the request, so that a retried Parse gives the same ones.
        call_id = self._call_id(index) if call.get("id") else ""
        return Delta(Kind.TOOL_CALL, function.get("arguments") or "", (), index, call_id, function.get("name") or "")

    def _call_id(self, index: int) -> str:
        return f"call_{index:02d}_{blake3(f'{self._request_id}/{index}'.encode()).hexdigest()[:24]}"


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
