"""The engine's operators over V4's and V4.1's published records against the reference: on a GPU, or interpreted.

`TRITON_INTERPRET=1 python -m kernels.testing.window_records` stands in for the CUDA kernels by their definitions: what
is checked is what they are told to read and what is written for them. On a GPU they run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import reference
from kernels.csa2 import ChoiceSpec, Csa2Ops, csa2_ops
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    IndexerSpec,
    IndexMixing,
    Pages,
    Ragged,
    Ring,
    RopeTable,
    Selection,
)
from kernels.ops import Ops
from kernels.testing.choices import expect_chosen, hold
from kernels.testing.generator import generator, ragged_of, ring_of, rope_of

PAGE, RATE, WINDOW, ROOM = 64, 4, 12, 8  # tokens of a block and of an entry, rows of a window and beside it
FEW = ((5, 1), (20, 3), (0, 2), (130, 3), (64, 1))  # cached before, new: rows that are stored before they are attended
MANY = ((5, 1), (20, 11), (0, 10), (130, 3))  # rows of which some are attended in a page of their own
_HEADS, _INDEX_HEADS, _TOPK, _WIDTH, _KEY = 3, 16, 24, 512, 128
_MIXED = 1e-2  # of mixtures: bf16 queries, weights and values
_SAME_BYTES, _SAME_CHOICES = 0.995, 0.97  # where a number lies between two codes, or two scores alike, either is right


@dataclass(frozen=True, slots=True)
class Family:
    """Bytes of a window row, an entry and an index key, each with those of its scales where they stand apart."""

    row: tuple[int, int]
    entry: tuple[int, int]
    key: tuple[int, int]


V4, V41 = Family((576, 8), (576, 8), (128, 4)), Family((528, 0), (288, 0), (68, 0))


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, its caches, and the operands of a layer on one device."""

    rows: Ragged
    rope: RopeTable
    ring: Ring
    entries: Pages
    keys: Pages
    spec: AttentionSpec
    mixing: IndexMixing


