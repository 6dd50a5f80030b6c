"""Sizes are read in one way everywhere, and a forgotten unit is told."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameter
from engine.sizes import GIB, MIB, bytes_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("24G", 24 * 10**9),
        ("141GiB", 141 * 2**30),
        ("24gi", 24 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        ("512kb", 512_000),
        ("7B", 7),
        ("4194304", 4 << 20),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert bytes_of(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GB", "80 GBs", "-1GB", "1e9", "80QB", "80GB GB", "nan", "80Bi"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidParameter, match="is not a size") as caught:
        bytes_of(text, "--memory")
    assert caught.value.field == "--memory" and "80GB" in caught.value.fix


def test_a_forgotten_unit_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(InvalidParameter) as caught:
        bytes_of("80", "--memory", least=MIB)
    assert str(caught.value) == "--memory: '80' is 80 bytes, too little (give 80GB, if gigabytes are meant)"
    for text in ("80kB", "80B"):
        with pytest.raises(InvalidParameter, match="give at least 1MiB"):
            bytes_of(text, "--memory", least=MIB)
    with pytest.raises(InvalidParameter, match="give at least 1GiB"):
        bytes_of("0.5", "--kv-gb", least=GIB, bare=GIB)


def test_a_bare_number_counts_what_its_option_is_named_after() -> None:
    assert bytes_of("8", "--kv-gb", bare=GIB) == 8 * GIB == bytes_of("8GiB", "--kv-gb", bare=GIB)
    assert bytes_of("0.5", "--kv-gb", bare=GIB) == GIB // 2
