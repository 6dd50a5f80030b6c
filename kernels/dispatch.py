"""Expert parallelism: rows go to the ranks that hold their experts and come back weighted. Knows no expert's product.

Every rank gives room to `capacity` rows of every rank, so that sizes never depend on the data: nothing is allocated or
asked of the device while it runs, and one process is the same as many. A rank's rows: at most `capacity`, each naming
an expert at most once. A row travels once to a rank however many of its experts are there; what they make of it is
summed there, and the ranks' sums at home, both in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor

from kernels.errors import KernelError


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where entries go. int32: counts [groups]; offsets [groups + 1], where each group's slots begin; places [rows,
    choices], the slot of an entry or -1; sources [slots], the entry (row * choices + choice) in a slot or -1; and
    blocks [blocks, groups], workspace."""

    counts: Tensor
    offsets: Tensor
    places: Tensor
    sources: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class DispatchOps:
    """One implementation; shapes stand in kernels/reference/dispatch.py."""

    plan: Callable[[Tensor, int, int, Plan], None]
    destinations: Callable[[Tensor, int, Tensor], None]
    copy_rows: Callable[[Tensor, Tensor, int, Tensor], None]
    localize: Callable[[Tensor, Tensor, Tensor, int, int, Tensor, Tensor], None]
    combine: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]


class Exchange(Protocol):
    """Ranks that swap equal shares: share i of what `swap` takes goes to rank i, share i of what it fills is from i."""

    rank: int
    size: int

    def swap(self, sent: Tensor, received: Tensor) -> None: ...


class Alone:
    """The one rank of one process."""

    rank, size = 0, 1

    def swap(self, sent: Tensor, received: Tensor) -> None:
        received.copy_(sent)


class Group:
    """Ranks of a torch.distributed group. NCCL's swaps capture into CUDA graphs; gloo's serve tests."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)

    def swap(self, sent: Tensor, received: Tensor) -> None:
        """Bytes, because not every backend knows every type."""
        torch.distributed.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=self._group)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """Rows from all ranks [ranks * capacity, ...]: `parts` as given to dispatch, `experts` int32 [.., choices]
    numbered within this rank, -1 where there is none, and `weights` fp32 of the same shape."""

    parts: tuple[Tensor, ...]
    experts: Tensor
    weights: Tensor


class Dispatcher:
    """Buffers of one rank, made once: `parts` are the types and widths of what travels (rows; or codes and scales)."""

    def __init__(
        self, ops: DispatchOps, exchange: Exchange, experts: int, choices: int, capacity: int,
        parts: tuple[tuple[torch.dtype, int], ...], hidden: int, device: torch.device,
    ) -> None:  # fmt: skip
        """Raises KernelError where the ranks cannot share the experts evenly."""
        if experts % exchange.size:
            raise KernelError(f"{experts} experts on {exchange.size} ranks", fix="use a multiple of the ranks")
        self._ops, self._exchange, self._capacity = ops, exchange, capacity
        self._local = experts // exchange.size
        rows = exchange.size * capacity
        self._plan = make_plan(capacity, choices, exchange.size, rows, device)
        self._targets = torch.empty(capacity, choices, dtype=torch.int32, device=device)
        self._sent = _received(rows, choices, parts, device)
        self._received = _received(rows, choices, parts, device)
        self._back = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)

    def dispatch(self, parts: tuple[Tensor, ...], chosen: Tensor, weights: Tensor) -> Received:
        """Send rows, chosen int32 [rows, choices] (-1: none) and weights fp32 to the ranks of their experts.

        What is returned stands until the next call. Raises KernelError for more rows than there is room for.
        """
        rows, choices = chosen.shape
        if rows > self._capacity:
            raise KernelError(f"{rows} rows", fix=f"send at most {self._capacity} at a time")
        targets = self._targets[:rows]
        self._ops.destinations(chosen, self._local, targets)
        self._plan_of(rows)
        for given, sent in zip(parts, self._sent.parts, strict=True):
            self._ops.copy_rows(given, self._plan.sources, choices, sent)
        sent, received = self._sent, self._received
        sources, capacity = self._plan.sources, self._capacity
        self._ops.localize(chosen, weights, sources, capacity, self._local, sent.experts, sent.weights)
        pairs = [*zip(sent.parts, received.parts, strict=True), (sent.experts, received.experts)]
        for one, other in (*pairs, (sent.weights, received.weights)):
            self._exchange.swap(one, other)
        return received

    def combine(self, summed: Tensor, rows: int, added: Tensor | None, out: Tensor) -> None:
        """Send back summed bf16 [ranks * capacity, hidden], what this rank's experts made of the rows it received, and
        fill out bf16 [rows, hidden] with the sums of what comes back for the rows sent last, plus `added`."""
        self._exchange.swap(summed, self._back)
        self._ops.combine(self._back, self._plan.places[:rows], None, added, out)

    def _plan_of(self, rows: int) -> None:
        whole = self._plan
        part = Plan(whole.counts, whole.offsets, whole.places[:rows], whole.sources, whole.blocks)
        self._ops.plan(self._targets[:rows], self._capacity, 0, part)


def make_plan(rows: int, choices: int, groups: int, slots: int, device: torch.device) -> Plan:
    """Memory for a plan of up to `rows` rows; contiguous groups take rows * choices + groups * (alignment - 1)."""
    blocks = max(1, -(-rows * choices // PLAN_BLOCK))
    shapes = ((groups,), (groups + 1,), (rows, choices), (slots,), (blocks, groups))
    return Plan(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


PLAN_BLOCK = 256  # entries that one program of a plan takes


def _received(rows: int, choices: int, parts: tuple[tuple[torch.dtype, int], ...], device: torch.device) -> Received:
    made = tuple(torch.zeros(rows, width, dtype=dtype, device=device) for dtype, width in parts)
    experts = torch.full((rows, choices), -1, dtype=torch.int32, device=device)
    return Received(made, experts, torch.zeros(rows, choices, device=device))
