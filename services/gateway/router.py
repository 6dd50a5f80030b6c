"""Routing: which prefill and which decode worker serve a prompt. Pure: knows loads, held prefixes and capabilities."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from engine.prefix import PrefixIdentity, Salt, block_keys
from fabric.errors import ServiceError, Unavailable
from services.gateway.mirror import Knowledge

# Work done lately counts a little: without it a worker that answers at once looks idle for ever and gets everything.
_RECENT_WEIGHT = 0.1
_DECODE_HIT_WEIGHT = 0.25
# Of a hit at a worker whose keys are known in part, the share that is expected to be there.
_DEGRADED_SHARE = 0.5
# Scores closer than this are a tie, decided by chance: several gateways must not all pick the same worker.
_TIE = 0.02


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as routing sees it at one moment. `key` names one incarnation.

    Token counts: `queued_tokens` wait for compute by its own report, `sent_tokens` were sent since, `recent_tokens` is
    a decaying count of what it was given. `requests` run, wait there or were sent since its report.
    """

    key: str
    model: str
    revision: str
    layout_fingerprint: str
    records_fingerprint: str  # the same for layouts that differ in block_tokens alone
    block_tokens: int
    max_tokens: int
    window_policy: str = "exact"  # part of the keys it holds
    max_requests: int = 1
    queued_tokens: int = 0
    sent_tokens: int = 0
    recent_tokens: float = 0.0
    requests: int = 0
    blocks_free: int = 0
    held: Collection[bytes] = field(default=frozenset(), repr=False)
    knowledge: Knowledge = Knowledge.EXACT  # of what it holds


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: a prompt under its tenant's salt, and room for its output."""

    model: str
    token_ids: Sequence[int]
    max_total_tokens: int
    salt: Salt
    use_cache: bool = True


@dataclass(frozen=True, slots=True)
class Pair:
    """The choice. `hit_tokens` of the prompt are expected in the prefill worker's own cache."""

    prefill: str
    decode: str
    hit_tokens: int


class Router:
    """Chooses pairs; `random` decides ties."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def pick(self, demand: Demand, prefills: Iterable[Worker], decodes: Iterable[Worker]) -> Pair:
        """The pair with the best score among those that can exchange KV and hold the request.

        Score of a prefill worker: share of the prompt it holds, minus its load in units of this prompt. Of a decode
        worker: a small bonus for what it holds, minus how full it is.

        Raises:
            Unavailable: no pair can serve it now; says which side is missing.
        """
        keys = _Keys(demand)
        prompt = max(1, len(demand.token_ids))
        able = [worker for worker in prefills if worker.model == demand.model and worker.max_tokens >= prompt]
        takers = [w for w in decodes if w.model == demand.model and w.max_tokens >= demand.max_total_tokens]
        scored = [
            (_prefill_score(prefill, keys.hit_tokens(prefill), prompt) + _decode_score(decode, keys, prompt), pair)
            for prefill in able
            for decode in takers
            if _compatible(prefill, decode)
            for pair in [Pair(prefill.key, decode.key, keys.hit_tokens(prefill))]
        ]
        if not scored:
            raise _nobody(able, takers)
        best = max(score for score, _ in scored)
        return self._random.choice([pair for score, pair in scored if score >= best - _TIE])


class _Keys:
    """Block keys of one prompt, computed once per identity."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._chains: dict[PrefixIdentity, list[bytes]] = {}
        self._hits: dict[str, int] = {}

    def hit_tokens(self, worker: Worker) -> int:
        """Prompt tokens in leading blocks that the worker holds; fewer where it may not hold them any more."""
        if not worker.held or not self._demand.use_cache:
            return 0
        if worker.key not in self._hits:
            held = worker.block_tokens * _leading(self._chain(worker), worker.held)
            exact = worker.knowledge is Knowledge.EXACT
            self._hits[worker.key] = held if exact else round(_DEGRADED_SHARE * held)
        return self._hits[worker.key]

    def _chain(self, worker: Worker) -> list[bytes]:
        identity = PrefixIdentity(worker.revision, worker.layout_fingerprint, worker.window_policy, worker.block_tokens)
        if identity not in self._chains:
            self._chains[identity] = block_keys(self._demand.salt, self._demand.token_ids, identity)
        return self._chains[identity]


def _leading(keys: Sequence[bytes], held: Collection[bytes]) -> int:
    return next((index for index, key in enumerate(keys) if key not in held), len(keys))


def _prefill_score(worker: Worker, hit_tokens: int, prompt: int) -> float:
    waiting = worker.queued_tokens + worker.sent_tokens + _RECENT_WEIGHT * worker.recent_tokens
    return (hit_tokens - waiting) / prompt


def _decode_score(worker: Worker, keys: _Keys, prompt: int) -> float:
    needed = -(-prompt // worker.block_tokens)
    crowded = 1.0 if worker.blocks_free < needed else 0.0
    recent = _RECENT_WEIGHT * worker.recent_tokens / prompt
    return (
        _DECODE_HIT_WEIGHT * keys.hit_tokens(worker) / prompt - worker.requests / worker.max_requests - crowded - recent
    )


def _compatible(prefill: Worker, decode: Worker) -> bool:
    """Whether decode can verify and use what prefill writes."""
    return (prefill.revision, prefill.records_fingerprint) == (decode.revision, decode.records_fingerprint)


def _nobody(able: Sequence[Worker], takers: Sequence[Worker]) -> ServiceError:
    if able and takers:
        return Unavailable(
            f"prefill and decode serve different revisions: {able[0].revision[:12]} and {takers[0].revision[:12]}",
            fix="start workers of one model revision and layout",
            retry_after_s=1.0,
        )
    missing = " and ".join(name for name, found in (("prefill", able), ("decode", takers)) if not found)
    return Unavailable(
        f"no {missing} worker can take this request now",
        fix="retry; if it stays, check that these workers run and are registered",
        retry_after_s=1.0,
    )
