"""Scopes: whose cached KV a request uses, as its messages say. Knows both sides' fields; derives no salt."""

from __future__ import annotations

from engine.prefix import RegionSalt, Salt
from fabric import wire
from fabric.errors import InvalidArgument
from fabric.retention import OWNER_BYTES, Keeping, RetentionClass
from protos.deepinfer.v1 import common_pb2 as common


def unpack_salt(tenant: bytes, scope: common.CacheScope) -> Salt:
    """What block keys are made with.

    Raises:
        InvalidArgument: a region without its salt.
    """
    if not scope.region_tokens:
        return tenant
    if not scope.region_salt:
        raise InvalidArgument("a region has no salt", field="scope.region_salt", fix="send it, or no region_tokens")
    return RegionSalt(tenant, scope.region_salt, scope.region_tokens)


def unpack_keeping(owner: bytes, code: common.RetentionClass, parent: str = "") -> Keeping:
    """Whose budget counts and how long. An unspecified class is the default one; `parent` names the message of both.

    Raises:
        InvalidArgument: the owner is none that a gateway makes, or the class does not exist.
    """
    nested = f"{parent}." if parent else ""
    if len(owner) not in (0, OWNER_BYTES):
        raise InvalidArgument(f"{len(owner)} bytes", field=f"{nested}owner", fix=f"send {OWNER_BYTES} bytes, or none")
    try:
        retention = wire.unpack_retention(code)
    except ValueError as error:
        known = ", ".join(RetentionClass)
        raise InvalidArgument(str(error), field=f"{nested}retention", fix=f"use one of {known}") from error
    return Keeping(owner, retention or RetentionClass.DEFAULT)
