"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from fabric.kvlink.outgoing import SendLimits
from services.worker.settings import WorkerSettings

_MIB = 1 << 20


class PrefillSettings(WorkerSettings, env_prefix="DEEPINFER_PREFILL_"):
    """A prefill worker: computes prompts and pushes their KV to decode workers."""

    max_prompt_tokens: int = Field(0, ge=0, description="longest prompt taken; 0: what the model can hold")
    kvstore_timeout_s: float = Field(2.0, gt=0, description="seconds that reading from the kvstore may take")
    landing_mb: int = Field(64, ge=1, description="MiB of memory that the kvstore writes hits into")
    ticket_wait_s: float = Field(30.0, gt=0, description="seconds that a request in the engine waits for its ticket")
    push_timeout_s: float = Field(10.0, gt=0, description="seconds that one push, or the wait for room, may take")
    push_mb: float = Field(4.0, gt=0, description="MiB of one push, at most")
    in_flight_mb: float = Field(16.0, gt=0, description="MiB of all pushes that are under way at a time")
    heartbeat_s: float = Field(2.0, gt=0, description="seconds between two signs of life to a waiting decode worker")

    def send_limits(self) -> SendLimits:
        """What a pipelined transfer may take."""
        return SendLimits(round(self.push_mb * _MIB), round(self.in_flight_mb * _MIB), self.push_timeout_s)
