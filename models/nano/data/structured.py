"""Answers that are one JSON object with the asked keys. Pure and seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from models.nano.data import words
from models.nano.data.problem import Problem, user

KIND = "json"
DIFFICULTY = "2 to 4 asked keys, in the asked order, from one sentence; strings and integers"
Subject = Callable[[random.Random], tuple[str, dict[str, Any]]]


def person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name, age, city = rng.choice(words.NAMES), rng.randint(5, 99), rng.choice(words.CITIES)
    job = rng.choice(words.PEOPLE)
    form = rng.choice(
        (
            "{name} is a {job} of {age} from {city}.",
            "{name}, {age} years old, works as a {job} in {city}.",
            "In {city} lives the {job} {name}, aged {age}.",
        )
    )
    return form.format(name=name, job=job, age=age, city=city), {"name": name, "age": age, "city": city, "job": job}


def product(rng: random.Random) -> tuple[str, dict[str, Any]]:
    item, price, colour = rng.choice(words.NOUNS), rng.randint(1, 999), rng.choice(words.COLOURS)
    stock = rng.randint(0, 99)
    form = rng.choice(
        (
            "The {colour} {item} costs {price} euros and {stock} are left.",
            "We have {stock} of the {item} in {colour} for {price} euros.",
            "A {item}, {colour}, price {price}, stock {stock}.",
        )
    )
    text = form.format(item=item, price=price, colour=colour, stock=stock)
    return text, {"item": item, "price": price, "colour": colour, "stock": stock}


def event(rng: random.Random) -> tuple[str, dict[str, Any]]:
    topic, day, hour = rng.choice(words.TOPICS), rng.choice(words.DAYS), rng.randint(7, 22)
    place = rng.choice(words.PLACES)
    form = rng.choice(
        (
            "The {topic} talk is on {day} at {hour} in the {place}.",
            "On {day} at {hour} there is a {topic} talk in the {place}.",
            "Come to the {place} for the {topic} talk, {day}, {hour} o'clock.",
        )
    )
    text = form.format(topic=topic, day=day, hour=hour, place=place)
    return text, {"topic": topic, "day": day, "hour": hour, "place": place}


SUBJECTS: tuple[Subject, ...] = (person, product, event)
FORMS = (
    "Return a JSON object with the keys {keys}. {text}",
    "Extract {keys} as JSON: {text}",
    "{text}\nAnswer in JSON with {keys}.",
)


def generate(rng: random.Random) -> Problem:
    """One sentence and the keys to extract; the answer is the object as `json.dumps` writes it."""
    text, fields = rng.choice(SUBJECTS)(rng)
    keys = rng.sample(sorted(fields), rng.randint(2, 4))
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}"
    question = rng.choice(FORMS).format(keys=listed, text=text)
    content = json.dumps({key: fields[key] for key in keys})
    reasoning = f"The keys are {listed}."
    thinking, json_mode = rng.random() < 0.5, rng.random() < 0.5
    return Problem(KIND, question, (user(question),), reasoning, content, thinking=thinking, json_mode=json_mode)
