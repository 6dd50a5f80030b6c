"""The files of a model folder that tell its chat form: chat template and named tokens. Knows no request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import StartError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_MOST_TEMPLATE_CHARS = 1 << 18
_MOST_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """`source` is the template found at `path`, empty if there is none.

    `tokens` are the named tokens as templates see them (`bos_token` and so on); `adds_bos` says whether a plain text
    begins with the first of them.
    """

    source: str
    path: Path
    tokens: dict[str, str]
    adds_bos: bool

    @classmethod
    def read(cls, model_dir: Path) -> TemplateFiles:
        """`chat_template.jinja` counts before `chat_template` in tokenizer_config.json; neither need exist.

        Raises:
            StartError: a file cannot be read or has another form; names it.
        """
        path = model_dir / CONFIG_FILE
        config = _config(path)
        own_file = model_dir / TEMPLATE_FILE
        source, where = (_text(own_file), own_file) if own_file.exists() else (_template(config, path), path)
        if len(source) > _MOST_TEMPLATE_CHARS:
            raise _broken(where, f"has a template of more than {_MOST_TEMPLATE_CHARS} characters")
        tokens = {name: _spelling(value) for name, value in config.items() if name.endswith("_token")}
        known = {name: spelling for name, spelling in tokens.items() if spelling}
        return cls(source, where, known, config.get("add_bos_token") is True)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise _broken(path, "is too large")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, "cannot be read as UTF-8 text") from error


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        tree = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise _broken(path, "is not JSON") from error
    if not isinstance(tree, dict):
        raise _broken(path, "is not a JSON object")
    return tree


def _template(config: dict[str, Any], path: Path) -> str:
    """The template of the config; of several with names, the default one."""
    found = config.get("chat_template") or ""
    if isinstance(found, list):
        named = [entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0] if named else None
    if not isinstance(found, str):
        raise _broken(path, "has a chat_template that is neither text nor a list with a default one")
    return found


def _spelling(value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _broken(path: Path, why: str) -> StartError:
    return StartError(f"{path} {why}", field="model", fix="download the file again")
