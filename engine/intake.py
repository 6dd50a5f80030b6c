"""Intake: turns requests into sequences, or refuses them before any work. Knows limits, not what is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.detokenize import Decode
from engine.errors import InvalidParameter
from engine.images import ImageSpan, marks, require_images
from engine.model import ModelInfo
from engine.prefix import KeyChain, PrefixIdentity, RegionSalt, Salt
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest
from engine.sampling.params import is_integer, require_vocabulary
from engine.sequence import Role, Sequence
from engine.stops import StopWatch

MAX_PRIORITY = 8
_PASSES_PER_PRIORITY = 64  # bounded, so that no priority can starve another
_MAX_SALT_BYTES = 256
_REMEMBERED = 4  # prompts

Request = GenerateRequest | PrefillRequest | DecodeRequest


class Intake:
    """Owns the arrival counter. `total_blocks` bounds what a single request may ever need."""

    def __init__(self, model: ModelInfo, total_blocks: int, decode: Decode | None, clock: Callable[[], float]) -> None:
        self._model, self._total_blocks, self._decode, self._clock = model, total_blocks, decode, clock
        layout = model.layout
        self._identity = PrefixIdentity(model.revision, layout.fingerprint, layout.window_policy, layout.block_tokens)
        self._arrivals = 0
        # A prompt is looked up, loaded and computed within moments. Of the newest ones it is known that they are fit,
        # and which keys they have. They are found by identity: comparing thousands of tokens would take as long.
        self._fit: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED)
        self._chains: deque[tuple[Salt, tuple[int, ...], KeyChain]] = deque(maxlen=_REMEMBERED)

    def chain(self, salt: Salt, tokens: tuple[int, ...] | list[int], images: tuple[ImageSpan, ...] = ()) -> KeyChain:
        """Prefix keys of `tokens`, with these images among them, for the tenant of `salt`."""
        for part in (salt.tenant, salt.region) if isinstance(salt, RegionSalt) else (salt,):
            if not isinstance(part, bytes) or len(part) > _MAX_SALT_BYTES:
                raise InvalidParameter("salt", "is not bytes or too long", f"use at most {_MAX_SALT_BYTES} bytes")
        if images or not tokens or not isinstance(tokens, tuple):
            return self._made(salt, tokens, images)
        found = next((chain for at, of, chain in self._chains if of is tokens and at == salt), None)
        if found is None:
            found = self._made(salt, tokens, images)
            self._chains.append((salt, tokens, found))
        return found.copy()

    def _made(self, salt: Salt, tokens: tuple[int, ...] | list[int], images: tuple[ImageSpan, ...]) -> KeyChain:
        chain = KeyChain(salt, self._identity, marks(images))
        chain.grow(tokens)
        return chain

    def sequence(self, request: Request, role: Role) -> Sequence:
        """A fresh sequence. Raises InvalidParameter, naming the field, for anything that could never finish."""
        self.check_tokens("prompt", request.prompt)
        self._check(request)
        params = request.sampling
        watch = StopWatch(params, self._model.eos_token_ids, self._decode)
        tokens = [*request.prompt, *request.emitted]
        keyed = tokens if request.emitted else request.prompt
        sequence = Sequence(
            request_id=request.request_id,
            role=role,
            prompt_tokens=len(request.prompt),
            tokens=tokens,
            output=list(request.emitted),
            sampling=params,
            seed=request.state.seed if isinstance(request, DecodeRequest) else params.seed_for(request.request_id),
            cache=request.cache,
            rank=self._arrivals - request.priority * _PASSES_PER_PRIORITY,
            arrived_s=self._clock(),
            chain=self.chain(request.salt, keyed if request.cache else (), request.images),
            watch=watch,
            images=request.images,
            offer_as=request.offer_as if request.cache else None,
        )
        self._bound(sequence)
        self._replay(sequence, may_end=isinstance(request, DecodeRequest) and not request.replays)
        self._arrivals += 1
        return sequence

    def check_tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        """Raise InvalidParameter unless `tokens` is a non-empty tuple of ids of the vocabulary."""
        if any(tokens is fit for fit in self._fit):
            return
        if not isinstance(tokens, tuple) or not all(map(is_integer, tokens)):
            raise InvalidParameter(field, "must be a tuple of integers", "send token ids")
        if not tokens:
            raise InvalidParameter(field, "is empty", "send at least one token")
        require_vocabulary(field, tokens, self._model.vocab_size)
        self._fit.append(tokens)

    def check_size(self, field: str, total_tokens: int) -> None:
        """Raise InvalidParameter if `total_tokens` exceed the context or the whole KV memory."""
        limit = min(self._model.max_context_tokens, self._total_blocks * self._model.layout.block_tokens)
        if total_tokens > limit:
            raise InvalidParameter(
                field, f"{total_tokens} tokens are more than this engine can hold", f"use at most {limit} in all"
            )

    def _check(self, request: Request) -> None:
        if not isinstance(request.request_id, str) or not request.request_id:
            raise InvalidParameter("request_id", "must be a non-empty string", "send an id")
        if not is_integer(request.priority) or abs(request.priority) > MAX_PRIORITY:
            raise InvalidParameter(
                "priority", f"{request.priority} is out of range", f"use -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )
        require_images(request.images, request.prompt, self._model.image_input)
        params = request.sampling
        params.validate(self._model.vocab_size)
        if params.stop and self._decode is None:
            raise InvalidParameter("stop", "this model has no tokenizer.json", "use stop_token_ids")
        replays = isinstance(request, DecodeRequest) and request.replays
        if replays and not self._model.layout.replay.handoff:
            raise InvalidParameter("replays", "this model's windows are handed over", "send the token prefill drew")
        if request.emitted or (isinstance(request, DecodeRequest) and not replays):
            self.check_tokens("emitted", request.emitted)
        self.check_size("prompt", len(request.prompt) + 1)
        self.check_size("max_tokens", len(request.prompt) + params.max_tokens)

    def _bound(self, sequence: Sequence) -> None:
        """How far up the model its tokens go: all of them where every prompt token's logits are wanted."""
        replay = self._model.layout.replay
        if sequence.sampling.prompt_logprobs is None:
            sequence.entries_only = replay.handoff and sequence.role is Role.PREFILL
            sequence.upper_from = replay.start(sequence.prompt_tokens) if replay.decoder else 0
            if sequence.entries_only:
                sequence.upper_from = sequence.total_tokens

    def _replay(self, sequence: Sequence, may_end: bool) -> None:
        """Show the stop watch the output of earlier lives; only the token before a decode may already be the last."""
        for index, token in enumerate(sequence.output):
            sequence.stop = sequence.watch.push(token)
            if sequence.stop is not None and not (may_end and index == len(sequence.output) - 1):
                raise InvalidParameter("emitted", f"token {index} already ends the request", "do not continue it")
