"""Membership: which instances of a service are there. Opened by URL; a hint that a health check confirms."""

from __future__ import annotations

from fabric.discovery.base import Discovery
from fabric.discovery.member import MemberInfo
from fabric.errors import StartError

__all__ = ["Discovery", "MemberInfo", "open_discovery"]


def open_discovery(url: str) -> Discovery:
    """Opens the backend that the URL names: etcd://[user:password@]host:port, memory://[name] or
    static://service=host:port,...

    Raises:
        StartError: the URL names no backend or is malformed. Nothing is contacted yet: see `Discovery.ready`.
    """
    scheme, separator, rest = url.partition("://")
    match scheme if separator else "":
        case "etcd":
            from fabric.discovery.etcd import Endpoint, EtcdDiscovery

            return EtcdDiscovery(Endpoint.parse(url))
        case "memory":
            from fabric.discovery.memory import MemoryDiscovery

            return MemoryDiscovery(rest)
        case "static":
            from fabric.discovery.static import StaticDiscovery

            return StaticDiscovery.parse(rest)
    raise StartError(
        f"no discovery backend for {url!r}",
        field="discovery",
        fix="use etcd://host:port, static://service=host:port,... or memory://",
    )
