"""Settings of a service that runs an engine. Knows which of them the engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from engine.config import EngineConfig
from engine.offers import OfferPolicy
from fabric.settings import ServiceSettings

NANO = Path(__file__).parents[2] / "models" / "nano"
_MIB = 1 << 20


class WorkerSettings(ServiceSettings):
    """What prefill and decode workers have in common."""

    model: Path = Field(NANO, description="directory with config.json, safetensors and tokenizer.json")
    model_name: str = Field("", description="name that clients use; default: the directory's name")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of compute and KV; auto: float32 on the CPU, bfloat16 on a GPU"
    )
    kernels: Literal["auto", "reference", "cpu", "triton", "cuda"] = Field("auto", description="operator backend")
    weights: Literal["dequantized", "stored"] = Field(
        "dequantized",
        description="stored: FP8 and FP4 matrices stay as published (kernels=cuda), half the memory or less",
    )
    kv_cache: Literal["rows", "records"] = Field(
        "rows",
        description="records: KV is cached, handed on and stored as published (FP8, FP4), at half the bytes or less",
    )
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="where model and KV are: cpu, cuda or cuda:N; a GPU's KV has a pinned copy on its way",
    )
    kv_memory_mb: int = Field(256, ge=1, description="MiB for KV blocks and window slots")
    block_tokens: int = Field(128, ge=1, description="tokens of a KV block, raised to what the model needs")
    window_state: Literal["auto", "exact", "replay", "recompute"] = Field(
        "auto", description="how window rows come back at a prefix hit; auto: as the model is served"
    )
    chunk_tokens: int = Field(512, ge=2, description="most tokens that one engine step computes")
    max_sequences: int = Field(16, ge=1, description="most sequences that one engine step computes")
    max_waiting: int = Field(64, ge=1, description="most requests that wait for the engine; more are refused")
    threads: int = Field(1, ge=1, le=1024, description="compute threads of this process")
    batch_invariant: bool = Field(False, description="results do not depend on what else is computed; slower")
    transport: str = Field("ucx://", description="KV transport: ucx://, tcp://host:0 or inproc://")
    landing_mb: int = Field(64, ge=1, description="MiB of memory that others write into")
    window_mb: float = Field(16.0, gt=0, description="MiB of landing memory that one transfer takes at most")
    kvstore: bool = Field(True, description="use the kvstore instances that discovery names")
    store_queue: int = Field(8, ge=1, description="requests whose new blocks may wait to be stored; others are not")
    store_queue_share: float = Field(0.5, gt=0, le=1, description="share of kv_memory_mb that may wait to be stored")
    store_hold_s: float = Field(10.0, gt=0, description="seconds that blocks are held for a kvstore, at most")
    store_anchor_share: float = Field(
        0.125, ge=0, description="bytes of anchors per byte of blocks stored before a request ends; 0: none before"
    )
    stall_s: float = Field(
        30.0, gt=0, description="seconds without an engine step, while work waits, that mean stuck; store_hold_s on top"
    )
    watch_period_s: float = Field(0.05, gt=0, description="seconds between two looks at the load for Watch")

    @property
    def wedged_s(self) -> float:
        """Seconds without a sign of progress, while something waits, that mean stuck: a kvstore may let blocks wait for
        longer than any step takes."""
        return self.stall_s + self.store_hold_s if self.kvstore else self.stall_s

    @property
    def compute_dtype(self) -> str:
        """The dtype, after "auto" was decided."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"

    def engine_config(self) -> EngineConfig:
        """Raises engine.errors.InvalidParameter where the values do not fit together."""
        return EngineConfig(
            model_dir=self.model,
            dtype=self.compute_dtype,
            memory_bytes=self.kv_memory_mb * _MIB,
            block_tokens=self.block_tokens,
            window_state=self.window_state,
            max_batch_tokens=self.chunk_tokens,
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            batch_invariant=self.batch_invariant,
            threads=self.threads,
            kernels=self.kernels,
            device=self.device,
            weights=self.weights,
            kv_cache=self.kv_cache,
            model_name=self.model_name,
            offers=OfferPolicy(
                most=self.store_queue,
                most_bytes=max(1, round(self.store_queue_share * self.kv_memory_mb * _MIB)),
                hold_s=self.store_hold_s,
                anchor_share=self.store_anchor_share,
            ),
        )
