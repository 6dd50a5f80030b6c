"""The recipe's gRPC face: checks sizes, calls the dialect, packs. Knows no protocol's details."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fabric import deadline
from fabric.discovery import MemberInfo
from fabric.errors import InvalidArgument
from fabric.health import Progress
from fabric.lifecycle import new_identity
from fabric.server import Service
from fabric.telemetry import logs
from protos.deepinfer.v1 import recipe_pb2, recipe_pb2_grpc
from services.recipe import options, wire
from services.recipe.chat_wire import BodyWriter, ChunkWriter, Heading
from services.recipe.choice import open_dialect
from services.recipe.crew import Crew
from services.recipe.dialect import Dialect
from services.recipe.parse import ChatSession, Session, TextSession
from services.recipe.settings import RecipeSettings
from services.recipe.trim import StopTrim

_DIALECTS = (recipe_pb2.DIALECT_TEXT, recipe_pb2.DIALECT_OPENAI_CHAT)  # plain text first: every model has it
_MAX_STOPS = 64

_log = logs.get("recipe")

Context = Any  # grpc.aio.ServicerContext


class RecipeServicer(recipe_pb2_grpc.RecipeServiceServicer):
    """Render and Parse for one model. Parse runs on the event loop: a batch of tokens takes microseconds."""

    def __init__(self, dialect: Dialect, crew: Crew, settings: RecipeSettings) -> None:
        self._dialect, self._crew, self._settings = dialect, crew, settings

    async def Info(self, request: recipe_pb2.RecipeServiceInfoRequest, context: Context) -> Any:
        return recipe_pb2.RecipeServiceInfoResponse(
            model=self._dialect.model,
            vocab_size=self._dialect.vocab_size,
            dialects=_DIALECTS if self._dialect.chats else _DIALECTS[:1],
            max_request_bytes=self._settings.max_request_bytes,
            encoding=self._dialect.encoding,
        )

    async def Render(self, request: recipe_pb2.RenderRequest, context: Context) -> recipe_pb2.RenderResponse:
        chat = request.dialect == recipe_pb2.DIALECT_OPENAI_CHAT
        if not chat and request.dialect != recipe_pb2.DIALECT_TEXT:
            raise _unknown_dialect()
        self._check_size(len(request.body) if chat else len(request.text), "body" if chat else "text")
        dialect, body, text = self._dialect, request.body, request.text
        job = (lambda: dialect.render_chat(body)) if chat else (lambda: dialect.render_text(text))
        return wire.pack_rendered(await self._crew.run(job, deadline.remaining_s(context)))

    async def Parse(self, messages: AsyncIterator[recipe_pb2.ParseRequest], context: Context) -> None:
        session = self._open(await anext(messages, recipe_pb2.ParseRequest()))
        async for message in messages:
            match message.WhichOneof("message"):
                case "tokens":
                    await context.write(self._push(session, message.tokens))
                case "finish":
                    await context.write(self._finish(session, message.finish))
                    return
                case _:
                    raise InvalidArgument("a second start", field="message", fix="send tokens, then finish")

    def _open(self, first: recipe_pb2.ParseRequest) -> Session:
        if first.WhichOneof("message") != "start":
            raise InvalidArgument("the stream does not begin with start", field="start", fix="send start first")
        start = first.start
        if len(start.stop) > _MAX_STOPS:
            raise InvalidArgument("too many stop strings", field="start.stop", fix=f"send at most {_MAX_STOPS}")
        trim = StopTrim(start.stop, self._dialect.silent)
        if start.dialect == recipe_pb2.DIALECT_TEXT:
            return TextSession(self._dialect.text_parser(), trim)
        if start.dialect != recipe_pb2.DIALECT_OPENAI_CHAT:
            raise _unknown_dialect()
        parsing = options.load(start.parsing_options)
        heading = Heading(start.request_id, start.model or self._dialect.model, start.created, parsing.thinking)
        writer = ChunkWriter(heading, start.include_usage) if start.stream else BodyWriter(heading)
        return ChatSession(self._dialect.chat_parser(parsing, start.request_id), trim, writer)

    def _push(self, session: Session, tokens: recipe_pb2.ParseTokens) -> recipe_pb2.ParseResponse:
        if len(tokens.token_ids) > self._settings.max_parse_tokens:
            raise InvalidArgument(
                f"{len(tokens.token_ids)} tokens in one message",
                field="tokens.token_ids",
                fix=f"send at most {self._settings.max_parse_tokens} at a time",
            )
        return wire.pack_step(session.push(list(tokens.token_ids), wire.unpack_logprobs(tokens.logprobs)))

    def _finish(self, session: Session, finish: recipe_pb2.ParseFinish) -> recipe_pb2.ParseResponse:
        usage = wire.unpack_usage(finish.usage)
        return wire.pack_end(session.finish(wire.unpack_reason(finish.reason), finish.stop, usage))

    def _check_size(self, size: int, field: str) -> None:
        if size > self._settings.max_request_bytes:
            raise InvalidArgument(
                f"{size} bytes, at most {self._settings.max_request_bytes} are read",
                field=field,
                fix="shorten the request",
            )


def _unknown_dialect() -> InvalidArgument:
    return InvalidArgument("not a dialect this recipe speaks", field="dialect", fix="see Info for those it does")


def check(settings: RecipeSettings) -> None:
    """Raises StartError where the model folder's files are missing, broken, or do not fit the dialect."""
    _close(open_dialect(settings))


def _close(dialect: Dialect) -> None:
    for process in dialect.processes:
        process.close()


@asynccontextmanager
async def build(settings: RecipeSettings) -> AsyncIterator[Service]:
    """The recipe service around one model folder.

    Raises:
        StartError: the folder lacks a tokenizer or configuration, or they do not fit the dialect that was chosen.
    """
    dialect = open_dialect(settings)
    _log.info("dialect", dialect=dialect.encoding, asked=settings.dialect, model=dialect.model, chats=dialect.chats)
    crew = Crew(settings.threads, settings.max_waiting)
    identity = new_identity("recipe", settings.instance)
    try:
        yield Service(
            servicers=[(recipe_pb2_grpc.add_RecipeServiceServicer_to_server, RecipeServicer(dialect, crew, settings))],
            progress=Progress(pending=lambda: crew.pending, steps=lambda: crew.done),
            members=MemberInfo("recipe", identity.instance, "", identity.epoch, model=dialect.model),
        )
    finally:
        crew.close()
        _close(dialect)
