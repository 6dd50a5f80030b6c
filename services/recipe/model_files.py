"""The files of a model folder that concern text: tokenizer and context. Knows no weights and no protocol."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fabric.errors import StartError
from services.recipe.control import ControlTokens

_LIMITS = ("max_position_embeddings", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What `tokenizer.json` and `config.json` say.

    `full` knows the added vocabulary and decodes every id; for `plain` control tokens do not exist, so that no text
    can encode to one. `control` is that added vocabulary. `model_type` is what config.json calls the architecture.
    """

    tokenizer_path: Path
    tokenizer_json: str
    full: Tokenizer
    plain: Tokenizer
    control: ControlTokens
    longest_token_chars: int
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    model_type: str

    def spelled(self, token_id: int) -> str:
        """A token as text."""
        return self.full.decode([token_id], skip_special_tokens=False)

    @classmethod
    def read(cls, model_dir: Path) -> ModelFiles:
        """Raises StartError naming the file that is missing or wrong and how to right it."""
        path = model_dir / "tokenizer.json"
        source = _read(path)
        config = _config(model_dir / "config.json")
        full, plain = _tokenizers(source, path)
        return cls(
            tokenizer_path=path,
            tokenizer_json=source,
            full=full,
            plain=plain,
            control=ControlTokens.read(full),
            # Byte-level vocabularies spell each byte as one character, so this bounds the text behind a token.
            longest_token_chars=max(map(len, full.get_vocab())),
            max_context_tokens=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            eos_token_ids=_eos(config.get("eos_token_id")),
            model_type=str(config.get("model_type", "")),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}",
            field="model",
            fix="point --model at a complete model folder with config.json and tokenizer.json",
        ) from error


def _config(path: Path) -> dict[str, Any]:
    """The values of config.json, those of the language model's section in front."""
    try:
        tree = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is not JSON", field="model", fix="download the file again") from error
    if not isinstance(tree, dict):
        raise StartError(f"{path} is not a JSON object", field="model", fix="download the file again")
    # V4.1 keeps the language model's values in a section of their own, where the engine reads them, too.
    section, prefix = (tree["text_config"], "text_config.") if "text_config" in tree else (tree, "")
    if not isinstance(section, dict):
        raise StartError(f"{path}: text_config is not a section", field="model", fix="download the file again")
    for name in _LIMITS:
        if type(section.get(name)) is not int:
            raise StartError(f"{path}: {prefix}{name} is not a whole number", field="model", fix=f"set {prefix}{name}")
    return {**tree, **section}


def _eos(value: object) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    return frozenset(token for token in ids if isinstance(token, int))


def _tokenizers(source: str, path: Path) -> tuple[Tokenizer, Tokenizer]:
    try:
        tree = json.loads(source)
        full = Tokenizer.from_str(source)
        tree["added_tokens"], tree["post_processor"] = [], None
        return full, Tokenizer.from_str(json.dumps(tree))
    except Exception as error:  # the library raises bare Exception
        raise StartError(f"{path} is not a tokenizer", field="model", fix="download the file again") from error
