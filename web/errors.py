"""Everything that can go wrong between two HTTP peers.

WebError
├── BadUrlError            the address is not one we speak to (the caller's fault)
├── BadHeaderError         a header that would break the message (the caller's fault)
├── ConnectError           nobody listens there, or the network refused
│   └── ConnectTimeoutError
├── FirstByteTimeoutError  connected and asked, no byte of the answer's body in time
├── IdleTimeoutError       the answer stopped in the middle
├── TotalTimeoutError      the answer did not end in time
├── ConnectionLostError    the peer went away; ``bytes_received`` of the answer had come
├── BadAnswerError         the peer's bytes are not HTTP
├── AnswerTooLargeError    the answer is larger than the caller takes
├── BadTlsFileError        a certificate or key cannot be used (whoever wrote the file)
└── ClientClosedError      used after close (a bug)
"""

from __future__ import annotations


class WebError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, trace field, reply."""

    reason = "web_error"


class BadUrlError(WebError):
    """Not an ``http://host:port/path`` or ``https://`` address."""

    reason = "bad_url"


class BadHeaderError(WebError):
    """A header name or value holds a line break; sending it would forge other headers."""

    reason = "bad_header"


class ConnectError(WebError):
    """No connection could be made."""

    reason = "connect_error"


class ConnectTimeoutError(ConnectError):
    """No connection within ``connect_s``."""

    reason = "connect_timeout"


class FirstByteTimeoutError(WebError):
    """The request was sent; no byte of the answer's body came within ``first_byte_s``."""

    reason = "first_byte_timeout"


class IdleTimeoutError(WebError):
    """The answer had begun; then nothing came for ``idle_s``."""

    reason = "idle_timeout"


class TotalTimeoutError(WebError):
    """The answer did not end within ``total_s``."""

    reason = "total_timeout"


class ConnectionLostError(WebError):
    """The peer closed the connection before its answer was complete."""

    reason = "connection_lost"

    def __init__(self, bytes_received: int) -> None:
        super().__init__(f"the connection was lost after {bytes_received} bytes of the answer")
        self.bytes_received = bytes_received


class BadAnswerError(WebError):
    """What came back is not HTTP/1.x."""

    reason = "bad_answer"


class AnswerTooLargeError(WebError):
    """`HttpClient.fetch` takes no more than its limit."""

    reason = "answer_too_large"


class BadTlsFileError(WebError):
    """A file of `web.tls.TlsFiles` cannot be used. ``what``: the name of the field."""

    reason = "bad_tls_file"

    def __init__(self, what: str, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.what = what


class ClientClosedError(WebError):
    """Used after `HttpClient.close` (a bug in the caller)."""

    reason = "client_closed"
