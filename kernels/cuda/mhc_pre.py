"""mHC's coefficients and the collapse of its streams on a GPU in one launch, of `mhc_pre.cu`; see reference/mhc.py.

Into memory that is there, no workspace: it captures into a CUDA graph. A row's bits depend on it alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from torch import Tensor

from kernels.cuda.tile_plan import WARP, Plan, address, check_aligned, threads_of
from kernels.reference.mhc import MhcSite, check_pre

SOURCE = Path(__file__).with_suffix(".cu")
_TURNS = 4  # of a thread, 16 bytes of each stream in each
_BATCH = 4  # rows whose coefficients a warp makes


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("x", ctypes.c_void_p), ("z", ctypes.c_void_p), ("squares", ctypes.c_void_p),
                ("base", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("given", ctypes.c_void_p),
                ("norm", ctypes.c_void_p), ("collapsed", ctypes.c_void_p), ("mixed", ctypes.c_void_p),
                ("post_weights", ctypes.c_void_p), ("comb", ctypes.c_void_p), ("rows", ctypes.c_int),
                ("hyper_eps", ctypes.c_float), ("norm_eps", ctypes.c_float)]  # fmt: skip


def pre(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, norm: Tensor | None, collapsed: Tensor, mixed: Tensor,
    post_weights: Tensor, comb: Tensor, given: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill collapsed bf16 [rows, hidden] and fp32 mixed [rows, 4], post_weights [rows, 4], comb [rows, 4, 4].

    x bf16 [rows, 4, hidden]; z fp32 [parts, rows, 24] and squares fp32 [parts, rows] are the projection's; norm fp32
    [hidden] or None. Collapsed by `given` fp32 [rows, 4] (V4.1), else by mixed. Raises KernelError for operands the
    kernel does not take, before anything is launched.
    """
    parameters = parameters_of(x, z, squares, site, norm, collapsed, mixed, post_weights, comb, given)
    if parameters.rows:
        plan = plan_for(x.shape[2], len(z), site.iterations, norm is not None, given is not None)
        plan.launch(blocks_of(parameters.rows, plan), parameters, x.device)


def parameters_of(
    x: Tensor, z: Tensor, squares: Tensor, site: MhcSite, norm: Tensor | None, collapsed: Tensor, mixed: Tensor,
    post_weights: Tensor, comb: Tensor, given: Tensor | None = None,
) -> Parameters:  # fmt: skip
    """Checked operands of a launch. Raises KernelError."""
    check_pre(x, z, squares, site, norm, collapsed, mixed, post_weights, comb, given)
    check_aligned(x=x, z=z, collapsed=collapsed, comb=comb, norm=norm, given=given)
    places = (x, z, squares, site.base, site.scale, given, norm, collapsed, mixed, post_weights, comb)
    return Parameters(*(address(each) for each in places), x.shape[0], site.hyper_eps, site.norm_eps)


def plan_for(hidden: int, parts: int, iterations: int, normed: bool, given: bool) -> Plan:
    """A block for each row of streams of `hidden`, and those that make coefficients."""
    threads = threads_of(hidden, _TURNS)
    defines = {"HIDDEN": hidden, "PARTS": parts, "ITERATIONS": iterations, "BLOCK": threads, "NORMED": int(normed),
               "GIVEN": int(given)}  # fmt: skip
    return Plan(SOURCE, defines, threads, threads // WARP * 4)


def blocks_of(rows: int, plan: Plan) -> int:
    """Of a launch."""
    return rows + -(-rows // (plan.threads // WARP * _BATCH))
