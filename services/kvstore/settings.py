"""Settings of a kvstore."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from fabric.settings import ServiceSettings


class KvStoreSettings(ServiceSettings, env_prefix="DEEPINFER_KVSTORE_"):
    """A kvstore: keeps verified KV records by prefix."""

    memory_mb: int = Field(256, ge=1, description="MiB of records")
    budget_share: float = Field(
        0.5, ge=0, le=0.9, description="share of each tier that retention classes may keep from leaving, softly"
    )
    owner_budget_share: float = Field(
        0.125, ge=0, le=0.9, description="the same for one tenant in one class; what it used longest ago gives way"
    )
    anchor_retention: float = Field(
        1.0, gt=0, le=4, description="times as long as the blocks of a class that its anchors are kept"
    )
    landing_mb: int = Field(64, ge=1, description="MiB of memory that prefill workers write new records into")
    transport: str = Field("ucx://", description="KV transport: ucx://, tcp://host:0 or inproc://")
    index: SecretStr = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="block index: redis://[:password@]host:port/db or memory://"
    )
    index_ttl_s: float = Field(72 * 3600.0, gt=0, description="seconds that an entry of the index lives")
    index_keys_per_s: float = Field(
        20_000.0, gt=0, description="keys a second that are told anew to an index that lost them"
    )
    fill_mb_per_s: float = Field(
        64.0, gt=0, description="MiB a second of blocks that another kvstore holds and whose home is here now"
    )
    max_puts: int = Field(16, ge=1, description="writers at a time; more are refused")
    push_timeout_s: float = Field(2.0, gt=0, description="seconds that writing a hit may take")
    put_timeout_s: float = Field(10.0, gt=0, description="seconds that a writer may take to fill its grant")
    nvme_dir: Path | None = Field(None, description="directory of the NVMe tier, this kvstore's own; none: DRAM alone")
    nvme_gb: float = Field(8.0, gt=0, description="GiB of the NVMe tier")
    nvme_segment_mb: int = Field(64, ge=1, description="MiB of one file of it")
    warm_h: float = Field(1.0, ge=1.0, le=6.0, description="hours unused after which a record is on disk alone")
    nvme_queue_share: float = Field(
        0.25, gt=0, le=0.75, description="share of memory_mb that may wait for the disk; what finds it full stays above"
    )
    nvme_direct: bool = Field(False, description="read it past the page cache")
