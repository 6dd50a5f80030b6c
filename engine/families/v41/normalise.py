"""Engram's normalised vocabulary: which token ids count as the same word. Knows text, no tensors."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.checkpoint.document import read_json
from engine.checkpoint.errors import CheckpointError
from engine.families.fields import is_integer
from engine.families.v41.config import EngramConfig

MAP_FILE, TOKENIZER_FILE = "engram_token_map.json", "tokenizer.json"
_SPACES = re.compile(r"[ \t\r\n]+")
# Unicode's White_Space property. str.strip() would also take U+001C to U+001F, which are classes of their own.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"  # noqa: E501
_LONE_SPACE = "\ue000"  # stands for a space that stripping must spare


def normalise(text: str) -> str:
    """The key of one token's text: compatibility forms resolved, marks dropped, lower case, spaces folded."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in decomposed if not unicodedata.category(c).startswith("M"))
    folded = _SPACES.sub(" ", "".join(c.lower() for c in bare))  # one by one: no final-sigma rule
    kept = _LONE_SPACE if folded == " " else folded
    return kept.strip(_WHITE).replace(_LONE_SPACE, " ")


def classes_of(decode: Callable[[int], str], piece: Callable[[int], str], count: int) -> np.ndarray:
    """Class of each id, int64 [count], numbered by first appearance. `decode` gives an id's text, `piece` its symbol.

    A text with U+FFFD is part of a character: such a token is known by its symbol alone.
    """
    numbers: dict[str, int] = {}
    found = np.empty(count, np.int64)
    for token in range(count):
        text = decode(token)
        key = piece(token) if "\ufffd" in text else normalise(text) or text
        found[token] = numbers.setdefault(key, len(numbers))
    return found


def load_classes(folder: Path, config: EngramConfig, vocab_size: int) -> np.ndarray:
    """Class of every id, int64 [vocab_size], from the folder's token map or, without one, from its tokenizer.

    Raises CheckpointError if they do not fit the vocabulary or the config's number of classes.
    """
    path = folder / MAP_FILE
    if path.is_file():
        found = _listed(path, vocab_size)
    else:
        path = folder / TOKENIZER_FILE
        found = _from_tokenizer(path, vocab_size)
    if (count := len(np.unique(found))) != config.classes or found.max() + 1 != count:
        message = f"gives {count} classes, but engram_compressed_vocab_size is {config.classes}"
        raise CheckpointError(message, file=path, fix="use the tokenizer that belongs to these weights")
    return found


def _listed(path: Path, vocab_size: int) -> np.ndarray:
    listed: Any = read_json(path, "restore the file").get("class_of_token")
    valid = isinstance(listed, list) and all(is_integer(c) and 0 <= c < vocab_size for c in listed)
    if not valid or len(listed) != vocab_size:
        message = f"does not give a class to each of {vocab_size} ids"
        raise CheckpointError(message, file=path, item="class_of_token", fix="restore the file, or remove it")
    return np.array(listed, np.int64)


def _from_tokenizer(path: Path, vocab_size: int) -> np.ndarray:
    if not path.is_file():
        raise CheckpointError("Engram needs it and it is missing", file=path, fix="copy it beside the weights")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"not a tokenizer: {error}", file=path, fix="restore the file") from error
    if (have := tokenizer.get_vocab_size()) != vocab_size:
        raise CheckpointError(f"has {have} ids, vocab_size is {vocab_size}", file=path, fix="use the model's own")

    def decode(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    return classes_of(decode, lambda token: str(tokenizer.id_to_token(token)), vocab_size)
