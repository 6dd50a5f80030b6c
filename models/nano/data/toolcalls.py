"""Choosing and calling one of several tools, and answering from a tool's result. Pure and seeded."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from models.nano.data.catalogue import CATALOGUE, Tool
from models.nano.data.problem import Call, Message, Problem, user

CALL_KIND = "tool_call"
RESULT_KIND = "tool_result"
FEWEST_TOOLS, MOST_TOOLS = 3, 6
CALL_DIFFICULTY = f"{FEWEST_TOOLS} to {MOST_TOOLS} tools offered, 1 to 3 arguments, names drawn anew in every problem"
RESULT_DIFFICULTY = f"one sentence from the result of a call, {FEWEST_TOOLS} to {MOST_TOOLS} tools offered"


@dataclass(frozen=True, slots=True)
class Offer:
    """One variant of a tool as a problem offers it."""

    tool: Tool
    name: str
    parameters: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        kinds = [parameter.kind for parameter in self.tool.parameters]
        properties = {name: {"type": kind} for name, kind in zip(self.parameters, kinds, strict=True)}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"name": self.name, "description": self.tool.description, "parameters": parameters}


def offer(tool: Tool, rng: random.Random) -> Offer:
    return Offer(tool, rng.choice(tool.names), tuple(rng.choice(each.names) for each in tool.parameters))


def shown(value: Any) -> str:
    """How a request or an answer writes an argument."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _asked(rng: random.Random, tools: tuple[Tool, ...]) -> tuple[Offer, list[Any], str]:
    chosen = offer(rng.choice(tools), rng)
    values = [each.sample(rng) for each in chosen.tool.parameters]
    return chosen, values, rng.choice(chosen.tool.forms).format(*map(shown, values))


def _offered(rng: random.Random, chosen: Offer) -> tuple[dict[str, Any], ...]:
    others = [tool for tool in CATALOGUE if tool is not chosen.tool]
    picked = rng.sample(others, rng.randint(FEWEST_TOOLS, MOST_TOOLS) - 1)
    offers = [chosen, *(offer(tool, rng) for tool in picked)]
    rng.shuffle(offers)
    return tuple(each.schema() for each in offers)


def generate_call(rng: random.Random) -> Problem:
    """A request that exactly one offered tool answers; the answer is the call."""
    chosen, values, question = _asked(rng, CATALOGUE)
    arguments = dict(zip(chosen.parameters, values, strict=True))
    reasoning = f"I call {chosen.name} with {json.dumps(arguments)}."
    return Problem(
        CALL_KIND,
        f"{question}|{chosen.name}",
        (user(question),),
        reasoning,
        calls=(Call(chosen.name, arguments),),
        tools=_offered(rng, chosen),
        thinking=rng.random() < 0.5,
    )


def call_turns(chosen: Offer, values: list[Any], result: dict[str, Any], thinking: bool) -> tuple[Message, Message]:
    """The assistant's call and the tool's answer as history."""
    arguments = json.dumps(dict(zip(chosen.parameters, values, strict=True)))
    function = {"name": chosen.name, "arguments": arguments}
    call: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    if thinking:
        call["reasoning_content"] = f"I call {chosen.name} with {arguments}."
    return call, {"role": "tool", "tool_call_id": "call_0", "content": json.dumps(result)}


def generate_result(rng: random.Random) -> Problem:
    """The result of a call is in; the answer is one sentence made from it."""
    chosen, values, question = _asked(rng, tuple(tool for tool in CATALOGUE if tool.answer))
    result = {name: sample(rng) for name, sample in chosen.tool.result}
    answer = chosen.tool.answer.format(*map(shown, values), **result)
    thinking = rng.random() < 0.5
    turns = (user(question), *call_turns(chosen, values, result, thinking))
    return Problem(
        RESULT_KIND,
        f"{question}|{json.dumps(result)}",
        turns,
        "The tool has answered.",
        answer[0].upper() + answer[1:],
        tools=_offered(rng, chosen),
        thinking=thinking,
    )
