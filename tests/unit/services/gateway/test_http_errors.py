"""HTTP errors: OpenAI's form and the right status."""

from __future__ import annotations

import json

import pytest

from fabric import errors
from services.gateway import http_errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidArgument("bad", field="top_p"), 400, "invalid_request_error"),
        (errors.Unauthenticated("who"), 401, "authentication_error"),
        (errors.NotFound("none", field="model"), 404, "invalid_request_error"),
        (http_errors.BodyTooLarge("big"), 413, "invalid_request_error"),
        (errors.Exhausted("full", retry_after_s=0.2), 429, "rate_limit_error"),
        (errors.Internal("oops"), 500, "server_error"),
        (errors.Unavailable("away"), 503, "server_error"),
        (errors.DeadlineExceeded("late"), 504, "timeout_error"),
    ],
)
def test_every_error_has_its_status_and_type(error: errors.ServiceError, status: int, kind: str) -> None:
    told = json.loads(http_errors.body_of(error))["error"]
    assert http_errors.status_of(error) == status
    assert set(told) == {"message", "type", "param", "code"}
    assert (told["type"], told["param"]) == (kind, error.field or None)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.InvalidArgument("missing", field="messages[0].role", fix="send it"),
            "messages[0].role: missing (send it)",
        ),
        (errors.InvalidArgument("top_p needs more", field="top_p"), "top_p needs more"),
        (errors.Unavailable("away"), "away"),
    ],
)
def test_a_message_alone_tells_the_field_once(error: errors.ServiceError, message: str) -> None:
    assert json.loads(http_errors.body_of(error))["error"]["message"] == message


def test_a_full_gateway_says_when_to_come_back() -> None:
    assert http_errors.headers_of(errors.Exhausted("full", retry_after_s=1.2)) == {"retry-after": "2"}
    assert http_errors.headers_of(errors.InvalidArgument("bad")) == {}


def test_an_unknown_model_has_openais_code() -> None:
    error = errors.NotFound("none", field="model", fix="see /v1/models")
    told = json.loads(http_errors.body_of(error))["error"]
    assert told["code"] == "model_not_found" and "see /v1/models" in told["message"]
