"""Asks: one request as prefill takes it, and the ticket that tells where its KV goes. Values and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model import ModelInfo
from engine.prefix import Salt
from engine.requests import PrefillRequest
from engine.sampling.params import SamplingParams
from fabric.errors import InvalidArgument
from fabric.records import Landing
from fabric.retention import UNOWNED, Keeping
from services.worker.geometry import Handoff
from services.worker.pairing import Records, require_pair


@dataclass(frozen=True, slots=True)
class PrefillAsk:
    """`tokens` end with `emitted_tokens` tokens that were generated earlier."""

    request_id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    salt: Salt
    use_cache: bool
    emitted_tokens: int = 0
    keeping: Keeping = UNOWNED

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt itself."""
        return len(self.tokens) - self.emitted_tokens

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks may stand in for computing: not where every prompt token's logits are wanted."""
        return self.use_cache and self.sampling.prompt_logprobs is None

    def validate(self, max_prompt_tokens: int) -> None:
        """Raises InvalidArgument for what the engine does not look at."""
        if not 0 <= self.emitted_tokens < max(1, len(self.tokens)):
            raise InvalidArgument(
                f"{self.emitted_tokens} of {len(self.tokens)} tokens leave no prompt",
                field="start.emitted_tokens",
                fix="send the prompt and what was generated after it",
            )
        if len(self.tokens) > max_prompt_tokens:
            raise InvalidArgument(
                f"{len(self.tokens)} tokens; this worker takes {max_prompt_tokens}",
                field="start.token_ids",
                fix="shorten the prompt",
            )

    def request(self) -> PrefillRequest:
        """The engine's form."""
        prompt, emitted = self.tokens[: self.prompt_tokens], self.tokens[self.prompt_tokens :]
        return PrefillRequest(
            self.request_id,
            prompt,
            self.sampling,
            salt=self.salt,
            cache=self.use_cache,
            emitted=emitted,
            offer_as=self.keeping,
        )


@dataclass(frozen=True, slots=True)
class TicketGrant:
    """The neutral form of `deepinfer.v1.Ticket` for one decode rank."""

    id: str
    request_id: str
    epoch: int
    landing: Landing
    records: Records
    held_tokens: int
    lease_s: float

    def handoff(self, ask: PrefillAsk, model: ModelInfo) -> Handoff:
        """Where this prompt's extents go, in blocks of this side.

        Raises:
            InvalidArgument: the ticket is of another request, model or layout, or has too little room.
        """
        if self.request_id != ask.request_id:
            raise InvalidArgument(
                f"the ticket is for request {self.request_id!r}, this is {ask.request_id!r}",
                field="ticket.request_id",
                fix="attach the ticket that was reserved for this request",
            )
        require_pair(Records(model.revision, model.layout), self.records)
        try:
            handoff = Handoff.beyond(model.layout, len(ask.tokens), self.held_tokens)
        except ValueError as error:
            raise InvalidArgument(str(error), field="ticket.held_tokens", fix="reserve again") from error
        if self.landing.size < min(handoff.landing_bytes, model.layout.largest_extent):
            raise InvalidArgument(
                f"the landing has {self.landing.size} bytes, one extent needs {model.layout.largest_extent}",
                field="ticket.landings",
                fix="reserve for the whole prompt",
            )
        return handoff
