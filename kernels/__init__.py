"""Operators of the engine: one `Ops` record, chosen once at start. Knows tensors; knows no model, no scheduler, no network."""

from kernels.choose import choose
from kernels.errors import KernelError
from kernels.ops import Ops

__all__ = ["KernelError", "Ops", "choose"]
