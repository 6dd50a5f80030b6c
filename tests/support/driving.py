"""Driving engines in tests: run to the end, read tokens from events, hand KV over by copying bytes."""

from __future__ import annotations

from collections.abc import Iterable

from engine.engine import Engine
from engine.events import EntriesReady, Event, FirstToken, TokensOut
from engine.images import ImageSpan
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest, Reservation
from engine.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def run(engine: Engine, steps: int = 5000) -> list[Event]:
    """Step until nothing can change any more; fails if that takes more than `steps` steps."""
    events: list[Event] = []
    for _ in range(steps):
        if not engine.has_work:
            return events
        events.extend(engine.step())
        if engine.blocked:
            return events
    raise AssertionError(f"still busy after {steps} steps: {engine.stats()}")


def of(events: Iterable[Event], kind: type, request_id: str | None = None) -> list[Event]:
    """Events of one kind, and of one request if named."""
    return [event for event in events if isinstance(event, kind) and request_id in (None, event.request_id)]


def tokens_of(events: Iterable[Event], request_id: str) -> list[int]:
    """New tokens of a request in order; fails if an index is skipped or repeated."""
    tokens: list[int] = []
    first_index = None
    for event in events:
        if event.request_id != request_id or not isinstance(event, FirstToken | TokensOut):
            continue
        index = event.state.emitted - 1 if isinstance(event, FirstToken) else event.first_index
        first_index = index if first_index is None else first_index
        assert index == first_index + len(tokens), "token indices must be dense"
        tokens.extend((event.token,) if isinstance(event, FirstToken) else event.token_ids)
    return tokens


def whole(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, **fields: object) -> list[int]:
    """Tokens of one request run alone."""
    engine.submit(GenerateRequest("whole", prompt, sampling, **fields))
    return tokens_of(run(engine), "whole")


def copy_kv(source: Engine, target: Engine, request_id: str, reservation: Reservation) -> None:
    """What push, landing and commit do between processes: copy a held prefill's records into a reservation."""
    held = source.held(request_id)
    source.pool.fetch(held.block_table, (held.slot,))
    first = reservation.held_tokens // source.model.layout.block_tokens
    for group in source.model.layout.globals:
        for index in range(first, len(reservation.blocks)):
            target.pool.block_extent(group.name, reservation.blocks[index])[:] = source.pool.block_extent(
                group.name, held.block_table[index]
            )
    for group in source.model.layout.windows:
        target.pool.slot_extent(group.name, reservation.slot)[:] = source.pool.slot_extent(group.name, held.slot)


def handoff(
    source: Engine, target: Engine, request: PrefillRequest, with_prompt: bool = True
) -> tuple[FirstToken, Reservation]:
    """Prefill in `source`, reserve in `target`, copy, release; the decode is started and not yet stepped."""
    tokens = (*request.prompt, *request.emitted)
    limit = len(request.prompt) + request.sampling.max_tokens
    reservation = target.reserve(
        request.request_id, len(tokens), limit, request.salt, tokens if with_prompt and request.cache else None
    )
    source.submit_prefill(request)
    (first,) = of(run(source), FirstToken, request.request_id)
    assert isinstance(first, FirstToken)
    copy_kv(source, target, request.request_id, reservation)
    source.release(request.request_id)
    target.start_decode(
        DecodeRequest(
            request.request_id, request.prompt, (*request.emitted, first.token), request.sampling, first.state,
            request.salt, request.cache, images=request.images, offer_as=request.offer_as,
        )
    )  # fmt: skip
    return first, reservation


def replayed(
    source: Engine, target: Engine, prompt: tuple[int, ...], sampling: SamplingParams, cache: bool = False,
    images: tuple[ImageSpan, ...] = (),
) -> list[int]:  # fmt: skip
    """Prefill in `source` computes entries alone; only they are copied; `target` replays and draws every token."""
    limit = len(prompt) + sampling.max_tokens
    reservation = target.reserve("r", len(prompt), limit, b"", prompt if cache else None)
    source.submit_prefill(PrefillRequest("r", prompt, sampling, cache=cache, images=images))
    events = run(source)
    (ready,) = of(events, EntriesReady)
    assert events[-1] == ready and not of(events, FirstToken)
    held = source.held("r")
    assert held.tokens == len(prompt)
    for at in range(reservation.held_tokens // source.model.layout.block_tokens, len(reservation.blocks)):
        target.pool.blocks[reservation.blocks[at]] = source.pool.blocks[held.block_table[at]]
    source.release("r")
    request = DecodeRequest("r", prompt, (), sampling, ready.state, cache=cache, replays=True, images=images)
    target.start_decode(request)
    return tokens_of(run(target), "r")
