"""How the command speaks: consoles, errors with their fix, units. Knows the terminal, no services."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

import structlog
import typer
from rich.console import Console
from rich.markup import escape

from fabric.errors import ServiceError

P = ParamSpec("P")

# Controls that a terminal would obey; model output is data and must not move cursors or set titles.
_OBEYED = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def reports_errors(command: Callable[P, int]) -> Callable[P, None]:
    """Makes a command end with its return value, and a ServiceError end it with one clear message and exit code 1."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except ServiceError as error:
            complain(error)
            code = 1
        if code:
            raise typer.Exit(code)

    return run


def complain(error: ServiceError) -> None:
    """Prints what went wrong, where, and how to fix it."""
    where = f"{error.field}: " if error.field else ""
    err.print(f"[bold red]error[/]: {escape(where + error.message)}", soft_wrap=True)
    if error.fix:
        err.print(f"  [bold]fix[/]: {escape(error.fix)}", soft_wrap=True)


@contextmanager
def silent_logs() -> Iterator[None]:
    """Keeps what libraries log off stdout, which belongs to the answer, unless it is an error."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)


def harmless(text: str) -> str:
    """Text of a model with everything but its line breaks and tabs taken as plain characters."""
    return text.translate(_OBEYED)


def megabytes(size: int) -> str:
    """Bytes as whole MB; kB below one of them, GB above a thousand."""
    if size < 1e6:
        return f"{size / 1e3:.0f} kB"
    return f"{size / 1e6:.0f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def seconds(value: float) -> str:
    """A duration in the unit that reads best."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
