"""The torch-free parts of the engine stay torch-free, so that gateway, kvstore and planner may import them."""

import subprocess
import sys

import pytest

PURE = [
    "engine",
    "engine.blocks",
    "engine.config",
    "engine.detokenize",
    "engine.errors",
    "engine.events",
    "engine.index",
    "engine.intake",
    "engine.layout",
    "engine.mailbox",
    "engine.memory",
    "engine.model",
    "engine.prefix",
    "engine.requests",
    "engine.sampling.sampler",
    "engine.scheduler",
    "engine.sealing",
    "engine.sequence",
    "engine.stats",
    "engine.stops",
    "engine.transfer",
]


def _loaded(modules: list[str]) -> set[str]:
    script = f"import sys, {', '.join(modules)}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_pure_parts_import_neither_torch_nor_a_network() -> None:
    loaded = _loaded(PURE)
    assert not loaded & {"torch", "grpc", "numba", "transformers", "redis"}
    assert set(PURE) <= loaded


@pytest.mark.parametrize("module", ["engine.engine"])
def test_the_check_above_would_notice_torch(module: str) -> None:
    assert "torch" in _loaded([module])
