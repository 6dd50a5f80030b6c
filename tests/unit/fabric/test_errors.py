"""Errors keep their meaning over the network and show nothing else."""

from __future__ import annotations

import grpc
import pytest

from fabric import errors, wire
from fabric.errors import STATUS, Exhausted, Internal, NotFound, ServiceError, Unavailable


def rpc_error(status: grpc.StatusCode, *trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="details")


@pytest.mark.parametrize("kind", STATUS, ids=lambda kind: kind.__name__)
def test_every_error_crosses_the_network_unchanged(kind):
    sent = kind("what", field="prompt", fix="shorten it", retryable=True, retry_after_s=1.5)
    packed = wire.dump_error(errors.to_detail(sent, "request-7"))
    got = errors.from_rpc(rpc_error(errors.status_of(sent), (errors.DETAIL_KEY, packed)))
    assert type(got) is kind
    assert (got.message, got.field, got.fix, got.retryable, got.retry_after_s) == (
        "what",
        "prompt",
        "shorten it",
        True,
        1.5,
    )
    assert wire.load_error(packed).request_id == "request-7"


def test_statuses_are_distinct_and_cover_every_error_that_travels():
    kinds = {kind for kind in _subclasses(ServiceError) if kind.__module__ == errors.__name__}
    assert kinds - {errors.StartError} == set(STATUS)
    assert len(set(STATUS.values())) == len(STATUS)


def test_a_subclass_takes_the_status_of_its_base():
    class QueueFull(Exhausted):
        pass

    assert errors.status_of(QueueFull("full")) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, NotFound),
        (grpc.StatusCode.UNKNOWN, Internal),
    ],
)
def test_a_bare_status_becomes_the_nearest_error(status, kind):
    assert type(errors.from_rpc(rpc_error(status))) is kind


def test_a_damaged_detail_does_not_hide_the_error():
    got = errors.from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, (errors.DETAIL_KEY, b"\xff\xff\xff")))
    assert type(got) is Unavailable


def test_text_names_field_and_fix():
    error = errors.InvalidArgument("must be finite", field="temperature", fix="use 0 to 2")
    assert str(error) == "temperature: must be finite (use 0 to 2)"


def _subclasses(kind: type) -> set[type]:
    return {found for sub in kind.__subclasses__() for found in {sub} | _subclasses(sub)}
