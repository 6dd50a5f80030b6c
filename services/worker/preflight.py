"""What prefill and decode need of their settings before they open anything; and the engine's refusals as theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.checkpoint.errors import CheckpointError
from engine.config import TooLittleMemory
from engine.errors import EngineError
from engine.openable import check_openable
from fabric import preflight
from fabric.errors import StartError
from fabric.kvlink import check_link
from kernels import DeviceError, KernelError
from services.worker.settings import WorkerSettings

_MIB = 1 << 20
# Where the engine calls a setting otherwise.
_SETTINGS: Mapping[str, str] = {
    "model_dir": "model",
    "memory_bytes": "kv_memory_mb",
    "max_batch_tokens": "chunk_tokens",
}


def check(settings: WorkerSettings) -> None:
    """Raises StartError where the model, a setting or the transport cannot be used; names it and the fix."""
    check_link(settings.transport)
    cached_mb = settings.kv_memory_mb if settings.device == "cpu" else 0
    preflight.memory({"kv_memory_mb": cached_mb, "landing_mb": settings.landing_mb})
    with refusals():
        check_openable(settings.engine_config())


@contextmanager
def refusals() -> Iterator[None]:
    """Raises what an engine refuses at its opening as a StartError of the setting at fault."""
    try:
        yield
    except CheckpointError as error:
        raise StartError(f"{error.field}: {error.message}", field="model", fix=error.fix) from error
    except KernelError as error:
        field = "device" if isinstance(error, DeviceError) else "kernels"
        raise StartError(error.message, field=field, fix=error.fix) from error
    except TooLittleMemory as error:
        fix = f"use at least {-(-error.need_bytes // _MIB)} MiB"
        raise StartError("not one KV block fits", field="kv_memory_mb", fix=fix) from error
    except EngineError as error:
        field = _SETTINGS.get(error.field, error.field)
        raise StartError(error.message, field=field, fix=error.fix) from error
