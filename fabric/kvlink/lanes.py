"""What kind of wire carries KV, and whether it is the one expected. Knows names of UCX's transports, no link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from fabric.errors import StartError, Unavailable
from fabric.telemetry import logs

_log = logs.get("kvlink")


class LaneKind(StrEnum):
    """Kinds of lanes, the fastest first."""

    CUDA_IPC = "cuda-ipc"
    RDMA = "rdma"
    SHARED_MEMORY = "shared-memory"
    TCP = "tcp"


_PREFIXES: Mapping[LaneKind, tuple[str, ...]] = {
    LaneKind.CUDA_IPC: ("cuda_ipc",),
    LaneKind.RDMA: ("rc_", "rc/", "dc_", "dc/", "ud_", "ud/", "srd", "gga", "ib/"),
    LaneKind.SHARED_MEMORY: ("mapped/", "cma/", "posix/", "sysv/", "xpmem/", "knem/", "inproc"),
    LaneKind.TCP: ("tcp",),
}
Missing = Literal["error", "warn"]


def kinds(lane: str) -> tuple[LaneKind, ...]:
    """Kinds in a link's `lane`, such as "cma/memory+tcp/lo"; the first is the one that bulk prefers."""
    parts = lane.split("+")
    return tuple(kind for kind in LaneKind if any(part.startswith(_PREFIXES[kind]) for part in parts))


@dataclass(frozen=True, slots=True)
class Expectation:
    """A lane that must be there; without one, whether its absence is an error or a warning; and whether memory of peers
    on this host is mapped where the transport can do that."""

    kind: LaneKind | None = None
    missing: Missing = "error"
    mapped: bool = True

    @property
    def may_map(self) -> bool:
        """Mapped memory is shared memory: where another kind is expected, it would only hide that."""
        return self.mapped and self.kind in (None, LaneKind.SHARED_MEMORY)

    @staticmethod
    def parse(options: Mapping[str, str]) -> Expectation:
        """From a transport URL's query, as in `ucx://?expect=rdma&missing=warn`.

        Raises:
            StartError: an unknown option or value.
        """
        known = {"expect": [*LaneKind], "missing": [*get_args(Missing)], "mapped": ["on", "off"]}
        for name, value in options.items():
            if value not in known.get(name, []):
                raise StartError(f"{name}={value!r} is no option of a transport", field="transport", fix=_FIX)
        kind = LaneKind(options["expect"]) if "expect" in options else None
        missing: Missing = "warn" if options.get("missing") == "warn" else "error"
        return Expectation(kind, missing, options.get("mapped") != "off")

    def check_start(self, offered: str, host: Path = Path("/")) -> None:
        """Compares with what the transport offers on this host before any peer is known.

        Raises:
            StartError: the expected kind cannot come to be here, and that is an error.
        """
        if self.kind is None or self.kind in kinds(offered) or _has_device(self.kind, host):
            return
        text = f"no {self.kind} lane can come to be on this host; the transport offers {offered}"
        if self.missing == "error":
            raise StartError(text, field="transport", fix=_MISSING_FIX)
        _log.warning("EXPECTED LANE IS MISSING", reason=text, fix=_MISSING_FIX)

    def check_peer(self, lane: str, peer: str) -> None:
        """Compares with what carried the first push to a peer.

        Raises:
            Unavailable: it is another kind, and that is an error.
        """
        if self.kind is None or self.kind in kinds(lane):
            return
        text = f"the lane to {peer} is {lane}, not {self.kind}"
        if self.missing == "error":
            raise Unavailable(text, field="transport", fix=_MISSING_FIX, retryable=False)
        _log.warning("EXPECTED LANE IS MISSING", reason=text, fix=_MISSING_FIX)


_FIX = f"use expect={'|'.join(LaneKind)}, missing={'|'.join(get_args(Missing))} and mapped=on|off"
_MISSING_FIX = "check UCX_TLS, UCX_NET_DEVICES and the device's driver, or add missing=warn to the transport"


def _has_device(kind: LaneKind, host: Path) -> bool:
    """Whether the kernel shows a device for lanes that UCX does not use towards itself."""
    if kind is LaneKind.RDMA:
        states = (host / "sys/class/infiniband").glob("*/ports/*/state")
        return any("ACTIVE" in state.read_text() for state in states)
    return kind is LaneKind.CUDA_IPC and (host / "proc/driver/nvidia/version").exists()
