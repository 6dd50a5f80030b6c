"""A model folder without weights: a byte-level tokenizer with every control token of deepseek-recipe."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import deepseek_recipe as recipe
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 4096
_NAMES = [name for name in dir(recipe.SpecialToken) if name[0].isupper()]
SPELLINGS = [getattr(recipe.SpecialToken, name).default_str() for name in _NAMES]


@cache
def tokenizer() -> Tokenizer:
    """One token a byte (ids 0 to 255 in no order to rely on), then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPELLINGS])
    return built


def encode(text: str) -> list[int]:
    """Ids of `text`, control tokens included where they are spelled."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


EOS = encode("<｜end▁of▁sentence｜>")[0]


def write(folder: Path, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """Writes `tokenizer.json` and `config.json`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    built = tokenizer()
    built.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": context_tokens, "vocab_size": built.get_vocab_size(), "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
