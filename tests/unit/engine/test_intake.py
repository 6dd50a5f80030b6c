"""What is remembered of the newest prompts changes no key and lets nothing unfit in."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.errors import InvalidParameter
from engine.intake import Intake
from engine.layout import CacheGroup, GroupKind, Layout
from engine.prefix import PrefixIdentity, block_keys

LAYOUT = Layout(4, 0, (CacheGroup("latent", GroupKind.GLOBAL, 1, 1, 4, 8, "uint8", "1"),))
IDENTITY = PrefixIdentity("rev", LAYOUT.fingerprint, LAYOUT.window_policy, 4)
PROMPT = tuple(range(18))


def intake() -> Intake:
    model = SimpleNamespace(revision="rev", layout=LAYOUT, vocab_size=100)
    return Intake(model, 100, None, lambda: 0.0)  # type: ignore[arg-type]


def test_keys_are_those_of_salt_and_tokens_however_often_they_are_asked_for() -> None:
    desk = intake()
    for salt in (b"a", b"b", b"a"):
        for _ in range(2):
            assert desk.chain(salt, PROMPT).keys == block_keys(salt, PROMPT, IDENTITY)
    longer = (*PROMPT, 1, 2)
    assert desk.chain(b"a", longer).keys == desk.chain(b"a", list(longer)).keys == block_keys(b"a", longer, IDENTITY)


def test_who_grows_a_chain_changes_no_other_one() -> None:
    desk = intake()
    first, second = desk.chain(b"a", PROMPT), desk.chain(b"a", PROMPT)
    first.grow([*PROMPT, 1, 2, 3, 4])
    assert (len(first.keys), len(second.keys), len(desk.chain(b"a", PROMPT).keys)) == (5, 4, 4)
    second.grow([*PROMPT, 5, 6, 7, 8])
    assert first.keys[4] != second.keys[4] and first.contents[4] != second.contents[4]


def test_only_what_was_found_fit_is_not_looked_at_again() -> None:
    desk, wrong = intake(), (*PROMPT, 100)
    desk.check_tokens("prompt", PROMPT)
    desk.check_tokens("prompt", PROMPT)
    for _ in range(2):
        with pytest.raises(InvalidParameter):
            desk.check_tokens("prompt", wrong)
        with pytest.raises(InvalidParameter):
            desk.check_tokens("prompt", ())
