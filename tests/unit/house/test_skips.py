"""Whatever a test is skipped for is one of the reasons that CONTRIBUTING.md tells, with where such a test runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_REASON = re.compile(r'(?:skipif|importorskip)\([^\n]*?reason="([^"]+)"|pytest\.skip\(\s*f?"([^"]+)"')
# Words of a reason to what the table calls it.
KINDS = {
    "CUDA device": "a GPU",
    "a GPU": "a GPU",
    "a Hopper GPU": "a GPU",
    "triton": "triton, NVRTC",
    "NVRTC": "triton, NVRTC",
    "g++": "g++",
    "curl": "curl",
    "mount namespace": "mount namespaces",
    "RDMA port": "no RDMA port",
    "larger V4.1 fixtures": "the larger V4.1 fixtures",
    "published tokenizer": "the published tokenizer",
}


def reasons() -> dict[str, str]:
    """Reason -> a file that skips for it. A test of skipping itself skips for none."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name in (Path(__file__).name, "test_promises.py"):
            continue
        for match in _REASON.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(match[1] or match[2], str(path.relative_to(ROOT)))
    return found


def test_every_reason_to_skip_is_told_with_where_the_test_runs() -> None:
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = reasons()
    assert len(found) >= 8, found
    for reason, path in found.items():
        kinds = {kind for words, kind in KINDS.items() if words in reason}
        assert kinds and all(f"| {kind} |" in told for kind in kinds), f"{path}: {reason!r}"


def test_no_reason_is_told_that_nothing_is_skipped_for() -> None:
    found = reasons()
    assert all(any(words in reason for reason in found) for words in KINDS)
