"""The account of one answer: tokens arrive densely and usage adds up. Knows counts alone."""

from __future__ import annotations

from fabric.errors import Internal
from protos.deepinfer.v1 import common_pb2


class Ledger:
    """Counts one request's tokens and refuses what cannot be."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.completion_tokens = 0

    def prefilled(self, cached_tokens: int) -> None:
        """Takes prefill's account, the only source of `cached_tokens`.

        Raises:
            Internal: more tokens cached than the prompt has.
        """
        if cached_tokens > self.prompt_tokens:
            raise Internal(f"prefill counts {cached_tokens} cached tokens of {self.prompt_tokens}")
        self.cached_tokens = cached_tokens

    def take(self, first_index: int, count: int) -> None:
        """Counts a batch.

        Raises:
            Internal: the batch does not follow on the one before: a token is missing or came twice.
        """
        if first_index != self.completion_tokens:
            raise Internal(f"decode sent token {first_index} where {self.completion_tokens} was due")
        self.completion_tokens += count

    def resume(self, at: int) -> None:
        """Other workers go on, beginning with token `at`, which arrived before.

        Raises:
            Internal: that would leave a gap.
        """
        if at > self.completion_tokens:
            raise Internal(f"an answer of {self.completion_tokens} tokens cannot go on at token {at}")
        self.completion_tokens = at

    def close(self, completion_tokens: int) -> common_pb2.Usage:
        """The final account, which must agree with decode's own count.

        Raises:
            Internal: it does not.
        """
        if completion_tokens != self.completion_tokens:
            raise Internal(f"decode counts {completion_tokens} tokens, {self.completion_tokens} arrived")
        return common_pb2.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )
