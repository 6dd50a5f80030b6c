"""Rendering: the recipe's prompts token for token, and targets that continue them as the recipe itself would."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from deepseek_recipe import (
    AssistantMessage,
    ChatCompletionRequest,
    Conversation,
    DeepseekV41Encoding,
    InferenceChunk,
    InferenceFinishReason,
    StreamProcessor,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from deepseek_recipe import Tokenizer as RecipeTokenizer

from models.nano.data import recall
from models.nano.data.check import correct
from models.nano.data.mixture import TrainingMixture, classes, evaluation_problems
from models.nano.data.problem import SPELL_CLOSE, SPELL_OPEN, Problem
from models.nano.data.render import ANSWER_WEIGHT, OPTIONS, PROMPT_WEIGHT, Renderer, conversation_of, prompt_text
from models.nano.data.render import target_text as marked_target
from models.nano.tokenizer import PATH

RECIPE_TOKENIZER = RecipeTokenizer.from_file(str(PATH))
KINDS = [each.kind for each in classes(len)]


def target_text(problem: Problem) -> str:
    return marked_target(problem).replace(SPELL_OPEN, "").replace(SPELL_CLOSE, "")


def some(renderer: Renderer, kind: str, number: int) -> list[Problem]:
    return evaluation_problems(next(each for each in classes(renderer.count) if each.kind == kind), number, seed=11)


def test_a_sentence_counts_as_many_tokens_as_it_encodes_to(renderer: Renderer) -> None:
    rng = random.Random(3)
    sentences = [*(recall.filler(rng) for _ in range(500)), *(fact.sentence for fact in recall.make_facts(rng, 100))]
    for sentence in sentences:
        assert renderer.count(sentence) == len(renderer.encode(f" {sentence}")), sentence


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_ids_are_the_recipes_own(renderer: Renderer, kind: str) -> None:
    encoding = DeepseekV41Encoding().with_tokenizer(RECIPE_TOKENIZER)
    for problem in some(renderer, kind, 12):
        encoded = encoding.encode(conversation_of(problem))
        assert list(getattr(encoded, "token_ids", encoded)) == renderer.split(problem)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_target_are_what_the_recipe_renders_as_history(renderer: Renderer, kind: str) -> None:
    for problem in some(renderer, kind, 12):
        plain = replace(problem, thinking=False, effort=None)
        asked = conversation_of(plain)
        calls = [ToolCall(f"c{i}", call.name, json.dumps(call.arguments)) for i, call in enumerate(problem.calls)]
        after = [ToolMessage("x", call.id) for call in calls] or [UserMessage("next")]
        again = Conversation(
            [*asked.messages, AssistantMessage(problem.answer, None, calls or None), *after],
            thinking_mode=False,
            tools=asked.tools,
            response_format="json_object" if problem.json_mode else "text",
        )
        assert (
            DeepseekV41Encoding().render_conversation(again).prompt.startswith(prompt_text(plain) + target_text(plain))
        )


def _json(value: object) -> str:
    import json

    return json.dumps(value)


@pytest.mark.parametrize("kind", KINDS)
def test_recipe_parses_target_tokens_into_the_right_answer(renderer: Renderer, kind: str) -> None:
    for problem in some(renderer, kind, 12):
        assert correct(problem, parsed(renderer, problem))


def parsed(renderer: Renderer, problem: Problem) -> dict[str, object]:
    """The assistant message that the recipe's stream parser makes of the target's tokens."""
    import json

    converted = ChatCompletionRequest(problem.request()).convert(OPTIONS)
    generator = ChatCompletionRequest.chunk_generator(converted, "id", "nano")
    processor = StreamProcessor(generator, converted.parsing_options, RECIPE_TOKENIZER)
    chunks = processor.push(InferenceChunk.ready())
    chunks += processor.push(InferenceChunk.tokens(renderer.split(problem)[1][:-1]))
    chunks += processor.push(InferenceChunk.finish(InferenceFinishReason.Stop))
    chunks += processor.finish()
    content, calls = "", []
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                if part.get("id"):
                    calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
                calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
    return {"content": content, "tool_calls": calls or None}


def test_only_answers_carry_full_weight(renderer: Renderer) -> None:
    mixture = TrainingMixture(renderer.count, random.Random(1))
    for _ in range(100):
        problem = mixture.next(max_distance=200)
        sample = renderer.sample(problem)
        assert set(sample.weights[sample.prompt_length :]) == {ANSWER_WEIGHT}
        earlier = sample.weights[: sample.prompt_length]
        answers = [m for m in problem.messages if m["role"] == "assistant"]
        trained = bool(answers) and not problem.thinking and not problem.tools
        assert set(earlier) == ({ANSWER_WEIGHT, PROMPT_WEIGHT} if trained else {PROMPT_WEIGHT})
        assert len(sample.ids) == len(sample.weights)


def test_spelled_spans_become_single_characters_with_the_same_text(renderer: Renderer) -> None:
    for problem in some(renderer, "strings", 40):
        text = renderer._tokenizer.decode(renderer.split(problem)[1], skip_special_tokens=False)
        assert text == target_text(problem)
