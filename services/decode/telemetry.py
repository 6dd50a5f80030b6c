"""Metrics of a decode worker beyond the engine's. Knows names and meanings."""

from __future__ import annotations

from collections.abc import Callable

from fabric.telemetry.metrics import Metrics
from services.worker.telemetry import TransferMetrics


class DecodeMetrics(TransferMetrics):
    """Tickets, and KV received from prefill."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._metrics = metrics
        self._expired = metrics.counter("lease_expired", "Tickets that nobody used in time")

    def lease_expired(self) -> None:
        self._expired.inc()

    def watch_desk(
        self, open_tickets: Callable[[], int], quarantined: Callable[[], int], unfit: Callable[[], bool]
    ) -> None:
        """Exports the desk's own counts."""
        text = "1 while so much landing memory is in doubt that reservations are refused"
        self._metrics.gauge("decode_landings_blocked", text).set_function(unfit)
        self._metrics.gauge("decode_tickets_open", "Reservations in use").set_function(open_tickets)
        text = "Landings whose writers may still write"
        self._metrics.gauge("decode_landings_quarantined", text).set_function(quarantined)
