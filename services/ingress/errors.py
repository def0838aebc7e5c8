"""Everything that can go wrong at the front door.

IngressError
├── RequestError             the client's fault: answered before the request is accepted, no row
│   ├── BadJsonError         the body is not a JSON object
│   ├── BadRequestError      the body lacks or misuses a member
│   ├── UnknownModelError    no worker ever served this model
│   └── BodyTooLargeError    the body is over the limit
├── UnavailableError         nobody's fault here: no worker is known yet, or the process is stopping
│   └── OverloadedError      more requests are in flight than the settings allow
├── AnswerError              the engine's fault
│   └── EventTooLargeError   one event of the stream is over the limit
├── TemplateError            the chat template refuses these messages (scoring is skipped, the request goes on)
└── MisuseError              a bug in this program: an event or a body that its caller must never hand in
"""

from __future__ import annotations


class IngressError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, trace field, the error object's ``code``.

    ``status`` is what the client sees, ``retry_after_s`` its ``Retry-After``.
    """

    reason = "ingress_error"
    status = 500
    retry_after_s: int | None = None


class RequestError(IngressError):
    """The client's request cannot be served as it is."""

    reason = "bad_request"
    status = 400


class BadJsonError(RequestError):
    """The body is not a JSON object."""

    reason = "bad_json"


class BadRequestError(RequestError):
    """A member of the body is missing, or is not what the API takes. ``param`` names it."""

    def __init__(self, message: str, param: str | None = None, reason: str = "bad_request") -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason


class UnknownModelError(RequestError):
    """No worker serves this model."""

    reason = "model_not_found"
    status = 404

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model[:200]}` does not exist.")
        self.model = model


class BodyTooLargeError(RequestError):
    """The body is over the limit."""

    reason = "body_too_large"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body exceeds the limit of {limit_bytes} bytes.")
        self.limit_bytes = limit_bytes


class UnavailableError(IngressError):
    """Not now: no worker is known yet, or this process is stopping."""

    status = 503
    retry_after_s = 1

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OverloadedError(UnavailableError):
    """More requests are in flight than the settings allow."""

    status = 429

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are in flight already.", "too_many_requests")


class AnswerError(IngressError):
    """The engine's answer cannot be used."""

    reason = "bad_answer"
    status = 502


class EventTooLargeError(AnswerError):
    """One event of a stream is over the limit."""

    reason = "event_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"An event of the answer exceeds the limit of {limit_bytes} bytes.")
        self.limit_bytes = limit_bytes


class TemplateError(IngressError):
    """The chat template refuses these messages; the engine may well answer 400 too."""

    reason = "template_error"


class MisuseError(IngressError):
    """A bug in this program."""

    reason = "misuse"
