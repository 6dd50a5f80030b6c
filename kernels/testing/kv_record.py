"""Rows to be packed into records, and the check of the kernel that does it. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.kv_record` runs it without a GPU, in triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.reference import kv_record as definition
from kernels.reference.cast import scale_values
from kernels.reference.kv_record import Norm, Packed, Turn
from kernels.testing.tile import assert_cast, hold, make_rows, near

POISON = 0xA5


def make_operands(
    kind: Packed, rows: int, page_tokens: int, device: torch.device, seed: int, pairs: int = 32
) -> tuple[Tensor, Tensor, Tensor, Norm, Turn]:
    """x, slots in no order with some that name none, poisoned pages with room behind their records, norm and turn."""
    draw = torch.Generator(device).manual_seed(seed)
    layout = kind.value
    x = make_rows(rows, layout.width, device, seed)
    x[0], x[rows // 2] = 0, x[rows // 2] * 1e4
    count = -(-rows // page_tokens) + 1
    slots = torch.randperm(count * page_tokens, generator=draw, device=device)[:rows].clone()
    slots[1::4] = -1
    size = -(-page_tokens * layout.size // 16) * 16 + 16
    pages = torch.full((count, size), POISON, dtype=torch.uint8, device=device)
    angle = torch.rand(50, pairs, generator=draw, device=device) * 6
    positions = torch.randint(0, 50, (rows,), generator=draw, device=device, dtype=torch.int32)
    weight = torch.rand(layout.normed, generator=draw, device=device) + 0.5
    return x, slots, pages, Norm(weight, 1e-6), Turn(positions, angle.cos(), angle.sin())


def check_pack(device: torch.device, rows: int, page_tokens: int, kinds: Iterable[Packed] = Packed) -> None:
    """Bare rows bit for bit, normed and turned ones but for one rounding; nothing else is written."""
    from kernels.triton.kv_record import pack

    for kind in kinds:
        x, slots, pages, norm, turn = make_operands(kind, rows, page_tokens, device, rows)
        expected, written = pages.clone(), pages.clone()
        definition.pack(kind, x, slots, expected, page_tokens, None, None)
        pack(kind, x, slots, written, page_tokens, None, None)
        hold(torch.equal(written, expected), f"{kind.name}, bare")
        for one, other in ((norm, turn), (norm, None), (None, turn)):
            written, again = pages.clone(), pages.clone()
            pack(kind, x, slots, written, page_tokens, one, other)
            pack(kind, x, slots, again, page_tokens, one, other)
            hold(torch.equal(written, again), f"{kind.name}, a repeat's bits")
            _means(kind, written, slots, page_tokens, definition.prepared(kind, x, one, other))
            definition.pack(kind, x, slots, again, page_tokens, None, None)
            definition.pack(kind, x, slots, written, page_tokens, None, None)
            hold(torch.equal(written, again) and torch.equal(written, expected), f"{kind.name}, bytes around records")


def _means(kind: Packed, pages: Tensor, slots: Tensor, page_tokens: int, expected: Tensor) -> None:
    """The records of the slots hold `expected`."""
    layout = kind.value
    kept = slots >= 0
    page, place = slots[kept] // page_tokens, slots[kept] % page_tokens
    rows = pages[:, : page_tokens * layout.row].unflatten(1, (page_tokens, layout.row))[page, place]
    count = layout.cast // layout.spec.group
    if layout.scale_at is None:
        behind = pages[:, page_tokens * layout.row : page_tokens * layout.size]
        scales = behind.unflatten(1, (page_tokens, layout.scale_bytes))[page, place].contiguous()
    else:
        scales = rows[:, layout.scale_at : layout.scale_at + layout.scale_bytes].contiguous()
    scales = scales.view(layout.spec.scale_type)
    hold(not bool((scale_values(scales[:, count:]) > 1e-30).any()), f"{kind.name}, padding of scales")
    codes = rows[:, : layout.spec.code_columns(layout.cast)].contiguous().view(layout.spec.code_type)
    assert_cast(codes, scales[:, :count], layout.spec, expected[kept][:, : layout.cast])
    if layout.plain:
        plain = rows[:, layout.plain_at : layout.plain_at + 2 * layout.plain].contiguous().view(torch.bfloat16)
        near(plain, expected[kept][:, layout.cast :], f"{kind.name}, plain channels")


if __name__ == "__main__":
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    check_pack(torch.device("cpu"), 7, 3)
    print("the kernels equal the reference")
