"""The KV link: bytes of one process written one-sided into slabs of another. Knows buffers, never models."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import SplitResult, parse_qsl, urlsplit

from fabric.errors import StartError
from fabric.kvlink.lanes import Expectation
from fabric.kvlink.link import Link, Notice, Region, Token, Write
from fabric.kvlink.mapped import CopyTable
from fabric.lifecycle import check_port_free

__all__ = ["Link", "Notice", "Region", "Token", "Write", "check_link", "open_link"]
_LOOPBACK = "127.0.0.1"
_FIX = "use ucx://, tcp://host:port or inproc://"


def check_link(url: str) -> None:
    """Raises StartError where `open_link` would for the URL itself, or for a library that is missing. Opens nothing:
    which lanes there are, the transport alone can say."""
    parts, _ = _parsed(url)
    match parts.scheme:
        case "ucx":
            if find_spec("nixl_cu12") is None:
                fix = "pip install --no-deps nixl-cu12==1.5.1, or use tcp://127.0.0.1:0"
                raise StartError("nixl-cu12, which ucx:// needs, is not installed", field="transport", fix=fix)
        case "tcp":
            check_port_free(f"{parts.hostname or _LOOPBACK}:{parts.port or 0}", "transport")
        case "inproc":
            pass
        case _:
            raise StartError(f"no KV transport for {url!r}", field="transport", fix=_FIX)


def _parsed(url: str) -> tuple[SplitResult, Expectation]:
    """Raises StartError for what is no URL, and for options of no transport."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # read here, where it may be none
    except ValueError as error:
        raise StartError(f"{url!r}: {error}", field="transport", fix=_FIX) from error
    return parts, Expectation.parse(dict(parse_qsl(parts.query, keep_blank_values=True)))


def open_link(url: str, name: str, epoch: int, copy: CopyTable | None = None) -> Link:
    """Opens the transport that the URL names: ucx://, tcp://host[:port] or inproc://. Call it from a running loop.

    Args:
        url: what carries the bytes. UCX obeys its own UCX_* variables, such as UCX_TLS and UCX_NET_DEVICES. A query
            names the lane that must be there, and whether its absence is an error or a warning:
            `ucx://?expect=rdma&missing=warn`. Memory of peers on this host is mapped by ucx://, unless
            `ucx://?mapped=off`.
        name: this instance, unique in the deployment; peers see it as `LinkAddress.peer`.
        epoch: this incarnation of it; higher than every earlier one.
        copy: how mapped memory is written to; without one, by the C library, copy by copy.

    Raises:
        StartError: no such transport or option, it cannot start here, or the expected lane cannot come to be.
    """
    parts, expected = _parsed(url)
    match parts.scheme:
        case "ucx":
            from fabric.kvlink import ucx_lanes

            ucx_lanes.prepare()  # UCX reads its environment when its library is loaded
            from fabric.kvlink.ucx import UcxLink

            return UcxLink(name, epoch, expected, copy)
        case "tcp":
            from fabric.kvlink.tcp import TcpLink

            expected.check_start("tcp")
            return TcpLink(parts.hostname or _LOOPBACK, parts.port or 0, name, epoch)
        case "inproc":
            from fabric.kvlink.inproc import InprocLink

            expected.check_start("inproc")
            return InprocLink(name, epoch)
    raise StartError(f"no KV transport for {url!r}", field="transport", fix=_FIX)
