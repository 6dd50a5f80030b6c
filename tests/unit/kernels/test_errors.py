"""Errors of the kernels on their way out of another process."""

from __future__ import annotations

import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from kernels.errors import DeviceError, KernelError


def fail(kind: type[KernelError]) -> None:
    raise kind("nothing compiles", fix="install a compiler")


@pytest.mark.parametrize("kind", [KernelError, DeviceError])
def test_an_error_is_the_same_behind_a_pickle(kind: type[KernelError]) -> None:
    found = pickle.loads(pickle.dumps(kind("no such device", fix="choose another")))  # noqa: S301
    assert type(found) is kind
    assert (str(found), found.message, found.fix) == (
        "no such device; choose another",
        "no such device",
        "choose another",
    )


def test_what_failed_in_a_process_pool_is_told_by_its_error() -> None:
    with ProcessPoolExecutor(1) as pool, pytest.raises(DeviceError, match="nothing compiles; install a compiler"):
        pool.submit(fail, DeviceError).result(timeout=60)
