"""Errors of the kernels. Knows what a person can do about each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class KernelError(Exception):
    """A kernel choice that cannot be met on this machine, or operands no kernel accepts. `fix` says what to change."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(f"{message}; {fix}")
        self.message, self.fix = message, fix

    def __reduce__(self) -> tuple[Callable[[], KernelError], tuple[()]]:
        """Made anew from both parts: processes that compile side by side hand it to the one that waits for them."""
        return partial(type(self), self.message, fix=self.fix), ()


class DeviceError(KernelError):
    """A device that is not there."""
