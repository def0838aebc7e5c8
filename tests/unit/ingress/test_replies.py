"""Errors in each API's own shape, before and inside an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.ingress.errors import (
    BadJsonError,
    BadRequestError,
    BodyTooLargeError,
    IngressError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from services.ingress.replies import REASON_HEADER, error_event, error_reply, reply_to, says_no_such_api

ERRORS: list[tuple[IngressError, int, str, str, str]] = [
    # error, status, reason, OpenAI's type, Anthropic's type
    (BadJsonError("x"), 400, "bad_json", "invalid_request_error", "invalid_request_error"),
    (BadRequestError("x", "model"), 400, "bad_request", "invalid_request_error", "invalid_request_error"),
    (UnknownModelError("gpt-9"), 404, "model_not_found", "invalid_request_error", "not_found_error"),
    (BodyTooLargeError(10), 413, "body_too_large", "invalid_request_error", "request_too_large"),
    (OverloadedError(5), 429, "too_many_requests", "rate_limit_error", "rate_limit_error"),
    (UnavailableError("x", "no_worker"), 503, "no_worker", "server_error", "overloaded_error"),
    (IngressError("x"), 500, "ingress_error", "server_error", "api_error"),
]


@pytest.mark.parametrize(("error", "status", "reason", "openai", "anthropic"), ERRORS, ids=[e[2] for e in ERRORS])
def test_each_error_in_both_shapes(error: IngressError, status: int, reason: str, openai: str, anthropic: str) -> None:
    """Status, stable reason in body and header, ``Retry-After`` where waiting helps."""
    ours = reply_to("chat_completions", error)
    body: dict[str, Any] = json.loads(ours.body)["error"]
    assert (ours.status, ours.reason, body["type"], body["code"]) == (status, reason, openai, reason)
    assert body["message"] == str(error)
    assert body["param"] == ("model" if isinstance(error, BadRequestError) else None)
    headers = dict(ours.headers)
    assert headers[REASON_HEADER] == reason.encode()
    assert headers.get(b"retry-after") == (b"1" if status in (429, 503) else None)
    theirs = json.loads(reply_to("messages", error).body)
    assert theirs == {"type": "error", "error": {"type": anthropic, "message": str(error)}}


def test_a_path_of_no_api_answers_as_openai() -> None:
    """404 for an unknown path, in OpenAI's shape."""
    assert json.loads(error_reply(None, 404, "not_found", "No such path.").body)["error"]["code"] == "not_found"


@pytest.mark.parametrize("endpoint", ["chat_completions", "completions", "responses", "messages"])
def test_an_error_inside_a_stream_is_one_whole_event(endpoint: str) -> None:
    """One event that ends with an empty line, with the error where that API's clients look for it (C2)."""
    event = error_event(endpoint, 502, "connection_lost", "The engine's answer broke off.").decode()
    assert event.endswith("\n\n")
    fields = dict(line.split(": ", 1) for line in event.strip().split("\n"))
    data = json.loads(fields["data"])
    if endpoint in ("chat_completions", "completions"):
        assert "event" not in fields
        assert (data["error"]["type"], data["error"]["code"]) == ("server_error", "connection_lost")
    elif endpoint == "responses":
        assert (fields["event"], data["type"], data["code"]) == ("error", "error", "connection_lost")
    else:
        assert (fields["event"], data["type"], data["error"]["type"]) == ("error", "error", "api_error")


MODEL_404 = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
NO_MESSAGES = (
    b'{"type":"error","error":{"type":"NotImplementedError","message":"The model does not support Messages API"}}'
)
NO_CHOICE = b'{"error":{"message":"Only \'auto\' or \'none\' tool_choice is supported in response API with Harmony"}}'


@pytest.mark.parametrize(
    ("status", "body", "missing"),
    [
        (404, b'{"detail":"Not Found"}', True),
        (404, b'{"error":{"message":"Not Found","type":"NotFoundError","code":404}}', True),
        (404, b'{"error":{"message":"File Not Found","type":"not_found_error","code":404}}', True),
        (404, b"404 page not found", True),
        (404, b"", True),
        (404, b"<html><h1>404 Not Found</h1></html>", True),
        (404, MODEL_404, False),
        (404, b'{"error":"model \'x\' not found"}', False),
        (404, b'{"error":{"message":"Response with id \'resp_1\' not found."}}', False),
        (405, b'{"detail":"Method Not Allowed"}', True),
        (501, NO_MESSAGES, True),
        (501, b"", True),
        (501, NO_CHOICE, False),
        (400, b'{"detail":"Not Found"}', False),
    ],
)
def test_an_unknown_api_is_told_from_an_unknown_thing(status: int, body: bytes, missing: bool) -> None:
    """Of engines as they answer: FastAPI's (vLLM, SGLang), llama.cpp's, Go's, a proxy's; what of the request is not
    there or cannot be done is the request's, and passes as it came."""
    assert says_no_such_api(status, body) is missing
