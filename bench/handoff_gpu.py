"""KV handoff between two processes on one GPU: a NIXL WRITE into a slab, copied into blocks and digested in one pass.

The payload is V4.1's: 77,000 tokens at 890 bytes, 602 blocks of 128 tokens with four extents each, scattered over the
pools of both sides by block tables. A handoff is timed from the sender's start (monotonic clock of one host) until the
receiver has compared every digest with the receipt, which travels with the last byte. Two ways to push:

blocks    one descriptor for each block, straight out of the pool; digests were made when the blocks were filled
gathered  one kernel copies the blocks into a send slab and digests them, then one descriptor: sealing is in the time

The bar is for the second, which is how a GPU ought to push: the first pays the host for every descriptor.

Every round has fresh bytes, and the receiver's blocks are overwritten before it. Share of verifying: what the verified
commit takes over a plain memcpy of the same bytes by the host's clock: launches, the way of the digests to the host and
their comparison. An upper bound, since the commit scatters and memcpy does not. Share of the digest: the same
difference by the device's clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from bench.arguments import Parser, new_file, positive
from bench.gpu_wire import Wire
from bench.table import Row, report
from kernels.reference.leaf_digest import leaf_digest
from kernels.triton.leaf_digest import ExtentPlan, copy_digest_extents, digest_extents, plan_extents

BAR_MS = 5.0
BLOCK_TOKENS = 128
# V4.1 at 128 tokens a block: entries (288 B) and index keys (68 B) of 3 layers for 2 tokens each, and of 1 for each.
BLOCK_EXTENTS = (3 * 288 * 64, 3 * 68 * 64, 288 * 128, 68 * 128)
BLOCK_BYTES = sum(BLOCK_EXTENTS)
WAYS = ("blocks", "gathered")
WARMUP = 3
POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Payload:
    """`blocks` blocks, spread over a pool of twice as many by a table that `seed` draws; packed in a slab in order."""

    blocks: int
    seed: int

    @property
    def nbytes(self) -> int:
        return self.blocks * BLOCK_BYTES

    @property
    def table(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed).permutation(2 * self.blocks)[: self.blocks].astype(np.int64)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of every extent: offset in the slab, offset in the pool, bytes. int64 [4 * blocks] each."""
        inside = np.concatenate(([0], np.cumsum(BLOCK_EXTENTS)[:-1]))
        slab = (np.arange(self.blocks)[:, None] * BLOCK_BYTES + inside).reshape(-1)
        pool = (self.table[:, None] * BLOCK_BYTES + inside).reshape(-1)
        return slab, pool, np.tile(np.array(BLOCK_EXTENTS, np.int64), self.blocks)

    def plan(self, into_pool: bool, device: torch.device) -> ExtentPlan:
        """Extents from slab to pool, or from pool to slab."""
        slab, pool, sizes = self.places()
        if into_pool:
            return plan_extents(slab, pool, sizes, self.nbytes, 2 * self.nbytes, device)
        return plan_extents(pool, slab, sizes, 2 * self.nbytes, self.nbytes, device)


class Sender:
    """The other process: a pool of blocks, a send slab, and the way asked for."""

    def __init__(self, pipe: Connection, blocks: int, device: torch.device) -> None:
        self._pipe, self._payload, self._device = pipe, Payload(blocks, seed=1), device
        self._pool = torch.zeros(2 * self._payload.nbytes, dtype=torch.uint8, device=device)
        self._slab = torch.zeros(self._payload.nbytes, dtype=torch.uint8, device=device)
        self._plan = self._payload.plan(into_pool=False, device=device)
        self._wire = Wire("sender", device)
        self._wire.register(self._pool)
        self._wire.register(self._slab)
        metadata, self._target = pipe.recv()
        self._wire.meet(metadata)

    def serve(self) -> None:
        while (way := self._pipe.recv()) is not None:
            self._pool.random_(0, 256)
            sealing_s, digests = timed(self._device, lambda: on_host(digest_extents(self._pool, self._plan)))
            started = time.perf_counter()
            self._push_blocks(digests) if way == "blocks" else self._push_gathered()
            self._pipe.send((started, sealing_s))
        self._wire.close()

    def _push_blocks(self, digests: NDArray[np.uint64]) -> None:
        count = self._payload.blocks
        sources = self._pool.data_ptr() + self._payload.table * BLOCK_BYTES
        targets = self._target + np.arange(count) * BLOCK_BYTES
        self._wire.write(sources, targets, np.full(count, BLOCK_BYTES), digests.tobytes())

    def _push_gathered(self) -> None:
        digests = on_host(copy_digest_extents(self._pool, self._slab, self._plan))
        whole = (np.array([value]) for value in (self._slab.data_ptr(), self._target, self._payload.nbytes))
        self._wire.write(*whole, digests.tobytes())


