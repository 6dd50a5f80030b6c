"""V3.2's published records inside kernels of latent attention: one is written, a tile of them read. Launches nothing.

Of 656 bytes: 512 E4M3 codes, an fp32 scale for 128 of them, 64 channels in bf16 (reference/kv_record.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.scaling import FP32, magnitude, scale_of

RECORD = tl.constexpr(656)
_CODES, _GROUP, _PLAIN = tl.constexpr(512), tl.constexpr(128), tl.constexpr(528)


@triton.jit
def put_latent(record, value):
    """The codes and scales of a latent fp32 [512]. Returns where its key goes, in bf16."""
    groups: tl.constexpr = _CODES // _GROUP
    value = tl.reshape(value, (groups, _GROUP))
    scale, factor = scale_of(tl.max(magnitude(value), 1), FP32, 448.0, 1e-4)
    tl.store((record + _CODES).to(tl.pointer_type(tl.float32)) + tl.arange(0, groups), scale)
    code = tl.reshape(value * factor[:, None], (_CODES,)).to(tl.float8e4nv)
    tl.store(record + tl.arange(0, _CODES), code.to(tl.uint8, bitcast=True))
    return (record + _PLAIN).to(tl.pointer_type(tl.bfloat16))


@triton.jit
def get_latents(record, inside, other):
    """Latents bf16 [keys, 512] of the records that are `inside`, `other` of the others; and where their keys are."""
    groups: tl.constexpr = _CODES // _GROUP
    keys: tl.constexpr = inside.shape[0]
    code = tl.load(record[:, None] + tl.arange(0, _CODES)[None, :], mask=inside[:, None], other=0)
    scales = (record + _CODES).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales[:, None] + tl.arange(0, groups)[None, :], mask=inside[:, None], other=0.0)
    value = tl.reshape(code.to(tl.float8e4nv, bitcast=True).to(tl.float32), (keys, groups, _GROUP))
    value = tl.reshape(value * scale[:, :, None], (keys, _CODES)).to(tl.bfloat16)
    return tl.where(inside[:, None], value, other), (record + _PLAIN).to(tl.pointer_type(tl.bfloat16))
