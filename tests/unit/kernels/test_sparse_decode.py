"""Sparse decode by index list: its float64 definition, the records it reads, and the Hopper kernel against both."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from engine.cache.records import MixedRecord
from engine.cache.records.blocks import ENTRY_FP4, WINDOW_FP8, BlockRecord
from engine.families.mla.records import latent_fp8
from engine.families.v4.records import row_fp8
from kernels.cuda.driver import has_nvrtc
from kernels.cuda.spans import Split, workspace_for
from kernels.cuda.sparse_decode import PAIRS, compile_for, padded_keys, split_for
from kernels.cuda.sparse_decode import sparse_decode as launch
from kernels.errors import KernelError
from kernels.reference.sparse_decode import RecordKind, SparseCache, check_operands, sparse_decode, unpack
from kernels.testing.attention import SPOILS, assert_finds
from kernels.testing.sparse_decode import Case, assert_case, make_case

CPU = torch.device("cpu")
RECORDS: dict[RecordKind, MixedRecord | BlockRecord] = {
    RecordKind.V4: row_fp8(512, 64),
    RecordKind.V32: latent_fp8(512, 64),
    RecordKind.V41_WINDOW: BlockRecord("window", 512, WINDOW_FP8),
    RecordKind.V41_ENTRY: BlockRecord("entry", 512, ENTRY_FP4),
}
PAGES = (1, 2, 61, 64, 576)


def small(kinds: tuple[RecordKind, RecordKind | None] = PAIRS[1], hostile: bool = False, page: int = 61) -> Case:
    return make_case(kinds, 4, 3, (9, 14), 70, page, CPU, seed=3, hostile=hostile)


def run_reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = sparse_decode(case.query, case.main, case.extra, case.sink, case.scale)
    return output.to(torch.bfloat16), lse.float()


@pytest.mark.parametrize("kind", RECORDS)
def test_records_are_those_of_the_engine(kind: RecordKind) -> None:
    record, tokens, pages = RECORDS[kind], 3, 2
    packed = record.pack(torch.randn(pages * tokens, kind.width, generator=torch.Generator().manual_seed(0)))
    assert packed.shape[1] == kind.value
    paged = packed
    if kind is RecordKind.V4:  # in a page, scales lie behind all rows
        rows = packed.view(pages, tokens, 584)
        paged = torch.cat([rows[..., :576].flatten(1), rows[..., 576:].flatten(1)], 1)
    assert torch.equal(unpack(kind, paged.reshape(pages, -1), tokens).float(), record.unpack(packed))


@pytest.mark.parametrize("kinds", PAIRS)
def test_reference_is_softmax_over_what_is_named(kinds: tuple[RecordKind, RecordKind | None]) -> None:
    case = small(kinds)
    found, lse = sparse_decode(case.query, case.main, case.extra, case.sink, case.scale)
    for query in range(4):
        keys = [unpack(cache.kind, cache.pages, cache.page_tokens)[cache.indices[query].long()]
                for cache in (case.main, case.extra) if cache]  # fmt: skip
        named = torch.cat(keys)
        for head in range(3):
            scores = [float(case.query[query, head].double() @ key) * case.scale for key in named]
            total = sum(math.exp(score) for score in scores)
            assert lse[query, head].item() == pytest.approx(math.log(total))
            total += math.exp(float(case.sink[head]))  # type: ignore[index]
            expected = sum(math.exp(score) / total * key[:512] for score, key in zip(scores, named, strict=True))
            torch.testing.assert_close(found[query, head], expected)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kinds", PAIRS)
def test_bytes_that_nobody_names_are_never_read(kinds: tuple[RecordKind, RecordKind | None], page: int) -> None:
    case = small(kinds, hostile=True, page=page)
    assert assert_case(case, run_reference) < 6e-3  # unnamed records read as NaN


def test_a_query_that_names_nothing_has_output_0_and_lse_infinity() -> None:
    case = small(hostile=True)
    output, lse = run_reference(case)
    assert not output[0].any() or int(case.extra.lengths[0]) > 0  # type: ignore[union-attr,index]
    assert not output[2].any() and bool((lse[2] == torch.inf).all())  # all of its indices are -1


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_check_finds_what_it_is_for(spoil: str) -> None:
    assert_finds(small(hostile=True), run_reference, assert_case, spoil, empty=2)


def test_operands_no_kernel_takes_are_refused() -> None:
    case = small()
    (output, lse), width = case.outputs(), case.main.pages.shape[1]
    given = {"query": case.query, "main": case.main, "extra": case.extra, "sink": case.sink, "output": output}
    wrong = [
        ({"query": case.query.float()}, "query is"),
        ({"output": output[..., :511]}, "output is"),
        ({"sink": torch.zeros(2)}, "sink is"),
        ({"main": replace(case.main, indices=case.main.indices.long())}, "main.indices is"),
        ({"main": replace(case.main, lengths=torch.zeros(3, dtype=torch.int32))}, "main.lengths is"),
        ({"extra": replace(case.main, page_tokens=10_000)}, "for 10000 records"),
        ({"main": replace(case.main, pages=torch.zeros(4, width + 8, dtype=torch.uint8))}, "bytes apart"),
        ({"extra": SparseCache(RecordKind.V32, torch.zeros(1, 656, dtype=torch.uint8), 1, case.main.indices)}, "wide"),
    ]
    check_operands(*given.values(), lse)  # type: ignore[arg-type]
    apart = torch.zeros(4, 3 * width, dtype=torch.uint8)[:, width : 2 * width]  # one layer's among those of others
    check_operands(*{**given, "main": replace(case.main, pages=apart)}.values(), lse)  # type: ignore[arg-type]
    for change, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            check_operands(*{**given, **change}.values(), lse)  # type: ignore[arg-type]


def test_only_small_batches_are_split_and_every_key_has_a_span() -> None:
    case = small()
    assert padded_keys(case.main, case.extra) == 128
    assert split_for(128, 64, 640, 132).most == 1
    split = split_for(2, 128, 2_048, 132)
    assert split.most >= 16
    assert split.span % 64 == 0
    assert split.span * (split.most - 1) < 2_048 <= split.span * split.most


def test_a_split_without_room_is_refused() -> None:
    case = small()
    operands = (case.query, case.main, case.extra, case.sink, case.scale, *case.outputs())
    few = workspace_for(Split(64, 2), 3, 3, CPU)
    for split, room in ((Split(64, 2), None), (Split(64, 2), few)):
        with pytest.raises(KernelError, match=r"room|small"):
            launch(*operands, split, room)


@pytest.mark.parametrize(("kinds", "split"), [*((kinds, 0) for kinds in PAIRS), (PAIRS[2], 1), (PAIRS[4], 1)])
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(
    kinds: tuple[RecordKind, RecordKind | None], split: int
) -> None:
    cubin, report = compile_for(*kinds, split)
    assert cubin
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(spilled) == 2  # the kernel and `combine`
    assert max(spilled) <= (16 if split and kinds == PAIRS[4] else 0)  # 16: before and behind its loops
    assert "serialized" not in report  # products would wait for each other
