"""The engine's operators over published records against the reference: on a GPU, or interpreted without one.

`TRITON_INTERPRET=1 python -m kernels.testing.engine_records` stands in for the CUDA kernels by their definitions: what
is checked is what they are told to read and what is written for them. On a GPU they run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import reference
from kernels.operands import IndexerSpec, IndexKeySpec, IndexMixing, MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.ops import Ops
from kernels.reference.linear import pack
from kernels.reference.records import LATENT_BYTES
from kernels.testing.choices import expect_chosen, hold
from kernels.testing.generator import generator, ragged_of, rope_of

PAGE = 16
SPANS = ((5, 1), (20, 3), (0, 2), (70, 3), (64, 1))  # cached before, new
_HEADS, _INDEX_HEADS, _TOPK = 3, 16, 24
_MIXED = 2e-2  # of mixtures: FP8 queries, bf16 weights and values
_SAME_CODES, _SAME_CHOICES = 0.995, 0.98  # where a number lies between two codes, or two scores alike, either is right
_SCALE, _TURNED = 2e-6, 2.0**-8  # relative: sums of other orders in fp32, and a rounding to bf16


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, its caches, and the operands of a layer on one device."""

    rows: Ragged
    rope: RopeTable
    latents: Pages
    keys: Pages
    spec: MlaSpec
    key: IndexKeySpec
    indexer: IndexerSpec
    projected: Tensor


