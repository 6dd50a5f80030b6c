"""Operators of the engine: one `Ops` record, chosen once at start. Knows tensors; knows no model and no network."""

from kernels.choose import choose, choose_name
from kernels.errors import DeviceError, KernelError
from kernels.ops import Ops

__all__ = ["DeviceError", "KernelError", "Ops", "choose", "choose_name"]
