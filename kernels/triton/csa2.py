"""V4.1's own operators of the triton backend."""

from kernels.reference.csa2 import OPS

__all__ = ["OPS"]
