"""Puts a gateway together from its settings. Knows every part and does none of their work."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from random import Random

from fabric.discovery import MemberInfo, open_discovery
from fabric.health import Progress
from fabric.lifecycle import background, new_identity
from fabric.server import Service
from fabric.telemetry import logs
from fabric.telemetry.metrics import Metrics
from protos.deepinfer.v1 import gateway_pb2_grpc
from services.gateway.admission import Admission
from services.gateway.flow import Conductor
from services.gateway.follower import Patience
from services.gateway.front import Front
from services.gateway.handoff import Cleaner
from services.gateway.http import create_app
from services.gateway.meters import Meters
from services.gateway.pool import Pool
from services.gateway.recovery import Bounds, RetryBudget
from services.gateway.router import Router
from services.gateway.service import GatewayServicer
from services.gateway.settings import GatewaySettings
from services.gateway.tenants import Tenants, load_accounts

_log = logs.get("gateway")


@asynccontextmanager
async def build(settings: GatewaySettings) -> AsyncIterator[Service]:
    """The gateway of one deployment.

    Raises:
        StartError: the key file, a region or the discovery URL cannot be used.
    """
    tenants = _tenants(settings, _secret(settings))
    random = Random(secrets.randbits(128))
    discovery = open_discovery(settings.discovery)
    pool = Pool(discovery, Router(random), Patience(settings.probe_s, settings.stale_s))
    cleaner = Cleaner()
    budget = RetryBudget(settings.retry_share, settings.retry_floor_per_s, settings.retry_burst, time.monotonic)
    # Without any decode worker requests shall fail at once and say so, not wait.
    limit = lambda: min(settings.max_inflight, pool.capacity() or settings.max_inflight)  # noqa: E731
    admission = Admission(limit, settings.max_queued, settings.max_queued_per_tenant)
    metrics = Metrics("gateway")
    meters = Meters(metrics, lambda: admission.inflight, lambda: admission.queued)
    meters.watch_knowledge(pool.knowledge, pool.doubts)
    bounds, coalesce_s = Bounds(settings.max_moves), settings.coalesce_ms / 1000
    conductor = Conductor(pool, cleaner, random, budget, meters.workers_failed, bounds, coalesce_s)
    front = Front(tenants, admission, conductor, meters, lambda: secrets.token_hex(12))
    identity = new_identity("gateway", settings.instance)
    async with background(pool.run(), "pool"):
        try:
            yield Service(
                servicers=[(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, GatewayServicer(front, pool))],
                progress=Progress(
                    pending=lambda: admission.inflight + admission.queued,
                    steps=lambda: front.steps,
                    stall_s=settings.request_timeout_s + 5.0,
                ),
                members=MemberInfo("gateway", identity.instance, "", identity.epoch),
                http=create_app(front, pool, settings, metrics.registry, _version()),
                http_listen=settings.http,
                metrics=metrics,
            )
        finally:
            await cleaner.close()


def check(settings: GatewaySettings) -> None:
    """Raises StartError where the key file cannot be used, or a region names a tenant that is not in it."""
    _tenants(settings, b"")


def _tenants(settings: GatewaySettings, secret: bytes) -> Tenants:
    accounts = load_accounts(settings.keys_file) if settings.keys_file else {}
    return Tenants(accounts, secret, settings.regions)


def _secret(settings: GatewaySettings) -> bytes:
    given = settings.salt_secret.get_secret_value()
    if not given:
        _log.info("salt secret made for this run", fix="set salt_secret to keep cached prefixes across restarts")
    return given.encode() or secrets.token_bytes(32)


def _version() -> str:
    try:
        return metadata.version("deepinfer-serve")
    except metadata.PackageNotFoundError:
        return "source"
