"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from services.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings, env_prefix="DEEPINFER_PREFILL_"):
    """A prefill worker: computes prompts and pushes their KV to decode workers."""

    max_prompt_tokens: int = Field(0, ge=0, description="longest prompt taken; 0: what the model can hold")
    kvstore: bool = Field(True, description="use the kvstore instances that discovery names")
    kvstore_timeout_s: float = Field(2.0, gt=0, description="seconds that reading from the kvstore may take")
    store_queue: int = Field(8, ge=1, description="finished prompts that may wait to be stored; more are not stored")
    landing_mb: int = Field(64, ge=1, description="MiB of memory that the kvstore writes hits into")
    ticket_wait_s: float = Field(30.0, gt=0, description="seconds that a request in the engine waits for its ticket")
    push_timeout_s: float = Field(10.0, gt=0, description="seconds that one push may take")
    heartbeat_s: float = Field(2.0, gt=0, description="seconds between two signs of life to a waiting decode worker")
