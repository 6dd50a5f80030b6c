"""The pool: every worker and recipe that discovery names and that answers. Knows membership; routing decides."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fabric.discovery import Discovery, MemberInfo
from fabric.errors import NotFound, ServiceError, Unavailable
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2, decode_pb2_grpc, gateway_pb2, prefill_pb2_grpc, recipe_pb2_grpc
from services.gateway.follower import DecodeSide, Follower, Patience, PrefillSide, RecipeSide, Side
from services.gateway.job import ModelLimits
from services.gateway.link import Link
from services.gateway.mirror import Doubt, Knowledge
from services.gateway.peers import GrpcDecode, GrpcPrefill, GrpcRecipe, Recipe
from services.gateway.router import Demand, Router, Worker
from services.gateway.standing import Standing
from services.gateway.workers import Chosen

_log = logs.get("pool")
# The longest deadline a call may have: after it no stream is left on a link.
_RETIRE_S = 3600.0


@dataclass(slots=True)
class _Entry:
    """One instance: its link, the task that follows it, and what is known of it so far."""

    link: Link
    task: asyncio.Task[None]
    standing: Standing | None = None

    @property
    def serves(self) -> str:
        """The model that this worker named, itself or in discovery; "" while it has not."""
        return self.standing.limits.model.name if self.standing is not None else self.link.member.model

    @property
    def layout(self) -> common_pb2.Layout:
        """As the worker told it; empty while it has not."""
        return self.standing.limits.model.layout if self.standing is not None else common_pb2.Layout()


class Pool:
    """`run` keeps it true; everything else answers from memory."""

    def __init__(
        self,
        discovery: Discovery,
        router: Router,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discovery, self._router, self._clock = discovery, router, clock
        self._patience = patience
        self._prefill: dict[str, _Entry] = {}
        self._decode: dict[str, _Entry] = {}
        self._recipe: dict[str, _Entry] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self.doubts: Counter[Doubt] = Counter()  # how often a worker's keys became doubtful, by reason
        self._turn = 0

    async def run(self) -> None:
        """Follows discovery until cancelled, then closes every link."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._members("prefill", self._prefill, self._follow_prefill))
                group.create_task(self._members("decode", self._decode, self._follow_decode))
                group.create_task(self._members("recipe", self._recipe, self._follow_recipe))
        finally:
            await self._close()

    def ready(self) -> bool:
        """Whether a request for at least one model could be served now."""
        sides = (self._recipe, self._prefill, self._decode)
        models = [{standing.limits.model.name for standing in self._usable(side)} for side in sides]
        return bool(models[0].intersection(*models[1:]))

    def limits(self, model: str) -> ModelLimits:
        prefill, decode = self._standings(self._prefill, model), self._standings(self._decode, model)
        if not prefill or not decode:
            raise self._missing(model, "decode" if prefill else "prefill")
        info = decode[0].limits.model
        return ModelLimits(
            max_prompt_tokens=max(standing.limits.max_tokens for standing in prefill),
            max_total_tokens=max(standing.limits.max_tokens for standing in decode),
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
        )

    @contextmanager
    def recipe(self, model: str, excluded: frozenset[str]) -> Iterator[Recipe]:
        self.limits(model)
        able = [self._recipe[standing.key].link for standing in self._standings(self._recipe, model)]
        able = [link for link in able if link.key not in excluded]
        if not able:
            raise Unavailable("no recipe service answers", fix="retry; if it stays, start one", retry_after_s=1.0)
        self._turn += 1
        link = able[self._turn % len(able)]
        link.use()
        try:
            yield GrpcRecipe(link.key, link.stub(recipe_pb2_grpc.RecipeServiceStub))
        finally:
            link.leave()

    def choose(self, demand: Demand, excluded: frozenset[str]) -> Chosen:
        prefills = [view for view in self._views(self._prefill) if view.key not in excluded]
        decodes = [view for view in self._views(self._decode) if view.key not in excluded]
        pair = self._router.pick(demand, prefills, decodes)
        prefill, decode = self._prefill[pair.prefill], self._decode[pair.decode]
        view = next(view for view in prefills if view.key == pair.prefill)
        return Chosen(
            prefill_key=pair.prefill,
            decode_key=pair.decode,
            prefill=GrpcPrefill(prefill.link.stub(prefill_pb2_grpc.PrefillServiceStub)),
            decode=GrpcDecode(decode.link.stub(decode_pb2_grpc.DecodeServiceStub)),
            layout=prefill.layout,
            model_revision=view.revision,
            writer=_incarnation(prefill.link.member),
            decode_epoch=decode.link.member.epoch,
            replays=_replays(decode),
            settle=_settler(((prefill, len(demand.token_ids) - pair.hit_tokens), (decode, len(demand.token_ids)))),
        )

    def knowledge(self) -> Counter[Knowledge]:
        """How many usable workers' keys are known how well."""
        standings = [*self._usable(self._prefill), *self._usable(self._decode)]
        return Counter(standing.mirror.knowledge(self._patience.stale_s) for standing in standings)

    def capacity(self) -> int:
        """Sequences that all usable decode workers together can run."""
        return sum(standing.limits.max_requests for standing in self._usable(self._decode))

    def models(self) -> list[gateway_pb2.ServedModel]:
        """Every model that has both kinds of worker, sorted by name."""
        names = {view.model for view in self._views(self._prefill)} & {view.model for view in self._views(self._decode)}
        return [self.served(name) for name in sorted(names)]

    def served(self, name: str) -> gateway_pb2.ServedModel:
        """One model. Raises NotFound or Unavailable as `limits` does."""
        limits = self.limits(name)
        prefill, decode = self._standings(self._prefill, name), self._standings(self._decode, name)
        return gateway_pb2.ServedModel(
            model=decode[0].limits.model,
            max_prompt_tokens=min(limits.max_prompt_tokens, limits.max_total_tokens - 1),
            max_output_tokens=limits.max_total_tokens - 1,
            prefill_workers=len(prefill),
            decode_workers=len(decode),
        )

    def _missing(self, model: str, side: str) -> ServiceError:
        """Unknown only where every worker has said what it serves: one that is away for a moment stays known."""
        workers = [*self._prefill.values(), *self._decode.values()]
        models = {entry.serves for entry in workers}
        if workers and not models & {model, ""}:
            return NotFound(
                f"no model {model!r} is served here", field="model", fix="see /v1/models for those that are"
            )
        return Unavailable(f"no {side} worker serves this model now", fix="retry", retry_after_s=1.0)

    def _standings(self, side: dict[str, _Entry], model: str) -> list[Standing]:
        return [standing for standing in self._usable(side) if standing.limits.model.name == model]

    def _usable(self, side: dict[str, _Entry]) -> list[Standing]:
        known = [entry.standing for entry in side.values() if entry.standing is not None]
        return [standing for standing in known if standing.usable(self._patience.stale_s)]

    def _views(self, side: dict[str, _Entry]) -> list[Worker]:
        return [standing.view(self._patience.stale_s) for standing in self._usable(side)]

    async def _members(
        self, service: str, side: dict[str, _Entry], follow: Callable[[Link], Coroutine[Any, Any, None]]
    ) -> None:
        members: AsyncIterator[tuple[MemberInfo, ...]] = self._discovery.members(service)
        async for snapshot in members:
            links = {link.key: link for link in map(Link, snapshot)}
            for key in side.keys() - links.keys():
                self._remove(side.pop(key))
                _log.info("worker left", service=service, worker=key)
            for key in links.keys() - side.keys():
                side[key] = _Entry(links[key], asyncio.create_task(follow(links[key]), name=f"follow {key}"))

    def _remove(self, entry: _Entry) -> None:
        entry.task.cancel()
        task = asyncio.create_task(entry.link.retire(_RETIRE_S), name="retire")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _follow_prefill(self, link: Link) -> None:
        await self._follow(link, PrefillSide(link), self._prefill)

    async def _follow_decode(self, link: Link) -> None:
        await self._follow(link, DecodeSide(link), self._decode)

    async def _follow_recipe(self, link: Link) -> None:
        await self._follow(link, RecipeSide(link), self._recipe)

    async def _follow(self, link: Link, asked: Side, side: dict[str, _Entry]) -> None:
        publish = self._publisher(side, link)
        doubted = partial(self._doubted, link.key)
        await Follower(link.key, asked, publish, self._clock, self._patience, doubted).run()

    def _doubted(self, key: str, doubt: Doubt) -> None:
        self.doubts[doubt] += 1
        _log.info("not all of what a worker caches is known", worker=key, reason=doubt)

    def _publisher(self, side: dict[str, _Entry], link: Link) -> Callable[[Standing], None]:
        def publish(standing: Standing) -> None:
            if link.key in side:
                side[link.key].standing = standing

        return publish

    async def _close(self) -> None:
        entries = [entry for side in (self._prefill, self._decode, self._recipe) for entry in side.values()]
        for task in (*(entry.task for entry in entries), *self._retiring):
            task.cancel()
        await asyncio.gather(*(entry.task for entry in entries), *self._retiring, return_exceptions=True)
        for entry in entries:
            await entry.link.close()


def _replays(decode: _Entry) -> bool:
    return decode.standing is not None and decode.standing.limits.model.layout.replay.handoff


def _settler(shares: Iterable[tuple[_Entry, int]]) -> Callable[[], None]:
    """Counts a request's tokens at its workers; the result takes them off again."""
    open_sends = []
    for entry, tokens in shares:
        entry.link.use()
        if entry.standing is not None:
            open_sends.append((entry.link, entry.standing, entry.standing.send(tokens)))

    def settle() -> None:
        while open_sends:
            link, standing, number = open_sends.pop()
            standing.settle(number)
            link.leave()

    return settle


def _incarnation(member: MemberInfo) -> common_pb2.Incarnation | None:
    """None where discovery knows addresses alone: a wrong name would make decode deaf to the writer."""
    if not member.epoch:
        return None
    return common_pb2.Incarnation(instance=member.instance, epoch=member.epoch, process=member.process)
