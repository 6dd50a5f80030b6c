"""One question to a running stack, asked as any client would. Knows the endpoint, not the services behind it."""

from rich.console import Console
from rich.markup import escape

from cli.client import Delta, GatewayClient, Summary
from cli.console import complain, harmless, seconds
from fabric.errors import ServiceError

QUESTION = "What is 27 + 15?"


async def ask(http: str, console: Console) -> bool:
    """Asks QUESTION at the gateway's host:port and prints question, answer and timings. Whether an answer came."""
    console.print(f"[bold]question[/]  {QUESTION}")
    try:
        async with GatewayClient(f"http://{http}") as client:
            model = (await client.models())[0]
            body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 512, "seed": 7}
            pieces = [piece async for piece in client.chat(body)]
    except ServiceError as error:
        complain(error)
        return False
    return _print_answer(pieces, console)


def _print_answer(pieces: list[Delta | Summary], console: Console) -> bool:
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    [summary] = [piece for piece in pieces if isinstance(piece, Summary)]
    reasoning, content = "".join(d.reasoning for d in deltas).strip(), "".join(d.content for d in deltas).strip()
    if reasoning:
        console.print(f"[bold]reasoning[/] [dim]{escape(harmless(reasoning))}[/]")
    console.print(f"[bold]answer[/]    {escape(harmless(content))}")
    console.print(f"[bold]timings[/]   {footer(summary)}")
    if not (reasoning or content):
        console.print("[red]the answer is empty[/]")
    return bool(reasoning or content)


def footer(summary: Summary) -> str:
    """One line of figures about an answer."""
    return (
        f"first token {seconds(summary.first_token_s)}, {summary.tokens_per_s:.0f} tokens/s, "
        f"{summary.completion_tokens} tokens from {summary.prompt_tokens} ({summary.cached_tokens} cached), "
        f"{summary.finish_reason}"
    )
