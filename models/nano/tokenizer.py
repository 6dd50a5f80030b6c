"""nano's tokenizer: byte-level BPE with every special token of the V4.1 encoding. Trains it and loads it."""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator
from pathlib import Path

from deepseek_recipe import SpecialToken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.nano.config import HERE, load_config
from models.nano.corpus import documents
from models.nano.data.mixture import TrainingMixture
from models.nano.data.render import SPELLED, prompt_text, target_text
from models.nano.data.strings import pseudo_word

PATH = HERE / "tokenizer.json"
PAD = "<｜▁pad▁｜>"
FIRST = (SpecialToken.Bos, SpecialToken.Eos)
OTHERS = (
    SpecialToken.System,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
    SpecialToken.Dsml,
    SpecialToken.LatestReminder,
    SpecialToken.Image,
    SpecialToken.Ref,
    SpecialToken.RefEnd,
    SpecialToken.Box,
    SpecialToken.BoxEnd,
    SpecialToken.Point,
    SpecialToken.PointEnd,
    SpecialToken.Polygon,
    SpecialToken.PolygonEnd,
)
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS_BYTES, CONVERSATIONS = 3_000_000, 20_000


def special_tokens() -> list[AddedToken]:
    """Ids 0.. in order: bos, eos and pad as control tokens, then the markers that parsers must see."""
    control = [token.default_str() for token in FIRST] + [PAD]
    visible = [token.default_str() for token in OTHERS]
    return [AddedToken(text, special=True, normalized=False) for text in control] + [
        AddedToken(text, special=False, normalized=False) for text in visible
    ]


def _conversations(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    mixture = TrainingMixture(lambda text: len(text) // 4, rng)
    for _ in range(CONVERSATIONS):
        problem = mixture.next(max_distance=300)
        yield prompt_text(problem) + SPELLED.sub("", target_text(problem))
        yield " ".join(pseudo_word(rng)) + " " + " ".join(rng.choices(string.ascii_letters, k=12))


def train(seed: int = 0) -> Tokenizer:
    """Train on the corpus and on generated conversations. Digits stay single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = special_tokens()
    trainer = trainers.BpeTrainer(
        vocab_size=load_config().vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*documents(CORPUS_BYTES), *_conversations(seed)]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path = PATH) -> Tokenizer:
    """The committed tokenizer."""
    return Tokenizer.from_file(str(path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m models.nano.tokenizer", description=__doc__)
    parser.add_argument("--out", type=Path, default=PATH, help="file to write (default: the committed one)")
    to = parser.parse_args().out
    if not to.parent.is_dir():
        parser.error(f"argument --out: {to.parent} is not a folder")
    train().save(str(to))
