"""Operations on one short word, spelled out letter by letter. Pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Callable

from models.nano.data.problem import Problem, spelled, user
from models.nano.data.words import SPELLING

KIND = "strings"
DIFFICULTY = (
    "one word of 3 to 8 letters: reverse, upper case, hyphenate, length, occurrences of a letter, first and last"
)
CONSONANTS, VOWELS = "bcdfghklmnprstvw", "aeiou"
Operation = Callable[[str, random.Random], tuple[str, str, str, str]]


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable word of 3 to 8 letters."""
    length, start = rng.randint(3, 8), rng.randint(0, 1)
    return "".join(rng.choice(CONSONANTS if (start + i) % 2 else VOWELS) for i in range(length))


def _letters(word: str) -> str:
    return " ".join(word)


def reverse(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    form = rng.choice(('Reverse the word "{w}".', 'Write "{w}" backwards.', 'What is "{w}" reversed?'))
    back = word[::-1]
    return "reverse", form.format(w=word), f"{_letters(word)}\nreversed: {_letters(back)}", spelled(back)


def upper(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    form = rng.choice(('Write "{w}" in upper case.', 'Convert "{w}" to capital letters.', 'Uppercase the word "{w}".'))
    pairs = " ".join(f"{letter} {letter.upper()}" for letter in word)
    return "upper", form.format(w=word), f"{_letters(word)}\n{pairs}", spelled(word.upper())


def hyphenate(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    form = rng.choice(('Spell "{w}" with hyphens.', 'Put a hyphen between the letters of "{w}".'))
    return "hyphens", form.format(w=word), _letters(word), spelled("-".join(word))


def length(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    form = rng.choice(('How many letters are in "{w}"?', 'Count the letters of "{w}".', 'How long is the word "{w}"?'))
    counted = " ".join(f"{letter}{place}" for place, letter in enumerate(word, 1))
    return "length", form.format(w=word), f"{_letters(word)}\n{counted}", str(len(word))


def occurrences(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice(CONSONANTS + VOWELS)
    form = rng.choice(
        (
            'How many times does "{x}" occur in "{w}"?',
            'Count the letter "{x}" in "{w}".',
            'How many "{x}" are in "{w}"?',
        )
    )
    seen = [word[: place + 1].count(letter) for place in range(len(word))]
    counted = " ".join(f"{each}{count}" for each, count in zip(word, seen, strict=True))
    reasoning = f"{_letters(word)}\ncount {letter}: {counted}"
    return f"count-{letter}", form.format(x=letter, w=word), reasoning, str(seen[-1])


def ends(word: str, rng: random.Random) -> tuple[str, str, str, str]:
    form = rng.choice(('What are the first and last letters of "{w}"?', 'First and last letter of "{w}"?'))
    return "ends", form.format(w=word), _letters(word), f"{spelled(word[0])} and {spelled(word[-1])}"


OPERATIONS: tuple[Operation, ...] = (reverse, upper, hyphenate, length, occurrences, ends)


def generate(rng: random.Random) -> Problem:
    """One operation on a listed word or, two times in five, on an invented one."""
    word = pseudo_word(rng) if rng.random() < 0.4 else rng.choice(SPELLING)
    name, question, reasoning, content = rng.choice(OPERATIONS)(word, rng)
    return Problem(KIND, f"{name}:{word}", (user(question),), reasoning, content, thinking=True)
