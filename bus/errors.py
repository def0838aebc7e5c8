"""Everything that can go wrong on the bus.

BusError
├── NotConnectedError     the server is away (nobody's fault here; retry)
├── NoRespondersError     nobody answers this question (the other service is down)
├── BusTimeoutError       no answer within the deadline
├── AnswerFailedError     the service that answers raised (its fault)
├── PayloadTooLargeError  the message is larger than the server takes (our fault; checked before publishing)
├── StreamError           JetStream, KV or object store refused
│   ├── WrongRevisionError  compare-and-set lost
│   └── KeyMissingError     no such key or object
├── ClosedError           used after close (a bug)
└── SettingsError         a setting is wrong: one sentence naming the key; the process exits with 2
"""

from __future__ import annotations

import errno


class BusError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, trace field, reply."""

    reason = "bus_error"


class NotConnectedError(BusError):
    """The server is away and this call would not wait for it."""

    reason = "bus_down"


class NoRespondersError(BusError):
    """Nobody subscribes to this question."""

    reason = "no_responders"

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody answers {subject}")
        self.subject = subject


class BusTimeoutError(BusError):
    """No answer within the deadline."""

    reason = "bus_timeout"

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class AnswerFailedError(BusError):
    """The handler on the other side raised; it said so instead of an answer."""

    reason = "answer_failed"

    def __init__(self, subject: str, problem: str) -> None:
        super().__init__(f"{subject} was answered with an error: {problem}")
        self.subject = subject
        self.problem = problem


class PayloadTooLargeError(BusError):
    """The message is larger than the server's ``max_payload``."""

    reason = "payload_too_large"

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes on {subject} exceed the bus limit of {limit_bytes} bytes")
        self.subject = subject
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class StreamError(BusError):
    """JetStream, a bucket or the object store refused."""

    reason = "stream_error"


class WrongRevisionError(StreamError):
    """Somebody else wrote this key first."""

    reason = "wrong_revision"


class KeyMissingError(StreamError):
    """No such key or object."""

    reason = "key_missing"


class ClosedError(BusError):
    """Used after `close` (a bug in the caller)."""

    reason = "closed"


class SettingsError(BusError):
    """A setting is wrong. ``key`` names it as its user wrote it."""

    reason = "bad_settings"

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


def cannot_listen(key: str, host: str, port: int, error: OSError) -> SettingsError:
    """The address that ``key`` names cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return SettingsError(key, f"{host}:{port} is taken; stop what listens there or choose another")
    return SettingsError(key, f"cannot listen on {host}:{port}: {error.strerror or error}")
