"""The problem classes with their difficulty, and the share each has in training. Knows generators, not tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from models.nano.data import arithmetic, recall, smalltalk, strings, structured, toolcalls
from models.nano.data.problem import Generator, Problem, draw, system
from models.nano.data.recall import Count

SYSTEMS = (
    "You are a helpful assistant.",
    "You are nano, a small assistant.",
    "Answer briefly.",
    "You are a careful assistant. Give only the answer.",
    "Be polite and short.",
)
EFFORTS = (None, None, None, "low", "high", "max")


@dataclass(frozen=True, slots=True)
class ProblemClass:
    """One row of the evaluation: its name, its generator, its fixed difficulty and its share of training problems."""

    kind: str
    generate: Generator
    difficulty: str
    share: float


def classes(count: Count) -> tuple[ProblemClass, ...]:
    """Every class, in report order. `count` measures recall distances in tokens."""
    return (
        ProblemClass(arithmetic.KIND, arithmetic.generate, arithmetic.DIFFICULTY, 0.24),
        ProblemClass(strings.KIND, strings.generate, strings.DIFFICULTY, 0.20),
        ProblemClass(recall.KIND, partial(recall.generate, count=count), recall.DIFFICULTY, 0.09),
        ProblemClass(toolcalls.CALL_KIND, toolcalls.generate_call, toolcalls.CALL_DIFFICULTY, 0.13),
        ProblemClass(toolcalls.RESULT_KIND, toolcalls.generate_result, toolcalls.RESULT_DIFFICULTY, 0.08),
        ProblemClass(structured.KIND, structured.generate, structured.DIFFICULTY, 0.08),
        ProblemClass(smalltalk.KIND, smalltalk.generate, smalltalk.DIFFICULTY, 0.04),
        ProblemClass(smalltalk.TURNS_KIND, smalltalk.generate_turns, smalltalk.TURNS_DIFFICULTY, 0.14),
    )


def dressed(problem: Problem, rng: random.Random) -> Problem:
    """The problem with, one time in three, a system message, and in thinking mode one of the efforts."""
    effort = rng.choice(EFFORTS) if problem.thinking else None
    messages = problem.messages
    if rng.random() < 1 / 3:
        messages = (system(rng.choice(SYSTEMS)), *messages)
    return replace(problem, effort=effort, messages=messages)


def evaluation_problems(problem_class: ProblemClass, number: int, seed: int) -> list[Problem]:
    """`number` held-out problems of one class; the same for the same seed.

    JSON is asked for in words alone: `response_format` would let the server enforce what the model must do itself."""
    rng = random.Random(f"evaluation:{problem_class.kind}:{seed}")
    drawn = [dressed(draw(problem_class.generate, rng, evaluation=True), rng) for _ in range(number)]
    return [replace(problem, json_mode=False) for problem in drawn]


class TrainingMixture:
    """An endless stream of training problems. `max_distance` bounds the recall distance for a curriculum."""

    def __init__(self, count: Count, rng: random.Random) -> None:
        self._count = count
        self._rng = rng
        self._classes = classes(count)
        self._shares = [each.share for each in self._classes]

    def next(self, max_distance: int) -> Problem:
        """The next training problem."""
        rng = self._rng
        chosen = rng.choices(self._classes, self._shares)[0]
        generate: Callable[[random.Random], Problem] = chosen.generate
        if chosen.kind == recall.KIND:
            many = recall.generate_many if rng.random() < 0.6 else recall.generate
            generate = partial(many, count=self._count, max_distance=rng.choice((max_distance, max_distance, 400)))
        problem = draw(generate, rng, evaluation=False)
        if problem.kind in (arithmetic.KIND, strings.KIND) and rng.random() < 0.06:
            problem = replace(problem, thinking=False)
        return dressed(problem, rng)