def make(family: Family, device: torch.device, seed: int, spans: Sequence[tuple[int, int]]) -> Case:
    """Fresh operands; every byte of the caches is a NaN."""
    draw, rows = generator(seed), ragged_of(spans, PAGE, (RATE,))
    blocks, held, count = int(rows.tables.max()) + 1, WINDOW + ROOM, PAGE // RATE
    sizes = (family.entry[0], family.key[0], family.entry[1], family.key[1])
    starts = [count * sum(sizes[:place]) for place in range(5)]
    storage = _poisoned(blocks, starts[-1], device)
    slots = _poisoned(len(spans), held * sum(family.row), device)
    entries = Pages(storage, None, starts[0], count, family.entry[0], RATE)
    keys = Pages(storage, None, starts[1], count, family.key[0], RATE)
    ring = Ring(slots, None, 0, held, family.row[0])
    if family.entry[1]:
        entries = replace(entries, scales=Pages(storage, None, starts[2], count, family.entry[1], RATE))
        scales = Pages(storage.view(torch.float32), None, starts[3] // 4, count, 1, RATE)
        keys = replace(keys, scales=scales)
        ring = replace(ring, scales=Ring(slots, None, held * family.row[0], held, family.row[1]))
    matrix = torch.linalg.qr(torch.randn(_KEY, _KEY, generator=draw))[0].contiguous().to(device)
    rope = rope_of(160, 32)
    spec = AttentionSpec(_HEADS, _WIDTH, WINDOW, torch.randn(_HEADS, generator=draw).to(device), 1e-6)
    on = RopeTable(rope.cos.to(device), rope.sin.to(device))
    return Case(rows, on, ring, entries, keys, spec, IndexMixing(matrix, False))


def fill(case: Case, seed: int) -> None:
    """Cache every row before the batch and every entry up to its end, as chunks before it would have."""
    from kernels.reference.storage import store_entry, store_mixed, store_rows

    draw, rows, device = generator(seed), case.rows, case.ring.storage.device
    past = [(0, int(context)) for context in rows.context if context]
    whole = replace(ragged_of(past, PAGE, ()), slots=rows.slots[rows.context > 0])
    store_rows(torch.randn(whole.rows, _WIDTH, generator=draw).to(device), 0, whole, case.ring)
    for s, (context, new) in enumerate(zip(rows.context.tolist(), _new(rows), strict=True)):
        for entry in range((context + new) // RATE):
            store_entry(s, rows, case.entries, entry, torch.randn(_WIDTH, generator=draw).to(device))
            key = torch.randn(_KEY, generator=draw).to(device)
            if case.keys.scales is None:
                store_entry(s, rows, case.keys, entry, key)
            else:
                store_mixed(s, rows, case.keys, entry, key, case.mixing)


def check_rows(family: Family, ops: Ops, device: torch.device, spans: Sequence[tuple[int, int]]) -> None:
    """Window rows are where the reference has them, and the same but for roundings; nothing else is written."""
    found, wanted = make(family, device, 1, spans), make(family, device, 1, spans)
    rows = torch.randn(found.rows.rows, _WIDTH, generator=generator(2)).to(device)
    for case, by in ((found, ops), (wanted, reference.OPS)):
        by.store_rows(rows, 0, case.rows, case.ring)
    _expect_same(found.ring.storage, wanted.ring.storage, "window rows")


def check_entries(ops: Ops, device: torch.device) -> None:
    """What V4's compressors write: entries, and mixed index keys."""
    found, wanted = make(V4, device, 3, MANY), make(V4, device, 3, MANY)
    columns = 4 * _WIDTH
    for name, width, mixing in (("entries", _WIDTH, None), ("keys", _KEY, found.mixing)):
        draw = generator(4)
        bias, norm = torch.randn(RATE, 2 * width, generator=draw), torch.rand(width, generator=draw) + 0.5
        spec = CompressorSpec(0, RATE, width, True, bias.to(device), norm.to(device), 1e-6, mixing)
        projected = torch.randn(found.rows.rows, columns, generator=draw).to(device)
        for case, by in ((found, ops), (wanted, reference.OPS)):
            ring = ring_of(case.rows, 2 * RATE + ROOM, spec.row_width, torch.float32, 5)
            ring = replace(ring, storage=ring.storage.to(device))
            by.compress(projected, spec, case.rows, ring, getattr(case, name), case.rope)
    _expect_same(found.entries.storage, wanted.entries.storage, "what compressors write")


def check_published(csa2: Csa2Ops, device: torch.device) -> None:
    """What V4.1's sources write: entries and index keys."""
    found, wanted = make(V41, device, 6, MANY), make(V41, device, 6, MANY)
    count, draw = len(found.rows.windows[RATE].window), generator(7)
    for name, width in (("entries", _WIDTH), ("keys", _KEY)):
        values = torch.randn(count, width, generator=draw).to(device)
        for case, by in ((found, csa2), (wanted, csa2_ops("reference"))):
            by.store_entries(values, case.rows, getattr(case, name))
    _expect_same(found.entries.storage, wanted.entries.storage, "what sources write")


def check_choice(ops: Ops, device: torch.device) -> None:
    """V4's best entries of each row, of rows that see fewer than are chosen and of rows that see more."""
    case = make(V4, device, 8, FEW)
    fill(case, 9)
    draw, rows = generator(10), case.rows.rows
    queries, projected = (torch.randn(rows, width, generator=draw).to(device) for width in (16 * _KEY, _INDEX_HEADS))
    spec = IndexerSpec(0, 0, _INDEX_HEADS, _KEY, _TOPK, case.mixing)
    operands = (queries, projected, spec, case.rows, case.keys, case.rope)
    expect_chosen(ops.index_topk(*operands), reference.OPS.index_topk(*operands), _SAME_CHOICES)


def check_proposals(csa2: Csa2Ops, device: torch.device) -> None:
    """V4.1's best entries and candidate blocks over FP4 keys, and entries within candidates."""
    case = make(V41, device, 11, FEW)
    fill(case, 12)
    draw, rows = generator(13), case.rows.rows
    queries, weights = (torch.randn(rows, width, generator=draw).to(device) for width in (16 * _KEY, _INDEX_HEADS))
    spec = ChoiceSpec(_INDEX_HEADS, _KEY, _TOPK, 3, 4)
    for some in (None, Selection(torch.tensor([[1, 4, 6]] * rows).int().to(device), _threes(rows, device))):
        operands = (queries, weights, spec, case.rows, case.keys, some)
        found, wanted = csa2.choose(*operands), csa2_ops("reference").choose(*operands)
        for mine, theirs in zip(found, wanted, strict=True):
            if mine is not None and theirs is not None:
                expect_chosen(mine, theirs, _SAME_CHOICES)


def check_mixtures(family: Family, ops: Ops, device: torch.device, spans: Sequence[tuple[int, int]]) -> None:
    """A window alone, with all entries and with chosen ones; rows of a replay see none before their floor."""
    case, draw = make(family, device, 14, spans), generator(15)
    fill(case, 16)
    rows = case.rows.rows
    queries, fresh = (torch.randn(rows, width, generator=draw).to(device) for width in (_HEADS * _WIDTH, _WIDTH))
    counts = torch.from_numpy((case.rows.positions + 1) // RATE).int().clamp_max(5).to(device)
    some = Selection(torch.arange(6, dtype=torch.int32, device=device).expand(rows, 6).contiguous(), counts)
    floors = replace(case.rows, floors=case.rows.context - case.rows.context // 3)
    kinds = ((case.rows, None, None), (case.rows, case.entries, None), (floors, case.entries, some))
    for batch, pages, selection in kinds:
        found, wanted = _attended(ops, case, batch, queries, fresh, pages, selection)
        error = float((found - wanted).norm() / wanted.norm())
        hold(error < _MIXED, f"a mixture's relative error is {error:.3g}")


def _attended(
    ops: Ops, case: Case, batch: Ragged, queries: Tensor, fresh: Tensor, pages: Pages | None,
    selection: Selection | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """By these operators and by the reference, each with a ring of its own, in the order in which a layer has them."""
    made = []
    for by in (ops, reference.OPS):
        slots = case.ring.storage.clone()
        ring = replace(case.ring, storage=slots, scales=case.ring.scales and replace(case.ring.scales, storage=slots))
        if ring.takes_first(batch, case.spec.window):
            by.store_rows(fresh, 0, batch, ring)
        made.append(by.attend(queries, fresh, case.spec, batch, ring, pages, selection, case.rope))
    return made[0], made[1]


def check_all(ops: Ops, device: torch.device) -> None:
    """Everything but V4.1's own operators."""
    check_entries(ops, device)
    check_choice(ops, device)
    for family in (V4, V41):
        for spans in (FEW, MANY):
            check_rows(family, ops, device, spans)
            check_mixtures(family, ops, device, spans)


def check_csa2(csa2: Csa2Ops, device: torch.device) -> None:
    """V4.1's own operators."""
    check_published(csa2, device)
    check_proposals(csa2, device)


def _expect_same(mine: Tensor, theirs: Tensor, what: str) -> None:
    touched = theirs != 0xFF
    hold(bool((mine[~touched] == 0xFF).float().mean() > _SAME_BYTES), f"bytes around {what}")
    share = float((mine[touched] == theirs[touched]).float().mean())
    hold(share > _SAME_BYTES, f"{what}: {share:.4f} of bytes are the reference's")


def _poisoned(rows: int, size: int, device: torch.device) -> Tensor:
    return torch.full((rows, -(-size // 256) * 256), 0xFF, dtype=torch.uint8, device=device)


def _threes(rows: int, device: torch.device) -> Tensor:
    return torch.full((rows,), 3, dtype=torch.int32, device=device)


def _new(rows: Ragged) -> list[int]:
    return [int(end - first) for first, end in zip(rows.starts, rows.starts[1:], strict=False)]


if __name__ == "__main__":
    from kernels.cuda import csa2
    from kernels.cuda.engine import domain
    from kernels.cuda.engine.ops import INVARIANT, OPS
    from kernels.testing.engine_records import _stand_in
    from kernels.testing.interpreter import require_interpreter
    from kernels.triton import csa2 as by_triton

    require_interpreter()
    _stand_in()
    domain._FUSED_TOKENS = 1 << 20
    check_all(OPS, torch.device("cpu"))
    check_mixtures(V4, INVARIANT, torch.device("cpu"), FEW)
    check_csa2(replace(csa2.OPS, choose=by_triton.choose), torch.device("cpu"))
    print("the operators equal the reference")
