"""Everything that can go wrong at the front door.

IngressError
├── RequestError             the client's fault: answered before the request is accepted, no row
│   ├── BadJsonError         the body is not a JSON object
│   ├── BadRequestError      the body lacks or misuses a member
│   ├── UnknownModelError    no worker ever served this model
│   ├── BodyTooLargeError    the body is over the limit
│   ├── BadEncodingError     the body is not what its content-encoding says
│   ├── UnsupportedEncodingError
│   ├── BusyError            no room for its body, once unpacked
│   ├── InvalidKeyError      no API key, or one that is unknown or over
│   ├── ModelNotAllowedError the key may not use this model
│   ├── RateLimitedError     the key has used up what it may ask for
│   └── ApiNotIsolatedError  the engine's API takes no cache salt, and the settings want one
├── UnavailableError         nobody's fault here: no worker is known yet, or the process is stopping
│   └── OverloadedError      more requests are in flight than the settings allow
├── AnswerError              the engine's fault
│   └── EventTooLargeError   one event of the stream is over the limit
├── KeysFileError            the operator's fault: the keys file cannot be read, or a line of it is wrong
├── WriterLostError          the process that writes captured requests is gone or stuck: it is started anew
├── TemplateError            the chat template refuses these messages (scoring is skipped, the request goes on)
└── MisuseError              a bug in this program: an event or a body that its caller must never hand in
    └── BadFrameError        what one process of ours told another cannot be read
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


class BadEncodingError(RequestError):
    """The body says that it is gzip and cannot be unpacked."""

    reason = "bad_encoding"

    def __init__(self, problem: str) -> None:
        super().__init__(f"The request body cannot be unpacked: {problem}.")


class UnsupportedEncodingError(RequestError):
    """The body is compressed in another way than by gzip."""

    reason = "content_encoding"
    status = 415

    def __init__(self, codings: str) -> None:
        super().__init__(f"Request bodies may be plain or gzip, not {codings[:100]}.")


class BusyError(RequestError):
    """As many bytes of requests are held as may be."""

    reason = "busy"
    status = 503
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__("Too many bytes of requests are held already.")


class InvalidKeyError(RequestError):
    """No API key, or one that is unknown, expired, or not the only one. Its text never holds the key."""

    reason = "invalid_api_key"
    status = 401


class ModelNotAllowedError(RequestError):
    """The key may not use this model."""

    reason = "model_not_allowed"
    status = 403

    def __init__(self, model: str) -> None:
        super().__init__(f"This API key may not use the model `{model[:200]}`.")


class RateLimitedError(RequestError):
    """The key has used up what it may ask for; there is room again in ``retry_after_s``."""

    reason = "rate_limited"
    status = 429

    def __init__(self, what: str, retry_after_s: int) -> None:
        super().__init__(f"The limit of {what} of this API key is reached. Ask again in {retry_after_s} s.")
        self.what = what
        self.retry_after_s = retry_after_s


class ApiNotIsolatedError(RequestError):
    """Engines read no ``cache_salt`` in this API, and ``require_cache_salt`` is on."""

    reason = "api_not_isolated"
    status = 501

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"Engines cannot keep the caches of tenants apart in this API ({endpoint}): it is switched off."
        )


class KeysFileError(IngressError):
    """The keys file as a whole, or its ``line`` (from 1; 0: the file)."""

    reason = "keys_unreadable"

    def __init__(self, line: int, rule: str) -> None:
        super().__init__(f"line {line}: {rule}" if line else rule)
        self.line = line
        self.rule = rule


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


class WriterLostError(IngressError):
    """The process that writes captured requests is gone, or stuck (its own fault, or a pattern's)."""

    reason = "writer_lost"


class TemplateError(IngressError):
    """The chat template refuses these messages; the engine may well answer 400 too."""

    reason = "template_error"


class MisuseError(IngressError):
    """A bug in this program."""

    reason = "misuse"


class BadFrameError(MisuseError):
    """A captured request did not reach its writing process in one piece."""

    reason = "bad_frame"
