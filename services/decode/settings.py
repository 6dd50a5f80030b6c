"""Settings of a decode worker."""

from __future__ import annotations

from pydantic import Field

from services.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings, env_prefix="DEEPINFER_DECODE_"):
    """A decode worker: verifies the KV it was sent and generates tokens from it."""

    max_total_tokens: int = Field(0, ge=0, description="most tokens of prompt and output; 0: what the model can hold")
    max_tickets: int = Field(64, ge=1, description="most reservations at a time; more are refused")
    lease_s: float = Field(30.0, gt=0, description="seconds that a reservation lives without a sign of its prefill")
    landing_mb: int = Field(128, ge=1, description="MiB of memory that prefill workers write into")
    handoff_timeout_s: float = Field(10.0, gt=0, description="seconds from the receipt until all KV is verified")
