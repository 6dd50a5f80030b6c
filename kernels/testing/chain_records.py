"""Latent attention of few rows over V3.2's published records, as a chain of Triton kernels, against the reference.

`TRITON_INTERPRET=1 python -m kernels.testing.chain_records` runs it without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import reference
from kernels.reference.linear import Dense, pack
from kernels.testing.engine_records import fill, make
from kernels.testing.generator import generator
from kernels.triton.engine import latent

SPANS = ((5, 1), (20, 1), (0, 1), (70, 1))  # cached before, new
_MIXED, _SAME_BYTES = 1e-2, 0.995


def check_chain(device: torch.device) -> None:
    """Each row's record is the reference's but for roundings, nothing else is written, and mixtures are as exact as
    bf16 queries, weights and values."""
    found, wanted = make(device, False, 21, SPANS), make(device, False, 21, SPANS)
    draw, rows = generator(22), found.rows.rows
    for case in (found, wanted):
        fill(case, reference.OPS, 23)
    absorb = pack(torch.randn(3, 512, 8, generator=draw), True)
    spec = replace(found.spec, absorb=Dense(absorb.matrix.to(device), absorb.rounds))
    queries = torch.randn(rows, 3 * (8 + 64), generator=draw).to(device)
    query = latent.absorb(queries, found.projected, spec, found.rows, found.latents, found.rope)
    mixed = latent.mix(*latent.attend(query, spec, found.rows, found.latents, None))
    reference.OPS.store_latent(wanted.projected, spec, wanted.rows, wanted.latents, wanted.rope)
    absorbed, turning = reference.OPS.linear(queries[:, :24].contiguous(), spec.absorb), queries[:, 24:].contiguous()
    expected = reference.OPS.attend_latent(absorbed, turning, spec, wanted.rows, wanted.latents, None, wanted.rope)
    share = float((found.latents.storage == wanted.latents.storage).float().mean())
    if share <= _SAME_BYTES:
        raise AssertionError(f"{share:.4f} of bytes are the reference's")
    error = float((mixed - expected).norm() / expected.norm())
    if not error < _MIXED:
        raise AssertionError(f"a mixture's relative error is {error:.3g}")


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    check_chain(torch.device("cpu"))
    print("the operators equal the reference")
