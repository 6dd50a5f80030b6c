"""Passage: what a request takes along from one pair of workers to the next. Knows its messages, no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from fabric.errors import Internal
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2, decode_pb2, prefill_pb2
from services.gateway import prompts, sampling
from services.gateway.job import Prompt

_log = logs.get("passage")

Opening = prefill_pb2.PrefillStart | decode_pb2.DecodeServiceGenerateRequest


class Carried(Protocol):
    """One piece of state that decides tokens to come.

    It is rebuilt from the tokens that the gateway was shown: nothing has to be fetched from a worker that may be dead.
    """

    def confirmed(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer, each shown once, in order."""

    def pack(self, opening: Opening) -> None:
        """Writes itself into the message that begins a life at a worker."""


class Output:
    """The answer's tokens so far.

    The newest one does not travel as computed but as the one just drawn: so whatever ends with it (a stop string, the
    length) is found by decode as if nothing had happened, even where only the word of the end was lost. Where decode
    replays the last window and draws the first token itself (`replays`), all travel as computed.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt, self.tokens, self.replays = prompt, list[int](), False

    @property
    def earlier(self) -> int:
        """Tokens before the first that the next workers give."""
        return len(self.tokens) if self.replays else max(0, len(self.tokens) - 1)

    @property
    def computed(self) -> Sequence[int]:
        """The tokens whose KV the next workers need."""
        return [*self._prompt, *self.tokens[: self.earlier]] if self.earlier else self._prompt

    def confirmed(self, token_ids: Sequence[int]) -> None:
        self.tokens.extend(token_ids)

    def pack(self, opening: Opening) -> None:
        opening.token_ids.extend(self.computed)
        opening.emitted_tokens = self.earlier


class Sampling:
    """The request's sampling: its seed is fixed, so that draw i is the same whoever makes it."""

    def __init__(self, prompt: Prompt) -> None:
        self._message = sampling.pack(prompt.sampling)
        self._again = sampling.pack(replace(prompt.sampling, prompt_logprobs=None))

    def confirmed(self, token_ids: Sequence[int]) -> None:
        """The prompt's log probabilities came with the first token."""
        self._message = self._again

    def pack(self, opening: Opening) -> None:
        opening.sampling.CopyFrom(self._message)


class Passage:
    """Everything of one request that workers need, as of now. `more` registers further pieces."""

    def __init__(self, prompt: Prompt, *more: Carried) -> None:
        self._prompt, self._output = prompt, Output(prompt.token_ids)
        self._pieces: tuple[Carried, ...] = (self._output, Sampling(prompt), *more)

    @property
    def begun(self) -> bool:
        """Whether the client may have seen a token."""
        return bool(self._output.tokens)

    @property
    def repeats(self) -> bool:
        """Whether the next workers give the newest token once more."""
        return self.begun and not self._output.replays

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens whose KV the next workers need."""
        return self._output.computed

    @property
    def emitted(self) -> int:
        """Index of the token that the next workers give first."""
        return self._output.earlier

    def to(self, replays: bool) -> None:
        """Turns to the next workers, whose decode replays or not."""
        self._output.replays = replays

    def finish(self) -> decode_pb2.DecodeFinish | None:
        """How the answer ended, where its newest token tells that it did."""
        tokens = self._output.tokens
        reason = prompts.finish_of(self._prompt, tokens[-1], len(tokens)) if tokens else None
        return None if reason is None else decode_pb2.DecodeFinish(reason=reason, completion_tokens=len(tokens))

    def confirmed(self, token_ids: Sequence[int]) -> None:
        """Shows the next tokens of the answer to every piece."""
        if token_ids:
            for piece in self._pieces:
                piece.confirmed(token_ids)

    def pack(self, opening: Opening) -> None:
        for piece in self._pieces:
            piece.pack(opening)

    def settled(self, receipt: common_pb2.Receipt) -> common_pb2.Receipt:
        """The receipt of a later life: the token that counts is the one that the client has.

        Prefill draws the same one wherever results do not depend on the batch.

        Raises:
            Internal: it does not end as the workers' layout says.
        """
        if receipt.HasField("first_token") != self.repeats:
            raise Internal("prefill's receipt does not end as its layout says")
        if self.repeats and receipt.first_token.token_id != self._output.tokens[-1]:
            _log.info("drawn anew differently", index=self.emitted)
            receipt.first_token.token_id = self._output.tokens[-1]
        return receipt

    def require_newest(self, token_ids: Sequence[int]) -> None:
        """Raises Internal where decode does not begin with the newest token, which the receipt named."""
        if list(token_ids) != self._output.tokens[-1:]:
            raise Internal("decode does not begin with the receipt's token")
