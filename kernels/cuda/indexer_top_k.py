"""The best keys of every token on a GPU: launches of `indexer_top_k.cu`. Definition: reference/indexer_top_k.py.

One launch that never writes scores; nothing is allocated, so that it captures into a CUDA graph. A token's result
is unique, whatever else is in the batch and however many blocks share its keys. Launches that share a workspace must
follow one another.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.cuda.mqa_logits import Plan, Scoring, is_joined, multiprocessors, scoring_bytes, scoring_of
from kernels.cuda.mqa_logits import defines_for as scoring_defines
from kernels.errors import KernelError
from kernels.reference.mqa_logits import MqaOperands, check_operands, tokens_of_a_sequence

SOURCE = Path(__file__).with_suffix(".cu")
MOST_CHOSEN = 2048
_MOST_TOKENS, _STAGES = 2, {True: 12, False: 6}
_DESK_BYTES = 4096 + 20


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("scoring", Scoring), ("indices", ctypes.c_void_p), ("partial", ctypes.c_void_p),
                ("arrivals", ctypes.c_void_p), ("count", ctypes.c_int), ("unused", ctypes.c_int * 9)]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Where blocks leave candidates of a token that they share. `arrivals` is zero between launches."""

    partial: Tensor
    arrivals: Tensor


def workspace_of(device: torch.device) -> Workspace:
    """Memory for launches on `device` that follow one another: 17 MB on 132 multiprocessors."""
    blocks = multiprocessors(torch.device(device).index or 0)
    most = blocks * 2 * 2 * _MOST_TOKENS
    return Workspace(
        torch.empty(most * MOST_CHOSEN, dtype=torch.int64, device=device),
        torch.zeros(blocks * 2, dtype=torch.int32, device=device),
    )


def indexer_top_k(given: MqaOperands, columns: int, workspace: Workspace, indices: Tensor) -> None:
    """Fill indices int32 [tokens, count] with keys before `columns`.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    check_operands(given, columns)
    tokens, count = given.queries.shape[0], indices.shape[-1]
    if indices.dtype != torch.int32 or indices.shape[:-1] != (tokens,) or not indices.is_contiguous():
        found = f"{indices.dtype} {list(indices.shape)}"
        raise KernelError(f"indices is {found}", fix=f"pass contiguous int32 [{tokens}, count]")
    if not 1 <= count <= MOST_CHOSEN:
        raise KernelError(f"count is {count}", fix=f"ask for 1 to {MOST_CHOSEN}")
    if not tokens:
        return
    plan, device = plan_of(given), indices.device.index
    parameters = Parameters(
        scoring_of(given, plan, columns), indices.data_ptr(), workspace.partial.data_ptr(),
        workspace.arrivals.data_ptr(), count,
    )  # fmt: skip
    _kernel(plan, device).launch((multiprocessors(device), 1, 1), parameters)


def plan_of(given: MqaOperands) -> Plan:
    """As for scores alone, with fewer tokens and stages: a token's candidates need room."""
    heads, tokens = given.queries.shape[1], tokens_of_a_sequence(given)
    split, page = tokens <= _MOST_TOKENS, 0 if given.keys.table is None else given.keys.values.shape[1]
    return Plan(heads, tokens if split else _MOST_TOKENS, split, _STAGES[split], 2 if split else 1, page,
                joined=split and is_joined(given.keys))  # fmt: skip


def room_of(plan: Plan) -> int:
    """Candidates of a token in shared memory: 32 for each thread that has them."""
    return 8192 if plan.split and plan.tokens == 1 else 4096


def defines_for(plan: Plan) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {**scoring_defines(plan), "ROOM": room_of(plan)}


def compile_for(plan: Plan, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(plan))


def shared_bytes(plan: Plan) -> int:
    """Of a launch: scoring, the teams' desks, and every token's candidates with their counts."""
    teams, warps = (1, 8) if plan.split else (2, 4)
    desks = teams * -(-(_DESK_BYTES + 4 * warps) // 16) * 16
    counts = -(-(plan.group * 8 + teams * 8) // 16) * 16
    return scoring_bytes(plan) + desks + counts + plan.group * room_of(plan) * 8


@functools.cache
def _kernel(plan: Plan, device: int) -> Kernel:
    with torch.cuda.device(device):
        return load(compile_for(plan)[0], "indexer_top_k", plan.threads, shared_bytes(plan))
