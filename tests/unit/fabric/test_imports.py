"""What a process loads: proven by loading it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.procs import ROOT

HEAVY = ("torch", "nixl_cu12", "redis", "aetcd", "transformers", "engine", "kernels", "services")


def loaded_by(statement: str) -> set[str]:
    """Top-level modules present after a statement."""
    code = f"{statement}\nimport sys, json\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import fabric.server, fabric.channels", set()),
        ("import fabric.kvlink, fabric.kvlink.landing, fabric.kvlink.metered", set()),
        ("from fabric.discovery import open_discovery; open_discovery('memory://')", set()),
        ("from fabric.discovery import open_discovery; open_discovery('etcd://h:1')", {"aetcd"}),
        ("import fabric.kvlink.ucx", {"nixl_cu12"}),
    ],
)
def test_only_the_backend_that_is_named_is_loaded(statement, allowed):
    found = loaded_by(statement) & set(HEAVY)
    assert found == allowed


def test_only_wire_speaks_protobuf_of_ours():
    users = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "fabric").rglob("*.py")
        if any(line.startswith(("from protos", "import protos")) for line in path.read_text().splitlines())
    ]
    assert users == ["fabric/wire.py"]
