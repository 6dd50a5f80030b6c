"""One request through the stack: render, hand over, tell. Knows the order of steps, not what may be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from fabric.errors import DeadlineExceeded, Internal, InvalidArgument, ServiceError, Unavailable
from protos.deepinfer.v1 import decode_pb2, prefill_pb2, recipe_pb2
from services.gateway import prompts
from services.gateway.handoff import Cleaner, Handoff
from services.gateway.job import Finish, Job, ModelLimits, Prefetched, Prompt, Update
from services.gateway.ledger import Ledger
from services.gateway.lives import Lives, Observe
from services.gateway.narrator import Narrator
from services.gateway.openings import Openings
from services.gateway.recipes import Recipes
from services.gateway.recovery import Bounds, Recovery, RetryBudget
from services.gateway.router import Demand
from services.gateway.source import Source
from services.gateway.tap import Batch, Tap
from services.gateway.workers import Workers

# What an engine would have to enforce; tool calls need no more than the prompt.
_UNENFORCED = frozenset({"json", "regex"})


@dataclass(frozen=True, slots=True)
class _Opening:
    """A handed-over prompt with its first tokens, and their events where they were told already.

    Without a source the first token was also the last.
    """

    done: prefill_pb2.PrefillDone
    ledger: Ledger
    first: Batch
    source: Source | None
    told: list[recipe_pb2.ParseEvent] | None = None


class Conductor:
    """Leads requests; holds nothing of any. `random` draws seeds and jitter, `observe` hears of workers that failed."""

    def __init__(
        self,
        workers: Workers,
        cleaner: Cleaner,
        random: Random,
        budget: RetryBudget,
        observe: Observe,
        bounds: Bounds | None = None,
        coalesce_s: float = 0.0,
    ) -> None:
        self._workers, self._cleaner, self._random = workers, cleaner, random
        self._budget, self._observe, self._bounds = budget, observe, bounds or Bounds()
        self._coalesce_s, self._openings = coalesce_s, Openings()

    @asynccontextmanager
    async def answer(self, job: Job) -> AsyncIterator[AsyncIterator[Update]]:
        """The answer's updates, the first one ready. Leaving the context, however, frees everything it held.

        Raises:
            ServiceError: nothing was sent yet; failures after the first update come from the iterator as Unavailable.
        """
        self._budget.request()
        with ExitStack() as stack:
            recipes = Recipes(job.model, job.request_id, self._workers, self._recovery(), self._observe)
            stack.callback(recipes.close)
            recipes.open()
            prompt = await self._prepare(job, recipes)
            narrator = Narrator(recipes, _parse_start(job, prompt))
            stack.callback(narrator.close)
            lives = Lives(job, prompt, self._workers, self._cleaner, self._recovery(), self._observe, self._coalesce_s)
            stack.callback(lives.close)
            opening = await self._open(prompt, narrator, lives)
            first = await self._first(opening, narrator)
            yield self._updates(replace(first, prompt_logprobs=opening.done.prompt_logprobs), opening, narrator)

    async def prefetch(self, job: Job) -> Prefetched:
        """Has the kvstore bring up what it holds of the job's prompt. Generates nothing.

        Raises:
            ServiceError: the request itself could not be answered now, or never.
        """
        self._budget.request()
        with ExitStack() as stack:
            recipes = Recipes(job.model, job.request_id, self._workers, self._recovery(), self._observe)
            stack.callback(recipes.close)
            recipes.open()
            prompt = await self._prepare(job, recipes)
        if not job.use_cache:
            return Prefetched(len(prompt.token_ids), 0, 0)
        demand = Demand(job.model, prompt.token_ids, prompt.max_total_tokens, prompt.salt(job))
        chosen = self._workers.choose(demand, frozenset())
        try:
            scope = prompt.scope(job)
            request = prefill_pb2.PrefillServicePrefetchRequest(token_ids=prompt.token_ids, salt=job.salt, scope=scope)
            found = await chosen.prefill.prefetch(request, job.request_id)
        finally:
            chosen.settle()
        return Prefetched(len(prompt.token_ids), found.held_tokens, found.rising_tokens)

    def _recovery(self) -> Recovery:
        return Recovery(self._budget, self._bounds, self._random)

    async def _prepare(self, job: Job, recipes: Recipes) -> Prompt:
        """The prompt in tokens, with sampling decided. Costs no worker anything."""
        limits = self._workers.limits(job.model)
        prompts.refuse_early(job, limits)
        prompt = await self._rendered(job, limits, recipes)
        if not job.use_cache or not job.regions:
            return prompt
        shared = await self._openings.shared(job.regions, job.model, prompt.token_ids, recipes.render)
        return replace(prompt, shared=shared)

    async def _rendered(self, job: Job, limits: ModelLimits, recipes: Recipes) -> Prompt:
        seed = self._random.getrandbits(63)
        if job.render is None:
            return prompts.bounded(job, limits, job.token_ids, b"", limits.max_total_tokens, seed)
        try:
            rendered = await recipes.render(job.render)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field=job.named(error.field), fix=error.fix) from error
        if rendered.constraint_kind in _UNENFORCED:
            raise InvalidArgument("not supported", field="response_format", fix="use 'text'")
        default = rendered.default_max_tokens
        return prompts.bounded(job, limits, rendered.token_ids, rendered.parsing_options, default, seed)

    async def _open(self, prompt: Prompt, narrator: Narrator, lives: Lives) -> _Opening:
        """Hands the prompt over until the first tokens are there, on another pair where one fails."""
        while True:
            handoff = lives.begin()
            try:
                opening = await self._attempt(prompt, handoff, narrator, lives)
            except ServiceError as error:
                narrator.close()
                if handoff.suspect == "recipe":
                    raise
                await lives.lost(error, handoff.suspect)
            else:
                lives.passage.confirmed(opening.first.token_ids)
                return opening

    async def _attempt(self, prompt: Prompt, handoff: Handoff, narrator: Narrator, lives: Lives) -> _Opening:
        ledger = Ledger(len(prompt.token_ids))
        await handoff.start(ledger)
        handoff.suspect = "recipe"
        await narrator.open()
        done = await handoff.receipt()
        ledger.prefilled(lives.cached_tokens or 0)
        first = done.receipt.first_token
        logprobs = [first.logprob] if prompt.sampling.logprobs is not None else []
        drawn = done.receipt.HasField("first_token")  # otherwise decode replays the last window and draws it
        reason = prompts.finish_of(prompt, first.token_id, 1) if drawn else None
        if reason is None:
            tap = await handoff.generate(done.receipt)
            source = Source(lives, handoff, ledger, tap, self._coalesce_s)
            if not drawn:
                return _Opening(done, ledger, await tap.take(), source)
            batch, told = await _verified_and_told(handoff, tap, narrator, Batch(0, [first.token_id], logprobs))
            return _Opening(done, ledger, batch, source, told)
        ledger.take(0, 1)
        finish = decode_pb2.DecodeFinish(reason=reason, completion_tokens=1)
        return _Opening(done, ledger, Batch(0, [first.token_id], logprobs, finish), None)

    async def _first(self, opening: _Opening, narrator: Narrator) -> Update:
        """What the first tokens say, as far as it was not told already."""
        batch, told = opening.first, opening.told
        if told is None:
            return await self._update(opening, narrator, batch)
        if batch.finish is None:
            return Update(batch, told)
        end = await self._update(opening, narrator, replace(batch, token_ids=(), logprobs=()))
        return replace(end, batch=batch, events=[*told, *end.events])

    async def _updates(self, first: Update, opening: _Opening, narrator: Narrator) -> AsyncIterator[Update]:
        update = first
        yield update
        while update.finish is None and opening.source is not None:
            try:
                update = await self._update(opening, narrator, await opening.source.take())
            except ServiceError as error:
                raise _broken(error) from error
            yield update

    async def _update(self, opening: _Opening, narrator: Narrator, batch: Batch) -> Update:
        finish = batch.finish
        if finish is None:
            return Update(batch, await narrator.tell(batch))
        usage = opening.ledger.close(finish.completion_tokens)
        told = await narrator.end(batch, finish.reason, finish.stop, usage)
        if opening.source is not None:
            opening.source.finished()
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
