"""Which headers pass the front door, in each direction.

To the engine only what is on the list goes (spec: user-cases C8); internal names never do, in no spelling (F1): a
client cannot name a worker, a tenant or a priority. Back to the client everything goes but what belongs to
one hop.
"""

from __future__ import annotations

from collections.abc import Iterable

from web.headers import Headers

FORWARDED = (
    "accept",
    "accept-language",
    "anthropic-*",
    "api-key",
    "authorization",
    "b3",
    "baggage",
    "content-type",
    "openai-*",
    "originator",
    "session-id",
    "session_id",
    "thread-id",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-api-key",
    "x-app",
    "x-b3-*",
    "x-claude-code-*",
    "x-codex-*",
    "x-deepseek-harness-*",
    "x-parent-session-id",
    "x-session-affinity",
    "x-session-id",
    "x-stainless-*",
)
"""Names, or beginnings of names. ``accept-encoding`` is not among them: we read what the engine answers."""

INTERNAL = ("x-tidegate-", "x-dynamo-", "x-data-parallel-rank", "x-dp-rank")
"""Beginnings of names that only we may write."""

CREDENTIALS = frozenset({"api-key", "authorization", "x-api-key"})
STEERING = ("x-override-", "x-smg-", "x-tenant-id", "x-vllm-priority")
"""Beginnings of names by which engines and their routers take a priority, a worker or a tenant. They, and credentials
where we ask for keys ourselves, pass only where the settings name them in full: no ``*`` stands for them."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def is_internal(name: bytes) -> bool:
    """Whether ``name`` is one of ours or the peer's internal ones, whatever its case, with ``_`` or ``-``."""
    return name.decode("latin-1").strip().lower().replace("_", "-").startswith(INTERNAL)


class ForwardList:
    """The forward list, with names that the settings add. ``keep_credentials``: clients' are for us alone;
    ``engine_api_key`` goes to engines in their place."""

    def __init__(self, extra: Iterable[str] = (), *, keep_credentials: bool = False, engine_api_key: str = "") -> None:
        added = [name.strip().lower() for name in extra]
        names = [*FORWARDED, *added]
        self._in_full = frozenset(name.encode("latin-1") for name in added if not name.endswith("*"))
        self._own: Headers = [(b"authorization", f"Bearer {engine_api_key}".encode())] if engine_api_key else []
        if self._own:
            self._in_full -= {name.encode() for name in CREDENTIALS}
        self._keep_credentials = keep_credentials or bool(engine_api_key)
        self._names = {name.encode("latin-1") for name in names if not name.endswith("*")}
        self._beginnings = tuple(name[:-1].encode("latin-1") for name in names if name.endswith("*"))

    def upstream(self, headers: Headers, request_id: str) -> Headers:
        """What the engine gets of a client's headers, and our request id."""
        named = _named_by_connection(headers)
        kept: Headers = [(b"x-request-id", request_id.encode("ascii")), *self._own]
        for name, value in headers:
            lower = name.lower()
            if not (lower in self._names or lower.startswith(self._beginnings)):
                continue
            if lower in HOP_BY_HOP or lower in named or lower == b"x-request-id" or is_internal(name):
                continue
            if lower not in self._in_full and self._is_reserved(lower):
                continue
            kept.append((name, value))
        return kept

    def _is_reserved(self, lower: bytes) -> bool:
        spelled = lower.decode("latin-1").replace("_", "-")
        if spelled == "x-request-id":
            return True
        return spelled.startswith(STEERING) or (self._keep_credentials and spelled in CREDENTIALS)


def downstream(headers: Headers, request_id: str, *, keep_length: bool) -> Headers:
    """What the client gets of an engine's headers, and our request id; the length only of a body that is unchanged."""
    named = _named_by_connection(headers)
    kept: Headers = []
    for name, value in headers:
        lower = name.lower()
        if lower in HOP_BY_HOP or lower in named or lower == b"x-request-id" or is_internal(name):
            continue
        if lower == b"content-length" and not keep_length:
            continue
        kept.append((name, value))
    kept.append((b"x-request-id", request_id.encode("ascii")))
    return kept


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Names that the Connection header makes hop-by-hop."""
    named: set[bytes] = set()
    for name, value in headers:
        if name.lower() == b"connection":
            named.update(item.strip().lower() for item in value.split(b","))
    return frozenset(named)
