"""Drawing on a device: the parameters of a batch's rows in one copy, their tokens in another. Knows no distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.sampler import Row
from kernels.reference.sampling import SamplingRows
from kernels.sampler import Sample
from kernels.staging import on_device

_COLDEST = 1e-20  # below, fp32 has no inverse of a temperature, and only the likeliest token weighs anything
_MOST = 2**31 - 1


def drawn(sample: Sample, logits: Tensor, rows: Sequence[Row]) -> NDArray[np.int32]:
    """A token for each row of logits fp32 [rows, vocabulary]. Waits for them."""
    return sample(logits, parameters(rows, logits.device)).cpu().numpy()


def parameters(rows: Sequence[Row], device: torch.device) -> SamplingRows:
    """What the draw of every row needs, on `device`."""
    count, given = len(rows), [row.params for row in rows]
    whole = np.zeros(8 * count, np.int32)
    long, short = whole[: 4 * count].view(np.uint64).reshape(2, count), whole[4 * count :].reshape(4, count)
    long[0], long[1] = [row.seed for row in rows], [len(row.output) for row in rows]
    floats = short.view(np.float32)
    floats[0] = [one.temperature if one.temperature > _COLDEST else 0.0 for one in given]
    floats[1], floats[2] = [one.top_p for one in given], [one.min_p for one in given]
    short[3] = [min(one.top_k, _MOST) for one in given]
    on = on_device(whole, device)
    seeds, draws = on[: 4 * count].view(torch.int64).view(2, count)
    temperature, top_p, min_p = on[4 * count : 7 * count].view(torch.float32).view(3, count)
    return SamplingRows(temperature, on[7 * count :], top_p, min_p, seeds, draws)