def make(device: torch.device, powers: bool, seed: int, spans: Sequence[tuple[int, int]] = SPANS) -> Case:
    """Fresh operands; every byte of the caches is a NaN."""
    draw, rows = generator(seed), ragged_of(spans, PAGE, ())
    blocks = int(rows.tables.max()) + 1
    size = -(-PAGE * (LATENT_BYTES + 128 + 4) // 256) * 256
    storage = torch.full((blocks, size), 0xFF, dtype=torch.uint8, device=device)
    scales = Pages(storage.view(torch.float32), None, PAGE * (LATENT_BYTES + 128) // 4, PAGE, 1, 1)
    latents = Pages(storage, None, 0, PAGE, LATENT_BYTES, 1)
    keys = Pages(storage, None, PAGE * LATENT_BYTES, PAGE, 128, 1, scales)
    mixing = IndexMixing(torch.linalg.qr(torch.randn(128, 128, generator=draw))[0].contiguous().to(device), powers)
    rope = rope_of(80, 32)
    spec = MlaSpec(
        heads=_HEADS, nope=8, rope=64, value=8, rank=512, column=4,
        norm=(torch.rand(512, generator=draw) + 0.5).to(device), norm_eps=1e-6, scale=0.05,
        absorb=pack(torch.zeros(3, 512, 8), True), output=pack(torch.zeros(3, 8, 512), True), expand=None,
    )  # fmt: skip
    norm, bias = torch.rand(128, generator=draw) + 0.5, torch.randn(128, generator=draw) * 0.2
    key = IndexKeySpec(580, norm.to(device), bias.to(device), 1e-6, mixing)
    indexer = IndexerSpec(0, 708, _INDEX_HEADS, 128, _TOPK, mixing)
    projected = torch.randn(rows.rows, 708 + _INDEX_HEADS, generator=draw).to(device)
    on = RopeTable(rope.cos.to(device), rope.sin.to(device))
    return Case(rows, on, latents, keys, spec, key, indexer, projected)


def fill(case: Case, ops: Ops, seed: int) -> None:
    """Cache every token of every sequence, as chunks before this batch would have, with these operators."""
    draw, rows = generator(seed), case.rows
    ends = [(0, int(context) + new) for context, new in zip(rows.context, _new(rows), strict=True)]
    whole = replace(ragged_of(ends, PAGE, ()), tables=rows.tables)
    drawn = torch.randn(whole.rows, case.projected.shape[1], generator=draw).to(case.projected.device)
    ops.store_latent(drawn, case.spec, whole, case.latents, case.rope)
    ops.store_index_key(drawn, case.key, whole, case.keys, case.rope)


def check_stores(ops: Ops, device: torch.device, powers: bool) -> None:
    """Records are where the reference has them, and no byte around them is written.

    Bytes of a record cannot all be equal: norms are sums in another order, so that a scale differs in its last bits and
    a number that lies between two codes takes either. Each code is therefore the reference's or the next to it, and few
    are the latter.
    """
    found, wanted = make(device, powers, 1), make(device, powers, 1)
    for case, by in ((found, ops), (wanted, reference.OPS)):
        fill(case, by, 2)
    for mine, theirs in zip(_coded(found), _coded(wanted), strict=True):
        _expect_codes(*mine, *theirs)
    mine, theirs = (_records(case)[0][:, 528:].contiguous().view(torch.bfloat16).float() for case in (found, wanted))
    hold(bool(((mine - theirs).abs() <= _TURNED * theirs.abs() + 1e-5).all()), "turned channels")
    rest = found.latents.storage.clone()
    for view in _views(rest):
        view[_places(found.rows)] = 0xFF
    hold(bool((rest == 0xFF).all()), "bytes around records")


def _places(rows: Ragged) -> tuple[Tensor, Tensor]:
    """Page and entry of every cached token."""
    ends = [int(context) + new for context, new in zip(rows.context, _new(rows), strict=True)]
    pages = [torch.from_numpy(table)[torch.arange(end) // PAGE] for table, end in zip(rows.tables, ends, strict=True)]
    return torch.cat(pages).long(), torch.cat([torch.arange(end) % PAGE for end in ends])


def _views(storage: Tensor) -> list[Tensor]:
    """Latents, codes of keys and their scales, each [blocks, PAGE, bytes]."""
    sizes = (LATENT_BYTES, 128, 4)
    parts = storage[:, : PAGE * sum(sizes)].split([PAGE * size for size in sizes], 1)
    return [part.unflatten(1, (PAGE, size)) for part, size in zip(parts, sizes, strict=True)]


def _records(case: Case) -> list[Tensor]:
    """Of every cached token, its latent's bytes, its key's codes and its key's scale."""
    return [view[_places(case.rows)] for view in _views(case.latents.storage)]


def _coded(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Codes uint8 [tokens, n] of latents and of keys, and their scales fp32 [tokens, groups]."""
    latents, keys, scales = _records(case)
    held = latents[:, 512:528].contiguous().view(torch.float32)
    return [(latents[:, :512], held), (keys, scales.contiguous().view(torch.float32))]


def _expect_codes(mine: Tensor, scale: Tensor, theirs: Tensor, expected: Tensor) -> None:
    """Scales are compared, and the numbers that codes stand for: a power of two may be the next as well."""
    close = (scale - expected).abs() <= _SCALE * expected
    hold(float(close.float().mean()) > _SAME_CODES, "scales")
    wide, other = scale.repeat_interleave(128, 1), expected.repeat_interleave(128, 1)
    value, wanted = _numbers(mine) * wide, _numbers(theirs) * other
    step = 2.0**-3 * torch.maximum(value.abs(), wanted.abs()) + 2.0**-9 * torch.maximum(wide, other)
    hold(bool(((value - wanted).abs() <= step * (1 + _SCALE)).all()), "a code is not even the next")
    share = float((mine == theirs).float().mean())
    hold(share > _SAME_CODES, f"{share:.4f} of codes are the reference's")


def _numbers(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def check_choice(ops: Ops, device: torch.device, powers: bool) -> None:
    """Each row's best keys are the reference's, of rows that see fewer than are chosen and of rows that see more."""
    case = make(device, powers, 3)
    fill(case, reference.OPS, 4)
    queries = torch.randn(case.rows.rows, _INDEX_HEADS * 128, generator=generator(5)).to(device)
    operands = (queries, case.projected, case.indexer, case.rows, case.keys, case.rope)
    found, wanted = ops.index_topk(*operands), reference.OPS.index_topk(*operands)
    expect_chosen(found, wanted, _SAME_CHOICES)


def check_mixtures(ops: Ops, device: torch.device) -> None:
    """Rows over all records of their sequence up to their own, and over chosen ones."""
    case, draw = make(device, False, 6), generator(7)
    fill(case, reference.OPS, 8)
    rows = case.rows.rows
    absorbed, turning = (torch.randn(rows, _HEADS * width, generator=draw).to(device) for width in (512, 64))
    counts = torch.from_numpy(case.rows.positions // 2 + 1).int().to(device)
    some = Selection(torch.arange(40, dtype=torch.int32, device=device).expand(rows, 40).contiguous(), counts)
    for selection in (None, some):
        operands = (absorbed, turning, case.spec, case.rows, case.latents, selection, case.rope)
        found, wanted = ops.attend_latent(*operands), reference.OPS.attend_latent(*operands)
        error = float((found - wanted).norm() / wanted.norm())
        hold(error < (_MIXED if selection is None else _MIXED / 2), f"a mixture's relative error is {error:.3g}")


def check_all(ops: Ops, device: torch.device) -> None:
    """Everything."""
    for powers in (False, True):
        check_stores(ops, device, powers)
        check_choice(ops, device, powers)
    check_mixtures(ops, device)


def _new(rows: Ragged) -> list[int]:
    return [int(end - first) for first, end in zip(rows.starts, rows.starts[1:], strict=False)]


def _stand_in() -> None:
    """Definitions in the place of the CUDA kernels."""
    from kernels.cuda import dense_decode_fp8, indexer_top_k, sparse_decode
    from kernels.cuda.engine import records
    from kernels.cuda.spans import Split
    from kernels.reference import dense_decode as dense
    from kernels.reference import indexer_top_k as best
    from kernels.reference import sparse_decode as sparse

    def decode(query: Tensor, cache: dense.PagedRecords, scale: float, *rest: Tensor) -> None:
        dense.check_operands(query, cache, rest[-2], rest[-1])
        for into, made in zip(rest[-2:], dense.dense_decode(query, cache, scale), strict=True):
            into.copy_(made)

    def named(query: Tensor, main: sparse.SparseCache, *rest: object) -> None:
        extra, sink, scale, output, lse = rest[:5]
        sparse.check_operands(query, main, extra, sink, output, lse)
        for into, made in zip((output, lse), sparse.sparse_decode(query, main, extra, sink, scale), strict=True):
            into.copy_(made)

    def chosen(given: best.MqaOperands, columns: int, _room: object, indices: Tensor) -> None:
        indices.copy_(best.indexer_top_k(given, columns, indices.shape[1]))

    dense_decode_fp8.dense_decode_fp8, sparse_decode.sparse_decode, indexer_top_k.indexer_top_k = decode, named, chosen
    indexer_top_k.workspace_of, records.multiprocessors = (lambda _device: None), (lambda _index: 132)
    sparse_decode.split_for = lambda *_shape: Split(1 << 30, 1)


if __name__ == "__main__":
    from kernels.cuda.engine import domain, latent
    from kernels.cuda.engine.ops import INVARIANT, OPS
    from kernels.cuda.spans import Split
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    _stand_in()
    domain._FUSED_TOKENS = 1 << 20
    latent.split_of = lambda *_shape: Split(1 << 30, 1)
    check_all(OPS, torch.device("cpu"))
    check_mixtures(INVARIANT, torch.device("cpu"))
    print("the operators equal the reference")
