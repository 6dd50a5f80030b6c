"""The committed tokenizer.json: special tokens, digits, round trips."""

from __future__ import annotations

import json

import pytest
from deepseek_recipe import SpecialToken

from models.nano.config import HERE, load_config
from models.nano.tokenizer import PAD, load

SPECIAL = [getattr(SpecialToken, name) for name in dir(SpecialToken) if name[0].isupper()]


@pytest.mark.parametrize("token", SPECIAL, ids=lambda token: token.default_str())
def test_every_special_token_of_the_encoding_is_one_entry(token: SpecialToken) -> None:
    assert load().encode(f"a{token.default_str()}b").ids.count(load().token_to_id(token.default_str())) == 1


def test_ids_match_the_config() -> None:
    config, tokenizer = json.loads((HERE / "config.json").read_text()), load()
    assert tokenizer.get_vocab_size() == load_config().vocab_size
    assert tokenizer.id_to_token(config["bos_token_id"]) == SpecialToken.Bos.default_str()
    assert tokenizer.id_to_token(config["eos_token_id"]) == SpecialToken.Eos.default_str()
    assert tokenizer.id_to_token(config["pad_token_id"]) == PAD


def test_digits_are_split_one_by_one() -> None:
    assert [token for token in load().encode("x 90210, 7").tokens if any(c.isdigit() for c in token)] == list("902107")


@pytest.mark.parametrize(
    "text", ["Hello, world!\n\n", "żółć 漢字 🙂", " \t  x", "def f(a):\n    return a", "｜DSML｜ x"]
)
def test_text_survives(text: str) -> None:
    assert load().decode(load().encode(text).ids, skip_special_tokens=False) == text
