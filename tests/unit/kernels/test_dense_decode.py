"""Dense decode over pages: its float64 definition, the choice of a split, and the Hopper kernel as far as CPUs go."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.cuda import dense_decode_fp8
from kernels.cuda.dense_decode import cluster_of, kernel_of
from kernels.cuda.driver import has_nvrtc
from kernels.cuda.spans import Split, fast_split, invariant_split, workspace_for
from kernels.errors import KernelError
from kernels.reference.dense_decode import PagedLatents, PagedRecords, check_operands, dense_decode
from kernels.reference.sparse_decode import RecordKind, unpack
from kernels.testing.attention import BF16, SPOILS, Tolerance, assert_finds
from kernels.testing.dense_decode import FP8, Case, assert_case, make_case, make_record_case

CPU = torch.device("cpu")
PAGES = (1, 2, 61, 64, 576)


def small(hostile: bool = False, page: int = 5) -> Case:
    return make_case((0, 7, 1, 13), 2, 3, page, CPU, seed=3, hostile=hostile)


def run_reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = dense_decode(case.query, case.cache, case.scale)
    return output.to(torch.bfloat16), lse.float()


def test_reference_is_softmax_over_the_keys_a_token_sees() -> None:
    case = small()
    found, lse = dense_decode(case.query, case.cache, case.scale)
    for sequence, length in enumerate((0, 7, 1, 13)):
        places = [divmod(key, 5) for key in range(length)]
        keys = [case.cache.pages[case.cache.tables[sequence, page], at].double() for page, at in places]
        for token in range(2):
            seen = keys[: max(length - 1 + token, 0)]
            for head in range(3):
                scores = [float(case.query[sequence, token, head].double() @ key) * case.scale for key in seen]
                if not seen:
                    assert lse[sequence, token, head] == torch.inf and not found[sequence, token, head].any()
                    continue
                total = sum(math.exp(score) for score in scores)
                assert lse[sequence, token, head].item() == pytest.approx(math.log(total))
                expected = sum(math.exp(score) / total * key[:512] for score, key in zip(scores, seen, strict=True))
                torch.testing.assert_close(found[sequence, token, head], expected)


@pytest.mark.parametrize("page", PAGES)
def test_what_lies_behind_a_sequence_is_never_read(page: int) -> None:
    assert assert_case(small(hostile=True, page=page), run_reference) < 6e-3  # it reads as NaN and as infinity


@pytest.mark.parametrize("page", PAGES)
def test_bytes_behind_a_sequence_of_records_are_never_read(page: int) -> None:
    case = make_record_case((0, 7, 1, 13), 2, 3, page, CPU, seed=4, hostile=True)
    assert assert_case(case, run_reference, FP8) < 6e-3  # they read as NaN


def test_records_are_decoded_as_the_latents_they_hold() -> None:
    case = make_record_case((130, 7), 2, 3, 61, CPU, seed=5)
    assert isinstance(case.cache, PagedRecords)
    pages = unpack(RecordKind.V32, case.cache.pages, 61).view(-1, 61, 576)
    latents = PagedLatents(pages, case.cache.tables, case.cache.lengths)  # in float64: every bit of a record's value
    output, lse = dense_decode(case.query, latents, case.scale)
    found, found_lse = dense_decode(case.query, case.cache, case.scale)
    assert torch.equal(found, output)
    assert torch.equal(found_lse, lse)


@pytest.mark.parametrize("tolerance", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_the_check_finds_what_it_is_for(spoil: str, tolerance: Tolerance) -> None:
    assert_finds(small(hostile=True), run_reference, partial(assert_case, tolerance=tolerance), spoil, empty=0)


def test_operands_no_kernel_takes_are_refused() -> None:
    case = small()
    output, lse = case.outputs()
    pages, tables = case.cache.pages, case.cache.tables
    wrong = [
        ((case.query.float(), case.cache, output, lse), "query is"),
        ((case.query, case.cache, output[..., :511], lse), "output is"),
        ((case.query, case.cache, output, lse.double()), "lse is"),
        ((case.query, replace(case.cache, tables=tables.long()), output, lse), "tables is"),
        ((case.query, replace(case.cache, lengths=case.cache.lengths[1:]), output, lse), "lengths is"),
        ((case.query, replace(case.cache, pages=pages[..., :512]), output, lse), "pages are"),
        ((case.query, replace(case.cache, pages=torch.zeros(9, 5, 577).bfloat16()[..., :576]), output, lse), "strides"),
    ]
    records = make_record_case((0, 7, 1, 13), 2, 3, 5, CPU, seed=4).cache
    assert isinstance(records, PagedRecords)
    short, odd = records.pages[:, : 5 * 656 - 1], torch.zeros(9, 5 * 656 + 8, dtype=torch.uint8)
    wrong += [
        ((case.query, replace(records, pages=records.pages.int()), output, lse), "pages are"),
        ((case.query, replace(records, pages=short), output, lse), "pages are"),
        ((case.query, replace(records, pages=odd), output, lse), "strides"),
    ]
    check_operands(case.query, case.cache, output, lse)
    check_operands(case.query, records, output, lse)
    for operands, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            check_operands(*operands)


@pytest.mark.parametrize("longest", [1, 64, 65, 4_096, 100_000])
@pytest.mark.parametrize(("batch", "rows"), [(1, 16), (1, 128), (7, 70), (128, 128), (128, 512)])
def test_a_split_holds_every_key_and_its_spans_are_whole_tiles(batch: int, rows: int, longest: int) -> None:
    for split in (fast_split(batch, rows, longest, 132), invariant_split(longest)):
        assert split.span % 64 == 0
        assert split.span * (split.most - 1) < max(longest, 1) <= split.span * split.most


def test_small_batches_are_split_and_full_ones_are_not() -> None:
    assert fast_split(1, 128, 65_536, 132).most >= 60
    assert fast_split(128, 128, 8_192, 132).most == 1
    assert workspace_for(fast_split(128, 128, 8_192, 132), 128, 128, CPU).partial.numel() == 0
    split = fast_split(2, 16, 8_192, 132)
    assert workspace_for(split, 2, 16, CPU).partial.numel() == split.most * 2 * 16 * 512


@pytest.mark.parametrize(("span", "most"), [(0, 1), (96, 1), (64, 0)])
def test_a_split_that_no_kernel_takes_is_refused(span: int, most: int) -> None:
    with pytest.raises(KernelError, match="a split into"):
        Split(span, most)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(cluster: int) -> None:
    cubin, report = kernel_of(cluster).compile()
    assert cubin
    assert report.count("0 bytes spill stores") == 2  # the kernel and `combine`
    assert "serialized" not in report  # products would wait for each other


@pytest.mark.parametrize(("columns", "cluster"), [(16, 1), (64, 1), (64, 2)])
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_over_records_compiles_ahead_for_hopper(columns: int, cluster: int) -> None:
    cubin, report = dense_decode_fp8.kernel_of(columns, cluster).compile()
    assert cubin
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(spilled) == 2  # the kernel and `combine`
    assert max(spilled) <= 128  # a few numbers of a thread, once a block
    assert "serialized" not in report  # products would wait for each other


def test_two_blocks_of_a_sequence_share_what_they_read() -> None:
    assert [cluster_of(blocks) for blocks in (1, 2, 3, 4)] == [1, 2, 1, 2]
