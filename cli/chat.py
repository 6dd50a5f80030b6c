"""`deepinfer chat`: talks to a running stack in the terminal. Starts nothing."""

import asyncio
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape

from cli import runtime
from cli.client import Delta, GatewayClient, Summary
from cli.console import complain, harmless, out
from cli.conversation import Conversation, Turn, read_message
from cli.smoke import footer
from fabric.errors import InvalidArgument, NotFound, ServiceError, Unavailable


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the user asked for; empty fields mean the running stack's own."""

    url: str
    model: str
    system: str
    api_key: str
    max_tokens: int | None


def chat(options: ChatOptions) -> int:
    """Reads, asks and prints until the user leaves.

    Raises Unavailable when no stack runs, NotFound when it does not serve the model asked for.
    """
    url = gateway_url(options.url) if options.url else _running_stack()
    with asyncio.Runner() as runner:
        client = GatewayClient(url, options.api_key)
        try:
            model = runner.run(_choose_model(client, options.model))
            out.print(f"[bold]{escape(model)}[/] at {url}. /help for commands, Ctrl-D to leave.")
            _converse(runner, client, Conversation(model, options.system, options.max_tokens))
        finally:
            runner.run(client.__aexit__(None, None, None))
    return 0


def gateway_url(said: str) -> str:
    """Where a gateway is, of an address with or without scheme and /v1. Raises InvalidArgument for one not of HTTP."""
    url = said if "://" in said else f"http://{said}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that does not close
        usable = False
    if not usable:
        fix = "give one such as http://127.0.0.1:8000"
        raise InvalidArgument(f"{said!r} is no address of HTTP", field="--url", fix=fix)
    return url.rstrip("/").removesuffix("/v1")


def _running_stack() -> str:
    running = runtime.stacks(runtime.folder())
    if not running:
        fix = "start one with `deepinfer up` and wait until all of it serves, or name one with --url"
        raise Unavailable("no stack of yours serves here", fix=fix)
    return f"http://{running[0].http}"


async def _choose_model(client: GatewayClient, wanted: str) -> str:
    served = await client.models()
    if wanted and wanted not in served:
        raise NotFound(f"{wanted!r} is not served", field="--model", fix=f"one of: {', '.join(served) or 'none'}")
    if not served:
        raise Unavailable(
            "the gateway serves no model yet", fix="wait for its workers, see the table of `deepinfer up`"
        )
    return wanted or served[0]


def _converse(runner: asyncio.Runner, client: GatewayClient, conversation: Conversation) -> None:
    _enable_line_editing()
    while True:
        try:
            said = conversation.understand(read_message(_read_line))
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        if said.turn is Turn.QUIT:
            return
        if said.turn is Turn.NOTE:
            out.print(escape(said.text), style="dim")
        elif said.text:
            _exchange(runner, client, conversation, said.text)


def _exchange(runner: asyncio.Runner, client: GatewayClient, conversation: Conversation, text: str) -> None:
    """One question and its answer; an interrupted or failed one leaves no trace in the conversation."""
    try:
        answer = runner.run(print_answer(client, conversation.request(text), out))
    except KeyboardInterrupt:
        out.print("\n[dim]stopped[/]")
    except ServiceError as error:
        out.print()
        complain(error)
    else:
        conversation.remember(text, answer)


async def print_answer(client: GatewayClient, body: dict[str, object], console: Console) -> str:
    """Streams one answer to the console, reasoning dimmed, figures below; returns its content."""
    content: list[str] = []
    was_reasoning = False
    async for piece in client.chat(body):
        if isinstance(piece, Summary):
            console.print(f"\n[dim]{footer(piece)}[/]")
            continue
        if was_reasoning and piece.content:
            console.print("\n")
        was_reasoning = bool(piece.reasoning) or (was_reasoning and not piece.content)
        _print_piece(piece, console)
        content.append(piece.content)
    return "".join(content)


def _print_piece(piece: Delta, console: Console) -> None:
    for text, style in ((piece.reasoning, "dim italic"), (piece.content, "")):
        if text:
            console.print(harmless(text), style=style, end="", markup=False, soft_wrap=True)


def _read_line(more: bool) -> str:
    if not sys.stdin.isatty():
        return input()
    return out.input("[dim]...[/] " if more else "[bold cyan]>[/] ")


def _enable_line_editing() -> None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (importing it is what gives input() history and editing)
