"""Facts planted in a long text and asked for at the end. Pure and seeded; lengths come from the caller's counter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from models.nano.data import words
from models.nano.data.problem import Problem, assistant, user

KIND = "recall"
MAX_FACTS = 8
MAX_DISTANCE = 4000
DIFFICULTY = f"1 to {MAX_FACTS} planted facts, one asked at a distance uniform up to {MAX_DISTANCE} tokens"
LEAD = 40
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence that states a value, and the question that asks for it."""

    subject: str
    sentence: str
    question: str
    value: str


def make_fact(rng: random.Random) -> Fact:
    """A fact of one of five families."""
    thing = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    name, place = rng.choice(words.NAMES), rng.choice(words.PLACES)
    family = rng.randrange(5)
    if family == 0:
        code = "".join(rng.choice("0123456789") for _ in range(4))
        return Fact(f"code {thing}", f"The code of the {thing} is {code}.", f"What is the code of the {thing}?", code)
    if family == 1:
        city = rng.choice(words.CITIES)
        return Fact(f"home {name}", f"{name} lives in {city}.", f"In which city does {name} live?", city)
    if family == 2:
        return Fact(f"owner {thing}", f"The {thing} belongs to {name}.", f"Who owns the {thing}?", name)
    if family == 3:
        secret = rng.choice(words.ANIMALS)
        sentence = f"The password of the {place} is {secret}."
        return Fact(f"password {place}", sentence, f"What is the password of the {place}?", secret)
    colour = rng.choice(words.COLOURS)
    return Fact(f"colour {name}", f"{name} likes the colour {colour}.", f"Which colour does {name} like?", colour)


def make_facts(rng: random.Random, number: int) -> list[Fact]:
    """`number` facts about different subjects."""
    facts: dict[str, Fact] = {}
    while len(facts) < number:
        fact = make_fact(rng)
        facts.setdefault(fact.subject, fact)
    return list(facts.values())


def filler(rng: random.Random) -> str:
    """A sentence that states nothing a question asks for."""
    person, place = rng.choice(words.PEOPLE), rng.choice(words.PLACES)
    match rng.randrange(4):
        case 0:
            return f"The {person} {rng.choice(words.VERBS)} {rng.choice(words.ADVERBS)} near the {place}."
        case 1:
            return f"{rng.choice(words.TIMES).capitalize()} the {person} {rng.choice(words.VERBS)} in the {place}."
        case 2:
            return f"There was a {rng.choice(words.ADJECTIVES)} {rng.choice(words.ANIMALS)} behind the {place}."
        case _:
            return f"The {person} bought some {rng.choice(words.FOODS)} {rng.choice(words.TIMES)}."


def fill(rng: random.Random, tokens: int, count: Count) -> list[str]:
    """Filler sentences of about `tokens` tokens together."""
    sentences: list[str] = []
    while tokens > 0:
        sentences.append(filler(rng))
        tokens -= count(sentences[-1])
    return sentences


def compose(rng: random.Random, count: Count, max_distance: int, number: int) -> tuple[str, list[Fact]]:
    """A text with `number` facts; the first one returned lies about U(0, max_distance) tokens before the end."""
    asked, *others = make_facts(rng, number)
    before = fill(rng, rng.randint(0, LEAD), count)
    distance = rng.randint(0, max_distance)
    after = fill(rng, distance - sum(count(fact.sentence) for fact in others), count)
    for fact in others:
        part = before if rng.random() < LEAD / (LEAD + 2 * distance) else after
        part.insert(rng.randint(0, len(part)), fact.sentence)
    return " ".join([*before, asked.sentence, *after]), [asked, *others]


def prompt(text: str, question: str) -> str:
    return f"Read the text and answer the question.\n\n{text}\n\nQuestion: {question}"


def generate(rng: random.Random, count: Count, max_distance: int = MAX_DISTANCE) -> Problem:
    """One question about one fact, answered with the bare value."""
    text, facts = compose(rng, count, max_distance, rng.randint(1, MAX_FACTS))
    asked = facts[0]
    reasoning = asked.sentence
    messages = (user(prompt(text, asked.question)),)
    key = f"{asked.sentence}|{len(text)}"
    return Problem(KIND, key, messages, reasoning, asked.value, thinking=rng.random() < 0.5)


def generate_many(rng: random.Random, count: Count, max_distance: int) -> Problem:
    """Non-thinking questions in a row about one text, the last one open (training only: more answers a text)."""
    text, facts = compose(rng, count, max_distance, rng.randint(1, MAX_FACTS))
    rng.shuffle(facts)
    turns = [user(prompt(text, facts[0].question))]
    for done, fact in pairwise(facts[:5]):
        turns += [assistant(done.value), user(f"Question: {fact.question}")]
    last = facts[min(len(facts), 5) - 1]
    return Problem(KIND, f"{last.sentence}|{len(text)}", tuple(turns), last.sentence, last.value)
