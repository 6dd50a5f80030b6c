"""A chat template in a process of its own: a program, started by TemplateProcess. Knows no tokens and no service.

A template comes with a model, so it is not trusted. It runs in Jinja's immutable sandbox, without the environment,
with bounded memory and no files to write; whoever started the process bounds its time and ends it.
Frames both ways: four bytes of length, most significant first, and JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from io import BufferedRWPair
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES = 1 << 30
_OPEN_FILES = 16


class Refused(Exception):
    """The template itself refuses the conversation."""


class GenerationTag(Extension):
    """`{% generation %}` marks the model's own words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that `transformers` gives templates, as far as they can tell."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    return made


def render(template: Template, asked: dict[str, Any]) -> dict[str, Any]:
    """`text`, or `overlong` beyond `max_chars` characters, or `refused` or `failed` with a message."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(**asked["variables"], strftime_now=_clock(asked["now"])):
            pieces.append(piece)
            size += len(piece)
            if size > asked["max_chars"]:
                return {"overlong": True}
        return {"text": "".join(pieces)}
    except Refused as refusal:
        return {"refused": str(refusal)[:500]}
    except Exception as error:  # whatever a template may do wrong
        return {"failed": type(error).__name__}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Escapes would hide stand-ins from those who must find them: text stays text.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def _clock(unix_s: float) -> Callable[[str], str]:
    return lambda form: datetime.fromtimestamp(unix_s, UTC).strftime(form)


def _limit() -> None:
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        resource.setrlimit(kind, (most, most))


def _read(stream: BufferedRWPair) -> Any:
    """The next frame, or None at the end."""
    header = stream.read(4)
    return json.loads(stream.read(int.from_bytes(header))) if len(header) == 4 else None


def _write(stream: BufferedRWPair, tree: dict[str, Any]) -> None:
    packed = json.dumps(tree).encode()
    stream.write(len(packed).to_bytes(4) + packed)
    stream.flush()


def main(descriptor: int) -> None:
    """Compiles the first frame, then renders one request a frame until the other side closes."""
    _limit()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            template = environment().from_string(_read(stream))
        except (TemplateError, RecursionError) as error:
            _write(stream, {"failed": f"{type(error).__name__}: {error}"[:300]})
            return
        _write(stream, {"ready": True})
        while (asked := _read(stream)) is not None:
            _write(stream, render(template, asked))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.recipe.template_child", description=__doc__)
    parser.add_argument("descriptor", type=int, help="of the socket that the recipe asks by")
    main(parser.parse_args().descriptor)
