"""Who loads what, seen in a fresh process: import-linter reads the imports, this runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Importing every module of the left loads nothing of the right. Lazily opened backends are left out by name.
TORCH_FREE_ENGINE = [
    f"engine.{name}"
    for name in ("layout", "blocks", "prefix", "scheduler", "sequence", "stops", "errors", "sampling.params")
]
ENGINE_NEVER = {"grpc", "redis", "nixl_cu12", "aetcd", "protos", "fabric", "services", "cli"}
MATRIX = {
    "engine (torch-free parts)": (TORCH_FREE_ENGINE, ENGINE_NEVER | {"torch", "kernels", "numba"}),
    "engine": (["engine"], ENGINE_NEVER),
    "kernels": (["kernels"], ENGINE_NEVER | {"engine"}),
    "fabric": (["fabric"], {"torch", "redis", "engine", "kernels", "services", "cli", "numba"}),
    "gateway": (["services.gateway"], {"torch", "nixl_cu12", "kernels", "numba"}),
    "recipe": (["services.recipe"], {"torch", "nixl_cu12", "redis", "engine", "kernels", "numba"}),
    "kvstore": (["services.kvstore"], {"torch", "kernels", "numba"}),
    "prefill": (["services.prefill"], {"redis", "services.decode", "services.gateway", "services.kvstore"}),
    "decode": (["services.decode"], {"redis", "services.prefill", "services.gateway", "services.kvstore"}),
    "cli": (["cli"], {"torch", "nixl_cu12", "redis", "services", "kernels", "numba"}),
}
LAZY = {"fabric.kvlink.ucx", "services.kvstore.index_redis", "cli.linkprobe"}

PROBE = """
import importlib, json, sys
modules, never = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
    loaded = sorted(name for name in never if name in sys.modules)
    if loaded:
        sys.exit(f"{module} loads {', '.join(loaded)}")
"""


def modules_of(package: str) -> list[str]:
    """The package and all modules below it but `__main__` and the lazy ones, from the files."""
    place = ROOT / package.replace(".", "/")
    if place.with_suffix(".py").is_file():
        return [package]
    files = sorted(place.rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return [name for name in names if not name.endswith("__main__") and not name.startswith(tuple(LAZY))]


@pytest.mark.parametrize("row", MATRIX)
def test_a_package_loads_nothing_that_the_matrix_forbids(row):
    packages, never = MATRIX[row]
    modules = [module for package in packages for module in modules_of(package)]
    assert modules, f"nothing found for {packages}"
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps([modules, sorted(never)])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
