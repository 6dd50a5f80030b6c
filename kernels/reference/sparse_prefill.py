"""Sparse MLA prefill in torch: every query token attends over the bf16 latents that its own list names.

out[h] = sum_i w_i v_i, w = softmax over i of scale * q_h . k_i, over the valid indices of the query; k is the whole row
of 576 or 512 channels, v the first 512 of them. A sink adds exp(sink_h) to the denominator alone. lse is the logarithm
of the sum without the sink; a query that names nothing has output 0 and lse +inf (as FlashMLA has it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError

VALUE_WIDTH, WIDTHS = 512, (512, 576)
_QUERIES_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class NamedLatents:
    """keys bf16 [slots, width]; indices int32 [queries, n]; lengths int32 [queries] or None.

    Indices outside the slots (-1) and those at or behind a query's length name nothing: no byte of theirs matters.
    """

    keys: Tensor
    indices: Tensor
    lengths: Tensor | None = None

    def valid(self) -> Tensor:
        """bool [queries, n]: the index names a latent."""
        found = (self.indices >= 0) & (self.indices < self.keys.shape[0])
        if self.lengths is not None:
            found &= torch.arange(self.indices.shape[1], device=self.indices.device) < self.lengths[:, None]
        return found


def sparse_prefill(query: Tensor, named: NamedLatents, sink: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """query [queries, heads, width] -> float64 (output [queries, heads, 512], lse [queries, heads])."""
    outputs, sums = [], []
    valid = named.valid()
    for start in range(0, query.shape[0], _QUERIES_AT_ONCE):
        part = slice(start, start + _QUERIES_AT_ONCE)
        keys = named.keys[torch.where(valid[part], named.indices[part], 0).long()].to(torch.float64)
        keys = keys.masked_fill(~valid[part][..., None], 0)
        scores = query[part].to(torch.float64) @ keys.mT * scale
        scores = scores.masked_fill(~valid[part][:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        whole = lse if sink is None else torch.logaddexp(lse, sink.to(torch.float64))
        empty = ~valid[part].any(1)[:, None]
        weights = (scores - whole[..., None]).exp().masked_fill(empty[..., None], 0)
        outputs.append(weights @ keys[..., :VALUE_WIDTH])
        sums.append(lse.masked_fill(empty, torch.inf))
    return torch.cat(outputs), torch.cat(sums)


def check_operands(query: Tensor, named: NamedLatents, sink: Tensor | None, output: Tensor, lse: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    queries, heads, width = query.shape
    if width not in WIDTHS:
        raise KernelError(f"query has {width} channels", fix=f"pass one of {WIDTHS}")
    wanted = [
        ("query", query, torch.bfloat16, (queries, heads, width)),
        ("output", output, torch.bfloat16, (queries, heads, VALUE_WIDTH)),
        ("lse", lse, torch.float32, (queries, heads)),
        ("indices", named.indices, torch.int32, (queries, named.indices.shape[-1])),
    ]
    if sink is not None:
        wanted.append(("sink", sink, torch.float32, (heads,)))
    if named.lengths is not None:
        wanted.append(("lengths", named.lengths, torch.int32, (queries,)))
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")
    keys = named.keys
    if keys.dtype != torch.bfloat16 or keys.shape[1:] != (width,) or keys.stride(1) != 1:
        raise KernelError(f"keys are {keys.dtype} {list(keys.shape)}", fix=f"pass torch.bfloat16 [slots, {width}]")
    if keys.stride(0) % 8 or keys.data_ptr() % 16:
        raise KernelError(f"keys have strides {keys.stride()}", fix="align rows to 16 bytes")
