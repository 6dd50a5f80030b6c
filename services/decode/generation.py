"""Generation: one Generate call from its receipt to its last token. Verifies first; nothing is decoded before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.errors import EngineError
from engine.events import Failed, Finished, TokensOut
from engine.layout import Layout
from engine.requests import DecodeRequest
from engine.runner import EngineRunner
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingParams
from engine.stops import FinishReason
from fabric import failpoints
from fabric.errors import InvalidArgument
from services.decode.desk import Desk, Holding
from services.worker.failures import engine_errors, translate
from services.worker.receipts import Receipt

_VERIFIED = failpoints.declare("decode.verified")  # all KV is verified, nothing was decoded
LONGEST_GATHER_S = 1.0
_TOKEN = failpoints.declare("decode.token")  # a token after the first was drawn and not sent


@dataclass(frozen=True, slots=True)
class GenerateAsk:
    """`tokens` are those reserved; the last `emitted_tokens` of them were generated earlier. Tokens after the first
    leave in portions, about `gather_s` seconds apart."""

    ticket_id: str
    request_id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    receipt: Receipt
    emitted_tokens: int
    gather_s: float = 0.0

    def request(self, holding: Holding, layout: Layout) -> DecodeRequest:
        """The engine's form: the receipt's token, if prefill drew one, is the newest one emitted. What was verified
        is the ticket's, so that is what the engine is asked for.

        Blocks of another size than prefill's are in no prefix that a prefill like this one would look up.
        """
        asked = holding.ask
        alike = asked.records.layout.fingerprint == layout.fingerprint
        cut, drawn = len(self.tokens) - self.emitted_tokens, self.receipt.first_token
        return DecodeRequest(
            holding.ticket_id,
            self.tokens[:cut],
            (*self.tokens[cut:], *(() if drawn is None else (drawn,))),
            self.sampling,
            self.receipt.state,
            salt=asked.salt,
            cache=asked.use_cache,
            replays=drawn is None,
            offer_as=asked.keeping if alike else None,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens that became ready together; `first_index` counts all generated tokens from 0."""

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The last message: nothing but the reason."""

    first_index: int
    reason: FinishReason
    stop: str


Emit = Callable[[Batch | End], Awaitable[None]]


async def generate(engine: EngineRunner, desk: Desk, holding: Holding, ask: GenerateAsk, emit: Emit) -> None:
    """Verifies the handoff, then emits every token from the first new one on, and the end.

    Raises:
        InvalidArgument, DataLoss: the receipt or the landing is not what the ticket needs; no token was emitted.
        ServiceError: the engine failed this request.
    """
    _check(engine, holding, ask)
    await desk.verify(holding, ask.receipt)
    await _VERIFIED.reached()
    if ask.receipt.first_token is not None:
        logprobs = (ask.receipt.logprob,) if ask.receipt.logprob is not None else ()
        await emit(Batch(ask.emitted_tokens, (ask.receipt.first_token,), logprobs))
    try:
        await _follow(engine, ask.request(holding, engine.engine.model.layout), ask.gather_s, emit)
    except EngineError as error:
        raise translate(error) from error


async def _follow(engine: EngineRunner, request: DecodeRequest, gather_s: float, emit: Emit) -> None:
    async with engine.running(request, gather_s) as events:
        async for event in events:
            match event:
                case TokensOut():
                    await _TOKEN.reached()
                    await emit(Batch(event.first_index, event.token_ids, event.logprobs or ()))
                case Failed():
                    raise translate(event.error)
                case Finished():
                    stop = event.stop_match.string if event.stop_match is not None else None
                    await emit(End(event.usage.output_tokens, event.reason, stop or ""))


def _check(engine: EngineRunner, holding: Holding, ask: GenerateAsk) -> None:
    if ask.tokens != holding.ask.tokens:
        raise InvalidArgument("not the tokens that were reserved", field="token_ids", fix="send what Reserve was sent")
    if ask.gather_s > LONGEST_GATHER_S:
        raise InvalidArgument("too long", field="gather_ms", fix=f"at most {1000 * LONGEST_GATHER_S:.0f}")
    if not 0 <= ask.emitted_tokens < len(ask.tokens):
        raise InvalidArgument("leaves no prompt", field="emitted_tokens", fix="count the generated tokens of token_ids")
    vocabulary = engine.engine.model.vocab_size
    if not 0 <= (ask.receipt.first_token or 0) < vocabulary:
        raise InvalidArgument("not a token id", field="receipt.first_token", fix=f"use ids from 0 to {vocabulary - 1}")
    with engine_errors():
        ask.sampling.validate(vocabulary)
