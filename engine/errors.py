"""Engine errors: what went wrong, which field, and what to do about it. Knows no transport and no status codes."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every engine error. `field` names the offending input (empty if none), `fix` says how to go on."""

    retryable = False

    def __init__(self, message: str, *, field: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message, self.field, self.fix = message, field, fix

    def __str__(self) -> str:
        named = f"{self.field}: {self.message}" if self.field else self.message
        return f"{named} ({self.fix})" if self.fix else named


class InvalidParameter(EngineError):
    """A request or a configuration carries a value that can never work; nothing was done."""

    def __init__(self, field: str, message: str, fix: str) -> None:
        super().__init__(message, field=field, fix=fix)


class Exhausted(EngineError):
    """A bounded resource has no room now; the same request may work later."""

    retryable = True

    def __init__(self, resource: str, *, needed: int, free: int) -> None:
        super().__init__(
            f"{needed} {resource} needed, {free} free", field=resource, fix="retry later or on another worker"
        )
        self.resource, self.needed, self.free = resource, needed, free


class DuplicateRequest(EngineError):
    """A request with this id is still alive."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} is already running", field="request_id", fix="use a new request id")


class UnknownRequest(EngineError):
    """No request with this id holds anything here."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id!r} holds nothing here", field="request_id", fix="submit or reserve it first"
        )


class NotReserved(EngineError):
    """Decoding was asked for without a matching reservation."""

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(
            f"request {request_id!r}: {message}", field="request_id", fix="reserve, import the KV, then start"
        )


class BadLogits(EngineError):
    """The model produced no usable distribution for this request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request {request_id!r}: the model's logits are not finite", fix="check the checkpoint and the KV"
        )


class ForwardFailed(EngineError):
    """The model's forward pass raised for this request even when it ran alone."""


class CallTimeout(EngineError):
    """The engine thread did not answer a call within its deadline."""

    retryable = True


class EngineStopped(EngineError):
    """The engine thread has ended; every request it had is lost."""


class IntegrityBroken(Exception):
    """The engine's own accounts contradict each other: a defect, never a request's fault. The engine must stop."""
