"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr

from fabric.settings import ServiceSettings
from services.gateway.regions import RegionSettings


class GatewaySettings(ServiceSettings, env_prefix="DEEPINFER_GATEWAY_"):
    """The gateway: what clients call, over gRPC and OpenAI's HTTP API."""

    doors: ClassVar[tuple[str, ...]] = (*ServiceSettings.doors, "http")

    http: str = Field("127.0.0.1:8000", description="host:port of the HTTP API; port 0 takes a free one")
    keys_file: Path | None = Field(
        None,
        description="file of API keys, a line each: `name blake2b-hex [retention class]`; none: all are one tenant",
    )
    salt_secret: SecretStr = Field(
        SecretStr(""),
        description="secret that tenants' cache salts derive from; default: new at each start, so caches start cold",
    )
    regions: tuple[RegionSettings, ...] = Field(
        (), description="starts of prompts whose cached KV named tenants share (docs/kvstore.md); none: nothing is"
    )
    max_inflight: int = Field(256, ge=1, description="most requests worked on, as far as decode has room; more wait")
    max_queued: int = Field(2048, ge=0, description="most requests that wait; more are refused with 429")
    max_queued_per_tenant: int = Field(2048, ge=0, description="most waiting requests of one tenant")
    request_timeout_s: float = Field(120.0, gt=0, le=3600, description="longest life of an HTTP request")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest HTTP body")
    coalesce_ms: float = Field(
        20.0,
        ge=0,
        le=1000,
        description="milliseconds, about, between two portions of tokens after the first; 0: each leaves at once",
    )
    stale_s: float = Field(6.0, gt=0, description="seconds without a sign of a worker after which it gets no work")
    probe_s: float = Field(2.0, gt=0, description="seconds of a worker's silence after which it is asked for a sign")
    max_moves: int = Field(3, ge=0, le=100, description="times one request may begin anew after its workers failed")
    retry_share: float = Field(
        0.2, ge=0, le=1, description="of all requests, the share that may begin anew in the long run"
    )
    retry_floor_per_s: float = Field(0.5, ge=0, description="what is allowed beyond that share, each second")
    retry_burst: int = Field(
        256, ge=1, description="most that may begin anew at once: as many as one lost worker can leave behind"
    )
