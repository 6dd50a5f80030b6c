"""What the gateway knows of one worker: its report, what it holds, what was sent since. Knows a clock, no network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.layout import ReplayPolicy
from protos.deepinfer.v1 import common_pb2
from services.gateway.mirror import Doubt, Mirror
from services.gateway.router import Worker

_HALF_LIFE_S = 2.0
# A report may have been made just before our request arrived there: only older sends count as reported.
_REPORT_LAG_S = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker's Info says once."""

    model: common_pb2.ModelInfo
    epoch: int
    max_tokens: int
    max_requests: int


@dataclass(slots=True)
class _Sent:
    tokens: int
    at: float


class Standing:
    """One incarnation of one worker. `clock` gives monotonic seconds; `doubted` is told why its keys are in doubt."""

    def __init__(
        self,
        key: str,
        limits: Limits,
        clock: Callable[[], float],
        doubted: Callable[[Doubt], None] = lambda doubt: None,
    ) -> None:
        self.key, self.limits = key, limits
        self.mirror = Mirror(limits.epoch, clock, doubted)
        self._clock = clock
        self._status = common_pb2.WorkerStatus()
        self._sent: dict[int, _Sent] = {}
        self._next_send = 0
        self._recent, self._recent_at = 0.0, clock()
        self.connected = True
        self.seen_at = clock()

    @property
    def draining(self) -> bool:
        return self._status.draining

    def report(self, status: common_pb2.WorkerStatus) -> None:
        """Takes a status; one that another overtook is dropped."""
        self.seen()
        self.mirror.take(status)
        if status.sequence < self._status.sequence:
            return
        self._status = status
        horizon = self._clock() - _REPORT_LAG_S
        for number in [number for number, sent in self._sent.items() if sent.at <= horizon]:
            del self._sent[number]

    def seen(self) -> None:
        """The worker gave a sign of life."""
        self.seen_at, self.connected = self._clock(), True

    def lost(self) -> None:
        """The connection broke: no work until the worker is seen again."""
        self.connected = False

    def usable(self, stale_s: float) -> bool:
        """Whether it may get work: connected, not draining, heard of lately."""
        return self.connected and not self.draining and self._clock() - self.seen_at <= stale_s

    def send(self, tokens: int) -> int:
        """Counts work just given to it; returns the number to `settle` it with."""
        now = self._clock()
        self._recent, self._recent_at = self._recent_now(now) + tokens, now
        self._next_send += 1
        self._sent[self._next_send] = _Sent(tokens, now)
        return self._next_send

    def settle(self, number: int) -> None:
        """That work is over."""
        self._sent.pop(number, None)

    def view(self, stale_s: float = math.inf) -> Worker:
        """The worker as routing sees it now. After `stale_s` without a report its keys are doubtful."""
        status, model = self._status, self.limits.model
        return Worker(
            key=self.key,
            model=model.name,
            revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            records_fingerprint=model.layout.records_fingerprint,
            block_tokens=model.layout.block_tokens,
            max_tokens=self.limits.max_tokens,
            window_policy=_window_policy(model.layout.replay),
            max_requests=max(1, self.limits.max_requests),
            queued_tokens=status.queued_tokens,
            sent_tokens=sum(sent.tokens for sent in self._sent.values()),
            recent_tokens=self._recent_now(self._clock()),
            requests=status.running_requests + status.waiting_requests + len(self._sent),
            blocks_free=status.blocks_free,
            held=self.mirror.held,
            knowledge=self.mirror.knowledge(stale_s),
        )

    def _recent_now(self, now: float) -> float:
        return self._recent * math.exp2(-(now - self._recent_at) / _HALF_LIFE_S)


def _window_policy(replay: common_pb2.ReplayPolicy) -> str:
    """How the worker's keys name its window state; a policy that no layout can have names what nobody holds."""
    try:
        return ReplayPolicy(replay.tokens, replay.decoder, replay.handoff, replay.stacked).window_policy
    except ValueError:
        return ""
