"""The generators: deterministic, disjoint splits, inside their difficulty, and judged by their own checkers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from models.nano.data import arithmetic, recall, strings, toolcalls
from models.nano.data.check import correct
from models.nano.data.mixture import TrainingMixture, classes, evaluation_problems
from models.nano.data.problem import Call, Problem, held_out
from models.nano.data.recall import MAX_DISTANCE, MAX_FACTS
from models.nano.data.render import Renderer

KINDS = [each.kind for each in classes(len)]


def problems(renderer: Renderer, kind: str, number: int = 40, seed: int = 7) -> list[Problem]:
    """Held-out problems; few of recall, whose texts are long."""
    chosen = next(each for each in classes(renderer.count) if each.kind == kind)
    return evaluation_problems(chosen, min(number, 4) if kind == recall.KIND else number, seed)


def message_of(problem: Problem) -> dict[str, object]:
    """The assistant message of a client that was answered perfectly."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in problem.calls
    ]
    return {"role": "assistant", "content": problem.answer, "tool_calls": calls or None}


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_same_problems_and_another_seed_does_not(renderer: Renderer, kind: str) -> None:
    assert problems(renderer, kind) == problems(renderer, kind)
    assert problems(renderer, kind) != problems(renderer, kind, seed=8)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_draws_only_held_out_problems(renderer: Renderer, kind: str) -> None:
    assert all(held_out(problem.split_key) for problem in problems(renderer, kind))


def test_training_never_draws_a_held_out_problem(renderer: Renderer) -> None:
    mixture = TrainingMixture(renderer.count, random.Random(3))
    drawn = [mixture.next(max_distance=200) for _ in range(1500)]
    assert not [problem.split_key for problem in drawn if held_out(problem.split_key)]
    assert {problem.kind for problem in drawn} == set(KINDS)


def test_a_small_problem_inside_a_conversation_keeps_its_own_split(renderer: Renderer) -> None:
    inside = [problem for problem in problems(renderer, "multi_turn", 200) if problem.split]
    assert inside
    assert all(held_out(problem.split) for problem in inside)


@pytest.mark.parametrize("kind", KINDS)
def test_checker_accepts_the_answer_and_refuses_a_changed_one(renderer: Renderer, kind: str) -> None:
    for problem in problems(renderer, kind, 20):
        right = message_of(problem)
        assert correct(problem, right)
        if problem.calls:
            other = Call(problem.calls[0].name, {**problem.calls[0].arguments, "more": 1})
            assert not correct(problem, message_of(replace(problem, calls=(other,))))
            assert not correct(problem, {**right, "tool_calls": None})
        else:
            assert not correct(problem, {**right, "content": f"{problem.answer}x"})


def test_checker_tells_a_number_from_its_text_and_true_from_one() -> None:
    problem = Problem(toolcalls.CALL_KIND, "k", (), calls=(Call("f", {"on": True, "n": 3}),))
    wrong = replace(problem, calls=(Call("f", {"on": 1, "n": 3}),))
    text = replace(problem, calls=(Call("f", {"on": True, "n": "3"}),))
    assert not correct(problem, message_of(wrong))
    assert not correct(problem, message_of(text))


@pytest.mark.parametrize("seed", range(20))
def test_arithmetic_reasoning_ends_in_the_true_result(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        problem = arithmetic.generate(rng)
        value = eval(problem.key)  # noqa: S307  digits and one sign, made by the generator
        assert problem.answer == str(value)
        assert problem.reasoning.endswith(f" {value}")
        assert all(1 <= len(number) <= 4 for number in problem.key.replace("+", "-").split("-"))


@pytest.mark.parametrize("seed", range(60))
def test_string_answers_follow_from_the_word(seed: int) -> None:
    problem = strings.generate(random.Random(seed))
    name, word = problem.key.split(":")
    expected = {
        "reverse": word[::-1],
        "upper": word.upper(),
        "hyphens": "-".join(word),
        "length": str(len(word)),
        "ends": f"{word[0]} and {word[-1]}",
    }
    wanted = expected[name] if name in expected else str(word.count(name.removeprefix("count-")))
    assert problem.answer == wanted
    assert 3 <= len(word) <= 8


def test_recall_distance_is_spread_up_to_the_limit_and_facts_within_eight(renderer: Renderer) -> None:
    distances = []
    for seed in range(40):
        text, facts = recall.compose(random.Random(seed), renderer.count, MAX_DISTANCE, 1 + seed % MAX_FACTS)
        before, after = text.split(facts[0].sentence)
        distances.append(renderer.count(after))
        assert all(fact.sentence in text for fact in facts)
        assert len({fact.subject for fact in facts}) == len(facts) <= MAX_FACTS
        assert renderer.count(before) < 400
    assert max(distances) < MAX_DISTANCE + 100
    assert min(distances) < 600
    assert sum(distances) / len(distances) == pytest.approx(MAX_DISTANCE / 2, rel=0.25)


def test_tool_problems_offer_three_to_six_tools_and_take_one_to_three_arguments(renderer: Renderer) -> None:
    for problem in problems(renderer, toolcalls.CALL_KIND, 100):
        names = [tool["name"] for tool in problem.tools]
        assert 3 <= len(names) == len(set(names)) <= 6
        (call,) = problem.calls
        assert 1 <= len(call.arguments) <= 3
        offered = next(tool for tool in problem.tools if tool["name"] == call.name)
        assert list(call.arguments) == offered["parameters"]["required"]
