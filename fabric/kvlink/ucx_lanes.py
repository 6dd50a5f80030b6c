"""Which lanes UCX chose, read from its own log: it has no call that tells. Knows environment variables and log lines.

UCX is configured by its UCX_* environment variables; those that matter most here: UCX_TLS (transports to allow, such as
"tcp,sm,self" on a CPU host or "all"), UCX_NET_DEVICES (network devices to use), UCX_LOG_LEVEL (at least "info" for the
lanes to be known) and UCX_LOG_FILE (taken by this module unless set by the user, who then reads the lanes there).
"""

from __future__ import annotations

import ctypes
import os
import re

UNCONNECTED = "unconnected"
_OURS = "/proc/self/fd/"
# "<agent> intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)": the "self" configuration says nothing of peers.
_CONFIGURATION = re.compile(r"(?:intra|inter)-node cfg#\d+ (.*)")
_SELF = re.compile(r"self cfg#\d+ (.*)")
_LANES = re.compile(r"\b(?:rma|rma_bw|am|am_bw|rkey_ptr|rma_am)\(([^)]*)\)")

_log_fd = -1


def prepare() -> None:
    """Directs UCX's log of this process into memory. Must run before UCX is loaded; later calls change nothing."""
    global _log_fd  # the environment is as global as this
    if _log_fd >= 0 or not os.environ.get("UCX_LOG_FILE", _OURS).startswith(_OURS):
        return
    _log_fd = os.memfd_create("ucx-log")
    os.environ["UCX_LOG_FILE"] = f"{_OURS}{_log_fd}"
    os.environ.setdefault("UCX_LOG_LEVEL", "info")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")


def chosen() -> str:
    """The lanes towards peers so far, such as "cma/memory+tcp/lo"; "unconnected" before the first connection."""
    return parse(_read()) if _log_fd >= 0 else "unknown (see UCX_LOG_FILE)"


def offered() -> str:
    """The lanes that UCX set up towards this process itself when it started: what it may use on this host."""
    return parse(_read(), _SELF) if _log_fd >= 0 else "unknown (see UCX_LOG_FILE)"


def parse(log: str, lines: re.Pattern[str] = _CONFIGURATION) -> str:
    """The lanes named by the connection lines of a UCX log at level "info"."""
    lanes = {
        lane
        for configuration in lines.findall(log)
        for group in _LANES.findall(configuration)
        for lane in group.split()
        if not lane.startswith("<")
    }
    return "+".join(sorted(lanes)) or UNCONNECTED


def _read() -> str:
    ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream and flushes it only at exit
    size = os.fstat(_log_fd).st_size
    return os.pread(_log_fd, size, 0).decode(errors="replace")
