"""V4.1's own operators on the CPU, batch-invariant as the others are."""

from __future__ import annotations

from kernels.cpu.candidates import choose
from kernels.cpu.engram import engram
from kernels.cpu.pool import pool, store_entries
from kernels.cpu.singlepass import hyper_collapse, hyper_mix, norm
from kernels.cpu.turn import rotate_heads
from kernels.csa2 import Csa2Ops

OPS = Csa2Ops(
    hyper_mix=hyper_mix,
    hyper_collapse=hyper_collapse,
    pool=pool,
    norm=norm,
    rotate_heads=rotate_heads,
    store_entries=store_entries,
    choose=choose,
    engram=engram,
)
