"""What `deepinfer kv` says where nobody, or somebody else, answers."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cli import kv_calls
from cli.running import Running
from fabric.errors import Unavailable
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb

ASKED = {
    "counts": kv_calls.counts,
    "list": lambda one: kv_calls.each(one, "ListRecords", pb.ListRecordsRequest(), lambda page: None),
}


def refused(ask: str, address: str) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        ASKED[ask](Running(address, "kvstore", address))
    return caught.value


@pytest.mark.parametrize("ask", ASKED)
def test_an_address_where_nobody_answers_is_named_with_its_option_and_a_fix(ask):
    with socket.socket() as held:  # bound and never listening: nobody else can take the port meanwhile
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        error = refused(ask, address)
    assert error.message.startswith(address) and error.field == "--address" and "kvstore's row" in error.fix


@pytest.mark.parametrize("ask", ASKED)
def test_so_is_the_address_of_another_service(ask):
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        error = refused(ask, address)
    finally:
        server.stop(None).wait()
    assert "does not answer as a kvstore" in error.message and error.field == "--address" and error.fix
