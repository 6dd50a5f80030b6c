"""What CUDA kernels take of a multiprocessor, as their compiler reports it. Knows shapes of tiles; needs no GPU."""

from __future__ import annotations

import re

from kernels.ahead import Compiled
from kernels.cuda.gemm_choice import large_tiles
from kernels.cuda.gemm_large import compile_for
from kernels.errors import KernelError

_STACK, _REGISTERS = re.compile(r"(\d+) bytes stack frame"), re.compile(r"Used (\d+) registers")


def large_products() -> list[Compiled]:
    """The product of many tokens for sm_90a, every tile that may be chosen; registers are those at the start.

    Raises KernelError where NVRTC is missing or says nothing of a kernel.
    """
    found = []
    for form, grain in (("", 128), ("", 32), (" fp4", 128)):
        for large in large_tiles(grain, fp4=bool(form)):
            name = f"gemm_large {large.tokens}x{large.rows}/{grain}{form}"
            report = compile_for(large, grain)[1]
            stack, registers = _STACK.search(report), _REGISTERS.search(report)
            if stack is None or registers is None:
                raise KernelError(f"the compiler says nothing of {name}: {report}", fix="use the CUDA the docs name")
            found.append(Compiled(name, int(registers[1]), int(stack[1]), large.shared_bytes, large.threads))
    return found
