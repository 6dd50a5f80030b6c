"""One request through the stack: render, choose, hand over, tell. Knows the order of steps and what may be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from fabric.errors import DeadlineExceeded, Internal, InvalidArgument, ServiceError, StaleTicket, Unavailable
from protos.deepinfer.v1 import decode_pb2, prefill_pb2, recipe_pb2
from services.gateway import prompts
from services.gateway.handoff import Cleaner, Handoff
from services.gateway.job import Finish, Job, Prompt, Update
from services.gateway.ledger import Ledger
from services.gateway.narrator import Narrator
from services.gateway.peers import Recipe
from services.gateway.router import Demand
from services.gateway.tap import Batch, Tap
from services.gateway.workers import Chosen, Workers

# Attempts after the first, all before the client saw a token.
RETRIES = 1
_BACKOFF_S = (0.05, 0.15)
# What an engine would have to enforce; tool calls need no more than the prompt.
_UNENFORCED = frozenset({"json", "regex"})


@dataclass(frozen=True, slots=True)
class _Opening:
    """A handed-over prompt with its first tokens, and their events where they were told already.

    Without a tap the first token was also the last.
    """

    handoff: Handoff
    done: prefill_pb2.PrefillDone
    ledger: Ledger
    first: Batch
    tap: Tap | None
    told: list[recipe_pb2.ParseEvent] | None = None


class Conductor:
    """Leads requests; holds nothing of any of them. `random` draws seeds and jitter."""

    def __init__(self, workers: Workers, cleaner: Cleaner, random: Random, coalesce_s: float = 0.0) -> None:
        self._workers, self._cleaner, self._random = workers, cleaner, random
        self._coalesce_s = coalesce_s
        self.retries = 0

    @asynccontextmanager
    async def answer(self, job: Job) -> AsyncIterator[AsyncIterator[Update]]:
        """The answer's updates, the first one ready. Leaving the context, however, frees everything it held.

        Raises:
            ServiceError: nothing was sent yet; failures after the first update come from the iterator as Unavailable.
        """
        async with AsyncExitStack() as stack:
            recipe = stack.enter_context(self._workers.recipe(job.model))
            prompt = await self._prepare(job, recipe)
            narrator = Narrator(recipe, _parse_start(job, prompt))
            stack.callback(narrator.close)
            opening = await self._open(job, prompt, narrator, stack)
            if opening.told is not None:
                first = Update(opening.first, opening.told)
            else:
                first = await self._update(opening, narrator, opening.first)
            yield self._updates(replace(first, prompt_logprobs=opening.done.prompt_logprobs), opening, narrator)

    async def _prepare(self, job: Job, recipe: Recipe) -> Prompt:
        """The prompt in tokens, with sampling decided. Costs no worker anything."""
        limits = self._workers.limits(job.model)
        prompts.refuse_early(job, limits)
        seed = self._random.getrandbits(63)
        if job.render is None:
            return prompts.bounded(job, limits, job.token_ids, b"", limits.max_total_tokens, seed)
        rendered = await recipe.render(job.render, job.request_id)
        if rendered.constraint_kind in _UNENFORCED:
            raise InvalidArgument("not supported", field="response_format", fix="use 'text'")
        default = rendered.default_max_tokens
        return prompts.bounded(job, limits, rendered.token_ids, rendered.parsing_options, default, seed)

    async def _open(self, job: Job, prompt: Prompt, narrator: Narrator, stack: AsyncExitStack) -> _Opening:
        """Hands the prompt over until the first tokens are there, on another pair if the first one fails."""
        demand = Demand(job.model, prompt.token_ids, prompt.max_total_tokens, job.salt, job.use_cache)
        failed, failure = "", None
        for attempt in range(RETRIES + 1):
            chosen = self._choose(demand, failed, failure)
            attempt_id = f"{job.request_id}.{attempt}" if attempt else job.request_id
            handoff = Handoff(job, prompt, chosen.prefill, chosen.decode, self._cleaner, attempt_id)
            held = AsyncExitStack()
            held.callback(chosen.settle)
            held.callback(handoff.close)
            try:
                opening = await self._attempt(prompt, chosen, handoff, narrator)
            except ServiceError as error:
                narrator.close()
                await held.aclose()
                if attempt == RETRIES or not _repeatable(error, handoff):
                    raise
                failed, failure = chosen.key_of(handoff.suspect), error
            except BaseException:
                await held.aclose()
                raise
            else:
                stack.push_async_exit(held.pop_all())
                return opening
            self.retries += 1
            await asyncio.sleep(self._random.uniform(*_BACKOFF_S))
        raise RuntimeError("the last attempt neither returned nor raised")

    def _choose(self, demand: Demand, failed: str, failure: ServiceError | None) -> Chosen:
        """A pair without the worker that failed, or with it where it is alone."""
        try:
            return self._workers.choose(demand, frozenset({failed}) if failed else frozenset())
        except Unavailable:
            if failure is None:
                raise
            return self._workers.choose(demand, frozenset())

    async def _attempt(self, prompt: Prompt, chosen: Chosen, handoff: Handoff, narrator: Narrator) -> _Opening:
        await handoff.start(chosen.layout_fingerprint, chosen.model_revision)
        handoff.suspect = "recipe"
        await narrator.open()
        done = await handoff.receipt()
        ledger = Ledger(len(prompt.token_ids))
        ledger.prefilled(done.usage)
        first = done.receipt.first_token
        logprobs = [first.logprob] if prompt.sampling.logprobs is not None else []
        drawn = done.receipt.HasField("first_token")  # otherwise decode replays the last window and draws it
        reason = prompts.finish_of_first(prompt, first.token_id) if drawn else None
        if reason is None:
            tap = await handoff.generate(done.receipt, ledger)
            if not drawn:
                return _Opening(handoff, done, ledger, await tap.take(), tap)
            batch, told = await _verified_and_told(handoff, tap, narrator, Batch(0, [first.token_id], logprobs))
            return _Opening(handoff, done, ledger, batch, tap, told)
        ledger.take(0, 1)
        finish = decode_pb2.DecodeFinish(reason=reason, completion_tokens=1)
        return _Opening(handoff, done, ledger, Batch(0, [first.token_id], logprobs, finish), None)

    async def _updates(self, first: Update, opening: _Opening, narrator: Narrator) -> AsyncIterator[Update]:
        update = first
        yield update
        while update.finish is None and opening.tap is not None:
            try:
                if self._coalesce_s:
                    await opening.tap.gather(self._coalesce_s)
                update = await self._update(opening, narrator, await opening.tap.take())
            except ServiceError as error:
                raise _broken(error) from error
            yield update

    async def _update(self, opening: _Opening, narrator: Narrator, batch: Batch) -> Update:
        finish = batch.finish
        if finish is None:
            return Update(batch, await narrator.tell(batch))
        usage = opening.ledger.close(finish.completion_tokens)
        told = await narrator.end(batch, finish.reason, finish.stop, usage)
        if opening.tap is not None:
            opening.handoff.finished()
        usage.reasoning_tokens = told.done.reasoning_tokens
        return Update(batch, told.events, finish=Finish(told.done.reason, finish.stop, usage))


async def _verified_and_told(
    handoff: Handoff, tap: Tap, narrator: Narrator, first: Batch
) -> tuple[Batch, list[recipe_pb2.ParseEvent]]:
    """The first token as decode confirms it once its KV is verified, and its events, made by the recipe meanwhile."""
    telling = asyncio.create_task(narrator.tell(first), name="first token")
    try:
        confirmed = await tap.take(most=1)
        if list(confirmed.token_ids) != list(first.token_ids):
            raise Internal(f"decode begins with {list(confirmed.token_ids)}, prefill drew {list(first.token_ids)}")
        handoff.suspect = "recipe"
        return confirmed, await telling
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


def _repeatable(error: ServiceError, handoff: Handoff) -> bool:
    return handoff.suspect != "recipe" and (error.retryable or isinstance(error, StaleTicket))


def _broken(error: ServiceError) -> ServiceError:
    if isinstance(error, DeadlineExceeded):
        return error
    return Unavailable(
        f"the answer broke off: {error.message}",
        fix="what was sent so far is valid; send the request again for a whole answer",
    )


def _parse_start(job: Job, prompt: Prompt) -> recipe_pb2.ParseStart:
    return recipe_pb2.ParseStart(
        dialect=job.dialect,
        parsing_options=prompt.parsing_options,
        request_id=job.request_id,
        model=job.model,
        prompt_tokens=len(prompt.token_ids),
        created=job.created,
        stream=job.stream,
        include_usage=job.include_usage,
        stop=prompt.sampling.stop,
    )
