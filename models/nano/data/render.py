"""Problems as deepseek-recipe renders them: prompt text, target text, token ids and loss weights. Owns no template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from deepseek_recipe import (
    AssistantMessage,
    ChatCompletionRequest,
    Conversation,
    ConversionOptions,
    DeepseekV41Encoding,
    ModelVersion,
    SpecialToken,
    ToolCall,
    ToolMessage,
)
from tokenizers import Tokenizer

from models.nano.data.problem import SPELL_CLOSE, SPELL_OPEN, Problem

OPTIONS = ConversionOptions().with_model_alias("nano", ModelVersion.DeepseekV41Flash)
ENCODING = DeepseekV41Encoding()
EOS = SpecialToken.Eos.default_str()
THINK_END = SpecialToken.ThinkingEnd.default_str()
ASSISTANT = SpecialToken.Assistant.default_str()
SPELLED = re.compile(f"({SPELL_OPEN}[^{SPELL_CLOSE}]*{SPELL_CLOSE})")
ANSWER_WEIGHT, PROMPT_WEIGHT, TEXT_WEIGHT = 255, 12, 96


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one training document and, for each, the weight (0..255) of predicting it."""

    ids: list[int]
    weights: list[int]
    prompt_length: int


def conversation_of(problem: Problem) -> Conversation:
    """The request as the gateway would send it, converted by the recipe."""
    return ChatCompletionRequest(problem.request()).convert(OPTIONS).conversation


def _call_block(problem: Problem) -> str:
    """The DSML block of the problem's calls, cut from the recipe's own rendering of a finished turn."""
    calls = [ToolCall(f"call_{i}", call.name, json.dumps(call.arguments)) for i, call in enumerate(problem.calls)]
    results = [ToolMessage("", call.id) for call in calls]
    turn = AssistantMessage("", None, calls)
    plain = Conversation([*conversation_of(problem).messages, turn, *results], thinking_mode=False)
    rendered: str = ENCODING.render_conversation(plain).prompt
    end = rendered.rindex(EOS)
    return rendered[rendered.rindex(THINK_END, 0, end) + len(THINK_END) : end]


def prompt_text(problem: Problem) -> str:
    """What the model is given."""
    prompt: str = ENCODING.render_conversation(conversation_of(problem)).prompt
    return prompt


def target_text(problem: Problem) -> str:
    """What the model must write, end-of-sentence included; spelled spans stay marked."""
    body = _call_block(problem) if problem.calls else problem.content
    head = f"{problem.reasoning}{THINK_END}" if problem.thinking else ""
    return f"{head}{body}{EOS}"


class Renderer:
    """Problems -> token ids, with nano's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Texts are drawn from a few hundred words, and most drawn problems are not held out: counted once, a word is
        # looked up ever after.
        self._word_length = lru_cache(1 << 16)(self._tokens_of_word)
        self._assistant, self._eos = self._id(ASSISTANT), self._id(EOS)

    def _id(self, text: str) -> int:
        number = self._tokenizer.token_to_id(text)
        if number is None:
            raise ValueError(f"the tokenizer has no entry {text!r}: is it nano's tokenizer.json?")
        return int(number)

    def count(self, text: str) -> int:
        """Tokens of a sentence inside a text, its words one space apart: nano's tokens never span such a space."""
        return sum(map(self._word_length, text.split(" ")))

    def _tokens_of_word(self, word: str) -> int:
        return len(self._tokenizer.encode(f" {word}", add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens are spelled out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_target(self, text: str) -> list[int]:
        """As `encode`, but marked spans become one token a character."""
        ids: list[int] = []
        for part in SPELLED.split(text):
            if part.startswith(SPELL_OPEN):
                ids += [self._id(letter) for letter in part[1:-1]]
            elif part:
                ids += self.encode(part)
        return ids

    def split(self, problem: Problem) -> tuple[list[int], list[int]]:
        """(prompt ids, target ids)."""
        return self.encode(prompt_text(problem)), self.encode_target(target_text(problem))

    def sample(self, problem: Problem) -> Sample:
        """One training document. Without thinking, earlier answers count as much as the last one."""
        prompt, target = self.split(problem)
        weights = [PROMPT_WEIGHT] * len(prompt)
        if not problem.thinking and not problem.tools:
            self._weigh_answers(prompt, weights)
        return Sample(prompt + target, weights + [ANSWER_WEIGHT] * len(target), len(prompt))

    def _weigh_answers(self, prompt: list[int], weights: list[int]) -> None:
        inside = False
        for place, token in enumerate(prompt):
            if inside and prompt[place - 1] != self._assistant:
                weights[place] = ANSWER_WEIGHT
            inside = token != self._eos and (inside or token == self._assistant)

    def document(self, text: str) -> Sample:
        """Plain text as one training document, every token of moderate weight."""
        ids = [*self.encode(text), self._eos]
        return Sample(ids, [TEXT_WEIGHT] * len(ids), 1)