def send(pipe: Connection, blocks: int, device: torch.device) -> None:
    """Entry of the sending process."""
    Sender(pipe, blocks, device).serve()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Seconds from the sender's start to the arrival of the receipt, and on to the last compared digest."""

    arrived_s: float
    verified_s: float
    sealing_s: float
    receipt: NDArray[np.uint64]


class Receiver:
    """A landing slab, a pool of live blocks, and the timing of a handoff."""

    def __init__(self, pipe: Connection, blocks: int, device: torch.device) -> None:
        self.payload, self.device, self._pipe = Payload(blocks, seed=2), device, pipe
        self.slab = torch.zeros(self.payload.nbytes, dtype=torch.uint8, device=device)
        self.pool = torch.zeros(2 * self.payload.nbytes, dtype=torch.uint8, device=device)
        self.plan = self.payload.plan(into_pool=True, device=device)
        self._wire = Wire("receiver", device)
        self._wire.register(self.slab)
        pipe.send((self._wire.metadata(), self.slab.data_ptr()))

    def handoff(self, way: str) -> Handoff:
        """One handoff of fresh bytes. Raises RuntimeError where a digest differs from the receipt."""
        self.pool.fill_(POISON)
        synchronize(self.device)
        self._pipe.send(way)
        receipt = np.frombuffer(self._wire.arrived(), np.uint64)
        arrived = time.perf_counter()
        wrong = self.differing(receipt)
        verified = time.perf_counter()
        while not self._pipe.poll():
            self._wire.idle()
        started, sealing_s = self._pipe.recv()
        if wrong.size:
            raise RuntimeError(f"{wrong.size} of {len(receipt)} extents differ from their receipt")
        return Handoff(arrived - started, verified - started, sealing_s, receipt)

    def differing(self, receipt: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Copies the slab into the blocks; which extents arrived there with another digest than the receipt's."""
        return np.flatnonzero(on_host(copy_digest_extents(self.slab, self.pool, self.plan)) != receipt)

    def differing_by_reference(self, receipt: NDArray[np.uint64]) -> int:
        """Extents whose bytes in their live blocks have another digest by the definition, computed on the host."""
        live = self.pool.cpu().numpy()
        _, starts, sizes = self.payload.places()
        found = [leaf_digest(live[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        return int((np.array(found, np.uint64) != receipt).sum())

    def close(self) -> None:
        self._pipe.send(None)
        self._wire.close()


def detected_flips(receiver: Receiver, receipt: NDArray[np.uint64], flips: int) -> int:
    """How many single bits flipped in the slab made their own extent, and no other, differ from the receipt."""
    rng, found = np.random.default_rng(0), 0
    starts, _, _ = receiver.payload.places()
    for place, bit in zip(rng.integers(0, receiver.slab.numel(), flips), rng.integers(0, 8, flips), strict=True):
        receiver.slab[int(place)] ^= 1 << int(bit)
        extent = int(np.searchsorted(starts, place, side="right")) - 1
        found += receiver.differing(receipt).tolist() == [extent]
        receiver.slab[int(place)] ^= 1 << int(bit)
    return found


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows, from two processes on one device."""
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    blocks = -(-options.tokens // BLOCK_TOKENS)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=send, args=(there, blocks, device))
    child.start()
    try:
        receiver = Receiver(here, blocks, device)
        rounds = {way: [receiver.handoff(way) for _ in range(WARMUP + options.rounds)][WARMUP:] for way in WAYS}
        receipt = rounds[WAYS[-1]][-1].receipt
        wrong = receiver.differing_by_reference(receipt)
        parts = _parts(receiver, receipt, options.rounds)
        flips = detected_flips(receiver, receipt, options.flips)
        receiver.close()
    finally:
        child.join(10)
        child.kill()
    rows = [row for way in WAYS for row in _handoff_rows(way, rounds[way], parts, options.bar_ms)]
    return [
        *rows,
        *(Row(name, seconds * 1e3, "ms") for name, seconds in parts.items()),
        Row("extents in live blocks that the reference finds wrong", wrong, "", 0),
        Row(f"bit flips detected, of {options.flips}", flips, "", options.flips, ">="),
    ]


def _handoff_rows(way: str, rounds: list[Handoff], parts: dict[str, float], bar_ms: float) -> list[Row]:
    verified = [each.verified_s for each in rounds]
    total_s = statistics.median(verified)
    found = [
        Row(f"{way}: push start to verified, p50", total_s * 1e3, "ms", bar_ms if way == "gathered" else None),
        Row(f"{way}: the same, slowest of {len(rounds)}", max(verified) * 1e3, "ms"),
        Row(f"{way}: unverified push (start to notice), p50", _median_ms([each.arrived_s for each in rounds]), "ms"),
        Row(f"{way}: share of verifying, at most", 100 * (parts[COMMIT] - parts[MEMCPY]) / total_s, "%"),
    ]
    if DEVICE_COMMIT in parts:
        hashing_s = parts[DEVICE_COMMIT] - parts[DEVICE_MEMCPY]
        found.append(Row(f"{way}: share of the digest, device clock", 100 * hashing_s / total_s, "%"))
    if way == "blocks":
        sealing = _median_ms([each.sealing_s for each in rounds])
        found.append(Row("blocks: digests of all blocks by the sender, before the push", sealing, "ms"))
    return found


MEMCPY = "memcpy of the same bytes, host clock, p50"
COMMIT = "verified commit (to compared digests), host clock, p50"
DEVICE_MEMCPY = "memcpy, device clock, p50"
DEVICE_COMMIT = "copy and digest, device clock, p50"
PLAN = "plan of all extents, made when blocks are reserved, p50"


def _parts(receiver: Receiver, receipt: NDArray[np.uint64], rounds: int) -> dict[str, float]:
    """Median seconds of the pieces of a commit, the device to itself."""
    other, device = torch.empty_like(receiver.slab), receiver.device
    parts: dict[str, Callable[[], object]] = {
        MEMCPY: lambda: other.copy_(receiver.slab),
        COMMIT: lambda: receiver.differing(receipt),
        PLAN: lambda: receiver.payload.plan(into_pool=True, device=device),
    }
    found = {name: statistics.median(timed(device, part)[0] for _ in range(rounds)) for name, part in parts.items()}
    if device.type == "cuda":
        copied = lambda: copy_digest_extents(receiver.slab, receiver.pool, receiver.plan)  # noqa: E731
        found[DEVICE_MEMCPY] = _on_device(parts[MEMCPY], rounds)
        found[DEVICE_COMMIT] = _on_device(copied, rounds)
        found["digest alone, device clock, p50"] = _on_device(
            lambda: digest_extents(receiver.slab, receiver.plan), rounds
        )
    return found


def timed(device: torch.device, work: Callable[[], object]) -> tuple[float, NDArray[np.uint64]]:
    """Seconds until the device is done, and what `work` returned."""
    synchronize(device)
    started = time.perf_counter()
    found = work()
    synchronize(device)
    return time.perf_counter() - started, found  # type: ignore[return-value]


def _on_device(work: Callable[[], object], rounds: int) -> float:
    """Median seconds between two events around `work`, queued behind a wait so that launches cost nothing."""
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def on_host(digests: torch.Tensor) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = digests.cpu().numpy().view(np.uint64)
    return found


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=positive, default=77_000)
    parser.add_argument("--rounds", type=positive, default=200, help="handoffs of each way that are timed")
    parser.add_argument("--flips", type=positive, default=1_000, help="bits flipped in the slab, one at a time")
    parser.add_argument("--bar-ms", type=float, default=BAR_MS)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run under TRITON_INTERPRET=1, no figure"
    )
    parser.add_argument("--json", type=new_file, default=None)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu is a dry run")
    megabytes = -(-options.tokens // BLOCK_TOKENS) * BLOCK_BYTES / 1e6
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "host memory"
    return report(f"{options.tokens:,} tokens, {megabytes:.1f} MB, {name}", measure(options), options.json)


if __name__ == "__main__":
    sys.exit(main())
