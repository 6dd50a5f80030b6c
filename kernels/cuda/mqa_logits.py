"""Index scores on a GPU: launches of `mqa_logits.cu`. Shapes and formula: reference/mqa_logits.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A score's bits depend on its token and key
alone.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load, tensor_map
from kernels.errors import KernelError
from kernels.reference.mqa_logits import WIDTH, IndexKeys, MqaOperands, check_operands, tokens_of_a_sequence

SOURCE = Path(__file__).with_suffix(".cu")
TILE = 64
JOINED_ROWS = 66  # of 128 bytes: 64 keys and their scales
_MOST_COLUMNS = {16: 128, 32: 256, 64: 256}  # of a warpgroup, heads times tokens, by heads: what registers hold
_SHARED_BYTES = 232_448 - 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens that a warpgroup takes at once; `split`: both warpgroups have the same ones and take turns at the keys."""

    heads: int
    tokens: int
    split: bool
    stages: int
    query_stages: int
    page: int  # keys; 0: one page has all
    warpgroups: int = 2
    buffers: int = 2
    joined: bool = False  # pages are tiles with their scales right behind them

    @property
    def group(self) -> int:
        """Tokens that a block of threads takes at once."""
        return self.tokens if self.split else self.warpgroups * self.tokens

    @property
    def query_box(self) -> int:
        """Rows of queries, one for each head, that one copy takes: 256 at most."""
        rows = self.group * self.heads
        return rows // 2 if rows > 256 else rows

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warpgroup of which one warp copies."""
        return 128 * (self.warpgroups + 1)


class Scoring(ctypes.Structure):
    """Operands of the launch, as the header has them."""

    _fields_ = [("queries", ctypes.c_uint64 * 16), ("keys", ctypes.c_uint64 * 16), ("weights", ctypes.c_void_p),
                ("scales", ctypes.c_void_p), ("starts", ctypes.c_void_p), ("ends", ctypes.c_void_p),
                ("table", ctypes.c_void_p), ("scale_stride", ctypes.c_uint64), ("sequences", ctypes.c_int),
                ("sequence_tokens", ctypes.c_int), ("table_stride", ctypes.c_int),
                ("columns", ctypes.c_int)]  # fmt: skip


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("scoring", Scoring), ("logits", ctypes.c_void_p), ("stride", ctypes.c_uint64),
                ("unused", ctypes.c_uint64 * 6)]  # fmt: skip


def mqa_logits(given: MqaOperands, logits: Tensor) -> None:
    """Fill what the tokens see of logits fp32 [tokens, columns]; the rest is left as it is.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    tokens, columns = given.queries.shape[0], logits.shape[-1]
    check_operands(given, columns)
    if logits.dtype != torch.float32 or logits.shape != (tokens, columns) or logits.stride(1) != 1:
        raise KernelError(f"logits is {logits.dtype} {list(logits.shape)}", fix=f"pass fp32 [{tokens}, columns]")
    if not tokens:
        return
    plan = plan_of(given)
    parameters = Parameters(scoring_of(given, plan, columns), logits.data_ptr(), logits.stride(0))
    device = logits.device.index
    _kernel(plan, device).launch((multiprocessors(device), 1, 1), parameters)


def plan_of(given: MqaOperands) -> Plan:
    """Few tokens of many sequences share their keys' way through memory, many tokens of one the keys themselves."""
    heads, tokens = given.queries.shape[1], tokens_of_a_sequence(given)
    page = 0 if given.keys.table is None else given.keys.values.shape[1]
    most = _MOST_COLUMNS[heads]
    if tokens * heads <= 128:
        # Nine tiles on their way are as fast as twelve; six take 3 to 6 % longer.
        return Plan(heads, 1 << (tokens - 1).bit_length(), True, 9, 2, page, 3, 1, is_joined(given.keys))
    return Plan(heads, most // heads, False, 8, 2, page, buffers=1)


def is_joined(keys: IndexKeys) -> bool:
    """Whether each page is a tile of values with its scales right behind them, which one copy takes."""
    behind = keys.scales.data_ptr() - keys.values.data_ptr() == TILE * WIDTH
    return (
        keys.table is not None
        and keys.values.shape[1] == TILE
        and behind
        and (keys.scales.stride(0) * 4 == keys.values.stride(0))
    )


def scoring_of(given: MqaOperands, plan: Plan, columns: int) -> Scoring:
    """Operands of a launch that were checked."""
    values, table = given.keys.values, given.keys.table
    sequences = 1 if table is None else len(table)
    found = Scoring(
        weights=given.weights.data_ptr(), scales=given.keys.scales.data_ptr(), ends=given.ends.data_ptr(),
        starts=0 if given.starts is None else given.starts.data_ptr(), table=0 if table is None else table.data_ptr(),
        scale_stride=given.keys.scales.stride(0), sequences=sequences, sequence_tokens=tokens_of_a_sequence(given),
        table_stride=0 if table is None else table.shape[1], columns=columns,
    )  # fmt: skip
    queries = given.queries.view(torch.bfloat16).view(1, -1, WIDTH // 2)
    keys, box = values.view(torch.bfloat16), _box(plan)
    if plan.joined:
        keys, box = keys.as_strided((len(values), JOINED_ROWS, WIDTH // 2), keys.stride()), JOINED_ROWS
    for field, tensor, rows in (("queries", queries, plan.query_box), ("keys", keys, box)):
        described = tensor_map(tensor, (1, rows, WIDTH // 2))
        ctypes.memmove(ctypes.addressof(getattr(found, field)), described, len(described))
    return found


def defines_for(plan: Plan) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {"HEADS": plan.heads, "TOKENS": plan.tokens, "SPLIT": int(plan.split), "STAGES": plan.stages,
            "QUERY_STAGES": plan.query_stages, "PAGE": plan.page, "BOX": _box(plan), "WARPGROUPS": plan.warpgroups,
            "BUFFERS": plan.buffers, "JOINED": int(plan.joined)}  # fmt: skip


def _box(plan: Plan) -> int:
    return math.gcd(plan.page, TILE)


def compile_for(plan: Plan, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(plan))


def scoring_bytes(plan: Plan) -> int:
    """Shared memory for queries, keys, scales, weights, bounds and barriers."""
    queries, keys = plan.group * plan.heads * WIDTH, 9 * 1024 if plan.joined else TILE * (WIDTH + 4)
    bounds = plan.group * plan.heads * 4 + -(-(32 + plan.group * 8) // 16) * 16
    barriers = 16 * (plan.stages + plan.query_stages)
    return plan.query_stages * (queries + bounds) + plan.stages * keys + barriers + 128


@functools.cache
def multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _kernel(plan: Plan, device: int) -> Kernel:
    with torch.cuda.device(device):
        return load(compile_for(plan)[0], "mqa_logits", plan.threads, scoring_bytes(plan))
