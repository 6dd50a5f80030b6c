"""The tokenizer of tiny checkpoints: byte-level BPE over every byte, with the control tokens that prompts need."""

from __future__ import annotations

from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import InvalidParameter

_CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_MARKERS = (
    *("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"),
    *("<｜image｜>", "<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>", "<｜point｜>", "<｜/point｜>"),
    *("<｜polygon｜>", "<｜/polygon｜>"),
)
_LETTERS = "etaoinsrhldcumfpgwybvkxjqz"


def build(vocab_size: int) -> str:
    """The text of a tokenizer.json with exactly `vocab_size` ids: control tokens from 0, markers, bytes, letter pairs.

    Raises InvalidParameter if the vocabulary is too small for every byte or larger than there are pairs.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = [*_CONTROL, *_MARKERS, *alphabet]
    pairs = list(product(_LETTERS, _LETTERS))[: max(0, vocab_size - len(first))]
    names = first + ["".join(pair) for pair in pairs]
    if len(names) != vocab_size:
        most = len(first) + len(_LETTERS) ** 2
        raise InvalidParameter("vocab_size", f"{vocab_size} is not in {len(first)} .. {most}", "choose one within")
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKERS])
    return str(tokenizer.to_str())
