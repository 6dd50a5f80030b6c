"""One NIXL agent over UCX between two benchmark processes, for memory of a GPU or of the host. Knows addresses only."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

TIMEOUT_S = 30.0
T = TypeVar("T")


class Wire:
    """Driven by its caller alone: without a progress thread nothing moves between calls, and nothing is woken late."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Raises ImportError where the NIXL build for this torch's CUDA is not installed."""
        # The wheels differ by CUDA alone; on the host any of them does, and the project's own is for 12.
        major = torch.version.cuda.split(".")[0] if device.type == "cuda" and torch.version.cuda else "12"
        self._nixl: Any = importlib.import_module(f"nixl_cu{major}._bindings")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        self._agent: Any = self._nixl.nixlAgent(name, config)
        options, _ = self._agent.getPluginParams("UCX")
        self._backends = [self._agent.createBackend("UCX", options)]
        self._segment = self._nixl.VRAM_SEG if device.type == "cuda" else self._nixl.DRAM_SEG
        self._device_id = device.index or 0
        self._registered: list[Any] = []
        self._peer = b""

    def register(self, memory: torch.Tensor) -> None:
        """Makes contiguous memory known to UCX; the peer learns of it by metadata fetched afterwards."""
        rows = self._rows(np.array([memory.data_ptr()]), np.array([memory.nbytes]))
        descriptors = self._nixl.nixlRegDList(self._segment, rows)
        self._agent.registerMem(descriptors, self._backends)
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> None:
        self._peer = self._agent.loadRemoteMD(metadata)

    def write(
        self, sources: NDArray[np.int64], targets: NDArray[np.int64], sizes: NDArray[np.int64], note: bytes
    ) -> None:
        """Writes [n] runs of bytes from addresses here to addresses there; the peer gets `note` when all arrived."""
        nixl, agent = self._nixl, self._agent
        local = nixl.nixlXferDList(self._segment, self._rows(sources, sizes))
        remote = nixl.nixlXferDList(self._segment, self._rows(targets, sizes))
        handle = agent.createXferReq(nixl.NIXL_WRITE, local, remote, self._peer, note, self._backends)
        if agent.postXferReq(handle) != nixl.NIXL_SUCCESS:
            self._until(lambda: agent.getXferStatus(handle) == nixl.NIXL_SUCCESS)
        agent.releaseXferReq(handle)

    def arrived(self) -> bytes:
        """The next note of the peer; spins."""
        notes = self._until(lambda: self._agent.getNotifs({}, self._backends))
        return bytes(next(iter(notes.values()))[0])

    def idle(self) -> None:
        """Lets the peer make progress where it needs this side, as when it connects."""
        self._agent.getNotifs({}, self._backends)

    def close(self) -> None:
        for descriptors in self._registered:
            self._agent.deregisterMem(descriptors, self._backends)
        self._registered.clear()
        self._agent = None

    def _rows(self, addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        return np.stack((addresses, sizes, np.full(len(sizes), self._device_id)), axis=1).astype(np.uint64)

    def _until(self, ask: Callable[[], T]) -> T:
        """The first answer that is true. Raises TimeoutError."""
        deadline = time.perf_counter() + TIMEOUT_S
        while not (answer := ask()):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"the peer took more than {TIMEOUT_S:.0f} s")
        return answer
