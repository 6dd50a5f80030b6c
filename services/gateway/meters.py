"""What the gateway measures of itself. Knows metric names; labels never name a tenant or a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from fabric.telemetry.metrics import Metrics
from services.gateway.job import Finish
from services.gateway.mirror import Doubt, Knowledge

KeyT = TypeVar("KeyT")


class Meters:
    """Metrics of one gateway. Durations come from two stamps of this process's monotonic clock."""

    def __init__(self, metrics: Metrics, inflight: Callable[[], int], queued: Callable[[], int]) -> None:
        self.metrics = metrics
        self._requests = metrics.counter("gateway_requests", "Requests ended", "surface", "code")
        self._first = metrics.histogram("gateway_time_to_first_token_seconds", "Arrival to first token", "surface")
        self._gap = metrics.histogram(
            "gateway_inter_token_latency_seconds", "Time per token after the first", "surface"
        )
        self._whole = metrics.histogram("gateway_request_duration_seconds", "Arrival to end", "surface")
        self._input = metrics.counter("gateway_input_tokens", "Prompt tokens of finished requests")
        self._cached = metrics.counter("gateway_cached_tokens", "Prompt tokens that came from a cache")
        self._output = metrics.counter("gateway_output_tokens", "Output tokens of finished requests")
        self._disconnected = metrics.counter("gateway_disconnected_clients", "Clients that left early")
        self._failed = metrics.counter(
            "gateway_worker_failures",
            "Requests whose workers failed them, and whether others went on",
            "when",
            "code",
            "next",
        )
        metrics.gauge("gateway_inflight_requests", "Requests being worked on").set_function(inflight)
        metrics.gauge("gateway_queued_requests", "Requests that wait for admission").set_function(queued)

    def watch_knowledge(self, knowledge: Callable[[], Mapping[Knowledge, int]], doubts: Mapping[Doubt, int]) -> None:
        """Exports how well it is known what workers cache."""
        workers = self.metrics.gauge(
            "gateway_cache_knowledge_workers", "Workers by how well it is known what they cache", "knowledge"
        )
        for known in Knowledge:
            workers.labels(known).set_function(_counting(knowledge, known))
        text = "How often it became doubtful what a worker caches since start"
        lost = self.metrics.gauge("gateway_cache_doubts_total", text, "reason")
        for doubt in (Doubt.GAP, Doubt.INCARNATION, Doubt.OVERFLOW):
            lost.labels(doubt).set_function(_counting(lambda: doubts, doubt))

    def first_token(self, surface: str, seconds: float) -> None:
        self._first.labels(surface).observe(seconds)

    def tokens(self, surface: str, count: int, seconds: float) -> None:
        """A batch of `count` tokens came `seconds` after the one before."""
        if count:
            self._gap.labels(surface).observe(seconds / count)

    def finished(self, finish: Finish) -> None:
        self._input.inc(finish.usage.prompt_tokens)
        self._cached.inc(finish.usage.cached_tokens)
        self._output.inc(finish.usage.completion_tokens)

    def workers_failed(self, when: str, code: str, goes_on: bool) -> None:
        """`when`: "opening" before the first token was sent, "streaming" after it; a recipe: "rendering", "parsing"."""
        self._failed.labels(when, code, "others" if goes_on else "given_up").inc()

    def ended(self, surface: str, code: str, seconds: float) -> None:
        self._requests.labels(surface, code).inc()
        self._whole.labels(surface).observe(seconds)
        if code == "cancelled":
            self._disconnected.inc()


def _counting(counts: Callable[[], Mapping[KeyT, int]], key: KeyT) -> Callable[[], float]:
    return lambda: counts().get(key, 0)
