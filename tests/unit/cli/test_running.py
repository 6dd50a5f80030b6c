"""The doctor on services that run: the lane that each reports against the one that must be there, and the dialect."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from cli import running
from cli.doctor import Health
from cli.running import Running
from cli.runtime import StackRecord
from fabric.errors import StartError
from protos.deepinfer.v1 import decode_pb2, decode_pb2_grpc, recipe_pb2, recipe_pb2_grpc

HERE = StackRecord(pid=1, started=0.0, http="", grpc="", model="m", log_dir="", pids={}, addresses={})
RDMA, SHARED = "rc_mlx5/mlx5_0:1", "cma/memory+tcp/lo"


@pytest.mark.parametrize(
    ("lane", "transport", "health", "said"),
    [
        (SHARED, "ucx://", Health.OK, "shared-memory"),
        (RDMA, "ucx://?expect=rdma", Health.OK, "rdma"),
        (f"{RDMA}+{SHARED}", "ucx://?expect=shared-memory", Health.OK, "shared-memory is expected"),
        ("unconnected", "ucx://?expect=rdma", Health.OK, "no KV has moved yet, rdma is expected"),
        ("", "ucx://", Health.OK, "no KV has moved yet"),
        (SHARED, "ucx://?expect=rdma&missing=warn", Health.WARN, "shared-memory"),
        (SHARED, "ucx://?expect=rdma", Health.FAIL, "rdma is expected"),
        ("carrier pigeon", "ucx://?expect=rdma", Health.FAIL, "carrier pigeon"),
    ],
)
def test_a_lane_is_judged_by_what_must_be_there(lane, transport, health, said):
    finding = running.judge(lane, transport)
    assert finding.health is health and said in finding.detail
    assert bool(finding.fix) == (health is not Health.OK)


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    def Info(self, request, context):
        return decode_pb2.DecodeServiceInfoResponse(transport_lane=SHARED)


class Recipe(recipe_pb2_grpc.RecipeServiceServicer):
    def Info(self, request, context):
        return recipe_pb2.RecipeServiceInfoResponse(model="m", encoding="plain", dialects=[recipe_pb2.DIALECT_TEXT])


@contextmanager
def served():
    """The address of one server that is both."""
    server = grpc.server(ThreadPoolExecutor(2))
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(), server)
    recipe_pb2_grpc.add_RecipeServiceServicer_to_server(Recipe(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_every_service_of_a_stack_that_can_be_asked_is_asked():
    with served() as address:
        addresses = {"gateway": address, "etcd": "", "decode-0": address, "recipe": address}
        stack = replace(HERE, addresses=addresses, transport="ucx://?expect=rdma")
        findings = {name: check() for name, check in running.checks(running.of_stacks([stack])).items()}
    assert {name: finding.health for name, finding in findings.items()} == {
        "decode-0": Health.FAIL,
        "recipe": Health.WARN,
    }
    assert "dialect plain: m" in findings["recipe"].detail and "chat_template" in findings["recipe"].fix


def test_two_stacks_are_told_apart():
    stacks = [replace(HERE, pid=pid, addresses={"decode-0": "127.0.0.1:1"}) for pid in (7, 8)]
    assert [one.name for one in running.of_stacks(stacks)] == ["decode-0 of 7", "decode-0 of 8"]


def test_a_service_that_does_not_answer_fails_by_address():
    finding = running.checks([Running("decode-0", "decode", "127.0.0.1:1")])["decode-0"]()
    assert finding.health is Health.FAIL and "127.0.0.1:1 does not answer: UNAVAILABLE" in finding.detail


def test_services_are_found_by_discovery_with_the_transport_that_is_wanted():
    found = running.of_discovery("static://decode=h:1,gateway=h:2,recipe=h:3", "ucx://?expect=rdma")
    assert [(one.service, one.address, one.transport) for one in found] == [
        ("decode", "h:1", "ucx://?expect=rdma"),
        ("recipe", "h:3", "ucx://?expect=rdma"),
    ]
    with pytest.raises(StartError):
        running.of_discovery("static://decode=h:1", "ucx://?expect=telepathy")
