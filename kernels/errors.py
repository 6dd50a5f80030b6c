"""Errors of the kernels. Knows what a person can do about each."""


class KernelError(Exception):
    """A kernel choice that cannot be met on this machine, or operands no kernel accepts. `fix` says what to change."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(f"{message}; {fix}")
        self.fix = fix


class DeviceError(KernelError):
    """A device that is not there."""
