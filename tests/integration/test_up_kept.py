"""`deepinfer up --kv-dir`: what a stack stored is a hit for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1.kvstore_admin_pb2_grpc import KvStoreAdminServiceStub
from tests.integration.test_up import Up, serving

pytestmark = pytest.mark.timeout(300)
PROMPT = " ".join(f"Item {number} costs {7 * number} coins." for number in range(120))


def ask(up: Up) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    message = {"role": "user", "content": PROMPT}
    body = {"model": up.record["model"], "messages": [message], "max_tokens": 8, "temperature": 0}
    reply = httpx2.post(f"http://{up.record['http']}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    usage = answer["usage"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]


def records(up: Up, settled: Callable[[dict[int, pb.TierCounts]], bool]) -> int:
    """How many records are on disk once the tiers are as wanted."""
    with grpc.insecure_channel(up.record["addresses"]["kvstore"]) as channel:
        stub = KvStoreAdminServiceStub(channel)
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            reply = stub.ReadCounts(pb.ReadCountsRequest(), timeout=5.0)
            tiers = {tier.tier: tier for tier in reply.tiers}
            if settled(tiers):
                return int(tiers[pb.RECORD_TIER_NVME].records)
            time.sleep(0.05)  # the disk is another process's: it tells nobody when it is done
    raise AssertionError(f"after 20 s: {tiers}")


def is_written(tiers: dict[int, pb.TierCounts]) -> bool:
    dram, nvme = tiers[pb.RECORD_TIER_DRAM], tiers[pb.RECORD_TIER_NVME]
    return 0 < dram.records == nvme.records and not nvme.queued


def test_what_one_stack_stored_is_a_hit_for_the_next(tmp_path: Path) -> None:
    options = ("--kv-dir", str(tmp_path / "kept"), "--kv-gb", "0.5")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "one", *options) as up:
        answer, cached = ask(up)
        assert cached == 0
        written = records(up, is_written)
        assert up.stop(15)[0] == 0
    with serving(tmp_path / "two", *options) as up:
        assert records(up, lambda tiers: tiers[pb.RECORD_TIER_NVME].records == written) == written
        again, cached = ask(up)
        assert again == answer and cached >= 512
        assert up.stop(15)[0] == 0
