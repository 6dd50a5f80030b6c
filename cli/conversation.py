"""A conversation as the user leads it: messages, the thinking switch, commands. Knows no network and no terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

HELP = """\
/reset        forget the conversation
/think on     let the model reason first (/think off: answer at once, /think: the model's default)
/help         these lines
/quit         leave (also Ctrl-D)
A line that ends in \\ goes on in the next one; \"\"\" opens and closes a block of lines. Ctrl-C stops an answer."""


class Turn(Enum):
    """What a line of the user asks for."""

    SAY = auto()
    QUIT = auto()
    NOTE = auto()


@dataclass(frozen=True, slots=True)
class Said:
    """A line understood. text: the message to send, or the note to show."""

    turn: Turn
    text: str = ""


class Conversation:
    """Messages so far, and how the next one is asked."""

    def __init__(self, model: str, system: str = "", max_tokens: int | None = None) -> None:
        self._model = model
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []
        self._max_tokens = max_tokens
        self.thinking: bool | None = None

    def understand(self, text: str) -> Said:
        """Carries out a command, or takes the text for a message."""
        command, _, argument = text.partition(" ")
        match command, argument.strip():
            case "/quit" | "/exit", "":
                return Said(Turn.QUIT)
            case "/reset", "":
                self._messages.clear()
                return Said(Turn.NOTE, "forgotten")
            case "/think", ("on" | "off" | "") as wish:
                self.thinking = {"on": True, "off": False, "": None}[wish]
                return Said(Turn.NOTE, f"thinking: {wish or 'the default of the model'}")
            case "/help", "":
                return Said(Turn.NOTE, HELP)
        if command.startswith("/"):
            return Said(Turn.NOTE, f"no such command: {text}\n{HELP}")
        return Said(Turn.SAY, text)

    def request(self, text: str) -> dict[str, Any]:
        """OpenAI chat request for `text` after all that was said. The conversation changes only by `remember`."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*self._opening, *self._messages, {"role": "user", "content": text}],
        }
        if self.thinking is not None:
            body["thinking"] = {"type": "enabled" if self.thinking else "disabled"}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        return body

    def remember(self, text: str, answer: str) -> None:
        """Adds a finished exchange. Reasoning is not part of it, as in DeepSeek's own multi-turn format."""
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def read_message(read_line: Callable[[bool], str]) -> str:
    """One message of one or more lines. read_line(more) asks for a line; more says that it continues a message."""
    line = read_line(False)
    if line.startswith('"""'):
        return _read_block(line[3:], read_line)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = read_line(True)
    return "\n".join([*lines, line]).strip()


def _read_block(first: str, read_line: Callable[[bool], str]) -> str:
    lines, line = [], first
    while not line.rstrip().endswith('"""'):
        lines.append(line)
        line = read_line(True)
    return "\n".join([*lines, line.rstrip()[:-3]]).strip()
