"""Greetings, who-are-you, and conversations of several turns. Pure and seeded."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from models.nano.data import arithmetic, strings, structured, words
from models.nano.data.problem import Message, Problem, assistant, draw, user

KIND = "smalltalk"
TURNS_KIND = "multi_turn"
DIFFICULTY = "a greeting with or without a name, or who the model is, in varied words"
TURNS_DIFFICULTY = "2 to 4 turns; the last asks for something said in the first turn, or a new small problem"
HELLOS = (
    "Hello",
    "Hi",
    "Hey",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Greetings",
    "Hi there",
    "Hello there",
)
AFTER_HELLO = ("", ", how are you", ", nice to meet you", ", are you there", ", can you help me", ", good to see you")
WHO = (
    "who are you",
    "what are you",
    "what is your name",
    "tell me who you are",
    "what model are you",
    "which model is this",
    "introduce yourself",
    "are you a human or a machine",
    "who am I talking to",
    "say who you are",
)
BEFORE_WHO = ("", "please ", "so, ", "just curious, ", "may I ask, ", "quick question: ", "now ", "one thing, ")
IDENTITY = "I am nano, a small language model with the DeepSeek-V4 architecture."
HELP = "Hello! How can I help you today?"


def _sentence(rng: random.Random, text: str, marks: tuple[str, ...]) -> str:
    text = text[0].upper() + text[1:] if rng.random() < 0.7 else text.lower()
    return text + rng.choice(marks)


def generate(rng: random.Random) -> Problem:
    """A greeting, answered by name where one is given, or a question about the model."""
    thinking, kind = rng.random() < 0.5, rng.randrange(3)
    if kind == 0:
        question = _sentence(rng, rng.choice(BEFORE_WHO) + rng.choice(WHO), ("?", ".", "", "!"))
        return Problem(KIND, question, (user(question),), "They ask who I am.", IDENTITY, thinking=thinking)
    hello = rng.choice(HELLOS) + rng.choice(AFTER_HELLO)
    if kind == 1:
        question = _sentence(rng, hello, ("!", ".", "?", ""))
        return Problem(KIND, question, (user(question),), "They greet me.", HELP, thinking=thinking)
    name = rng.choice(words.NAMES)
    form = rng.choice(("{hello}! I am {name}.", "{hello}, my name is {name}.", "{hello}. {name} here."))
    question = form.format(hello=hello, name=name)
    content = f"Hello {name}! How can I help you today?"
    return Problem(KIND, question, (user(question),), "They greet me with a name.", content, thinking=thinking)


Opening = tuple[str, str, str, str]


def _opening(rng: random.Random) -> Opening:
    """(first user turn, reply, later question, its answer)."""
    name, animal, city, colour = (
        rng.choice(each) for each in (words.NAMES, words.ANIMALS, words.CITIES, words.COLOURS)
    )
    return rng.choice(
        (
            (f"My name is {name}.", f"Nice to meet you, {name}.", "What is my name?", f"Your name is {name}."),
            (f"I live in {city}.", f"{city} is a nice city.", "Where do I live?", f"You live in {city}."),
            (
                f"I have a {animal}.",
                f"A {animal} is a good friend.",
                "Which animal do I have?",
                f"You have a {animal}.",
            ),
            (
                f"My favourite colour is {colour}.",
                f"I like {colour} too.",
                "Which colour do I like?",
                f"You like {colour}.",
            ),
        )
    )


FRESH: tuple[Callable[[random.Random], Problem], ...] = (
    generate,
    arithmetic.generate,
    strings.generate,
    structured.generate,
)


def _middle(rng: random.Random) -> list[Message]:
    turns: list[Message] = []
    for _ in range(rng.randint(0, 2)):
        problem = draw(rng.choice(FRESH[1:]), rng, evaluation=False)
        turns += [*problem.messages, assistant(problem.answer)]
    return turns


def generate_turns(rng: random.Random) -> Problem:
    """A few turns; two times in three the last one asks back for what the first one said."""
    first, reply, later, answer = _opening(rng)
    history = [user(first), assistant(reply), *_middle(rng)]
    thinking = rng.random() < 0.5
    if rng.random() < 0.67:
        messages = (*history, user(later))
        key = "|".join(str(message["content"]) for message in messages)
        return Problem(TURNS_KIND, key, messages, f"They said: {first}", answer, thinking=thinking)
    fresh = rng.choice(FRESH)(rng)
    messages = (*history, *fresh.messages)
    key = "|".join(str(message["content"]) for message in messages)
    needs_thought = fresh.kind in (arithmetic.KIND, strings.KIND)
    return replace(
        fresh,
        kind=TURNS_KIND,
        key=key,
        messages=messages,
        thinking=thinking or needs_thought,
        split=fresh.split_key,
    )
