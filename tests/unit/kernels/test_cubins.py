"""Compiled CUDA kernels on disk: found again, and never where anything that decides about them has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.cuda import cubins, driver
from kernels.cuda.driver import compile_cubin, has_nvrtc


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with a header beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "beside.cuh").write_text("#define ONE 1\n", encoding="utf-8")
    path = tmp_path / "kernel.cu"
    path.write_text('#include "beside.cuh"\nextern "C" __global__ void f(int *x) { *x = ONE; }\n', encoding="utf-8")
    return path


def test_what_was_kept_is_read_again(source: Path) -> None:
    place = cubins.place_of(source, ["-DA=1"], "a compiler")
    assert cubins.read(place) is None
    cubins.write(place, b"\0code", "registers: 3")
    assert cubins.read(place) == (b"\0code", "registers: 3")


def test_options_compiler_source_and_headers_name_a_kernel(source: Path) -> None:
    places = {cubins.place_of(source, ["-DA=1"], "a compiler"), cubins.place_of(source, ["-DA=2"], "a compiler")}
    places.add(cubins.place_of(source, ["-DA=1"], "another"))
    (source.parent / "beside.cuh").write_text("#define ONE 2\n", encoding="utf-8")
    places.add(cubins.place_of(source, ["-DA=1"], "a compiler"))
    source.write_text("", encoding="utf-8")
    places.add(cubins.place_of(source, ["-DA=1"], "a compiler"))
    assert len(places) == 5


def test_a_kernel_unread_for_a_month_goes(source: Path) -> None:
    old, new = (cubins.place_of(source, [option], "a compiler") for option in ("-DA=1", "-DA=2"))
    cubins.write(old, b"old", "")
    os.utime(old, (0, 0))
    cubins.write(new, b"new", "")
    assert cubins.read(old) is None and cubins.read(new) == (b"new", "")


def test_a_folder_that_takes_nothing_is_no_error(source: Path) -> None:
    (source.parent / "cache").write_text("a file where the folder should be", encoding="utf-8")
    place = cubins.place_of(source, [], "a compiler")
    cubins.write(place, b"code", "")
    assert cubins.read(place) is None


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_a_kernel_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_cubin(source, "sm_90a", {"A": 1})
    monkeypatch.setattr(driver, "_compiled_anew", lambda *_: pytest.fail("compiled again"))
    assert compile_cubin(source, "sm_90a", {"A": 1}) == first
