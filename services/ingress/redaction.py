"""Secrets in what is captured, by what they look like: found in every text of a body, and hidden.

Patterns see texts as their reader does (escapes of JSON resolved). Of a stream they see each text whole, whatever
pieces it came in: the deltas of one answer, of one tool call's arguments, are put together first. This is a net with
holes: what looks like nothing known, or is written as token ids, passes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import msgspec

from schemas.base import UNDECODABLE

HIDDEN = "[redacted]"

_SHORT_KEY = 16
"""Names of members that are shorter are not looked at."""
_OTHER_SPELLINGS = frozenset(
    {"logprobs", "prompt_logprobs", "top_logprobs", "token_ids", "prompt_token_ids", "token_logprobs", "tokens"}
)
"""Members that spell a text a second time, token by token: none of them stays beside a text with something hidden."""

_NONE = frozenset[str]()
_HOLD_TEXTS = frozenset({str, dict, list})
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")
_DONE = b"[DONE]"
_ENGINES_OWN = frozenset({"event_id", "id", "item_id", "model", "object", "system_fingerprint", "type"})
"""Texts of an event itself that no user and no model wrote."""
_TOP = ("type", "output_index", "content_index", "summary_index", "item_id", "index")
"""Members of an event that say which text it goes on with."""

Span = tuple[int, int]
Path = tuple[object, ...]


class BadPatternError(ValueError):
    """A pattern of the settings that cannot work (our user's mistake)."""

    reason = "bad_pattern"


@dataclass(frozen=True, slots=True)
class _Secret:
    """``pattern`` is tried only where a text has one of ``beginnings``: looking for those costs next to nothing. Its
    group, where it has one, is what is hidden."""

    beginnings: tuple[str, ...]
    pattern: re.Pattern[str]

    def spans(self, text: str) -> Iterator[Span]:
        for beginning in self.beginnings:
            at = text.find(beginning)
            while at >= 0:
                found = self.pattern.match(text, at)
                if found is not None:
                    yield found.span(found.re.groups)
                at = text.find(beginning, found.end() if found is not None else at + 1)


def _secret(pattern: str, *beginnings: str) -> _Secret:
    return _Secret(beginnings, re.compile(pattern))


_ALONE = r"(?<![A-Za-z0-9])"
SECRETS = (
    _secret(r"(?i:bearer)[ +]+([A-Za-z0-9._~+/=-]{16,})", "Bearer", "bearer", "BEARER"),
    _secret(
        r"(?i:uthorization)\\*[\"']?\s*[:=]\s*\\*[\"']?(?:[A-Za-z]+\s+)?([A-Za-z0-9._~+/=:-]{8,})",
        "uthorization",
        "UTHORIZATION",
    ),
    _secret(_ALONE + r"sk-(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{16,}", "sk-"),
    _secret(_ALONE + r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,}", "sk_live_", "rk_live_", "sk_test_", "rk_test_"),
    _secret(_ALONE + r"A[KS]IA[A-Z0-9]{16}(?![A-Za-z0-9])", "AKIA", "ASIA"),
    _secret(
        r"(?i:secret_?access_?key|session_?token)\\*[\"']?\s*[:=]\s*\\*[\"']?([A-Za-z0-9/+=]{40,})",
        "secret_access_key",
        "SECRET_ACCESS_KEY",
        "SecretAccessKey",
        "secretAccessKey",
        "session_token",
        "SESSION_TOKEN",
        "SessionToken",
        "sessionToken",
    ),
    _secret(_ALONE + r"gh[oprsu]_[A-Za-z0-9]{30,}", "gho_", "ghp_", "ghr_", "ghs_", "ghu_"),
    _secret(r"github_pat_[A-Za-z0-9_]{22,}", "github_pat_"),
    _secret(r"glpat-[A-Za-z0-9_-]{20,}", "glpat-"),
    _secret(r"x(?:ox[abeoprs]|app)-[A-Za-z0-9-]{10,}", "xox", "xapp-"),
    _secret(_ALONE + r"AIza[A-Za-z0-9_-]{35}", "AIza"),
    _secret(_ALONE + r"hf_[A-Za-z0-9]{30,}", "hf_"),
    _secret(_ALONE + r"tg_[a-z0-9]{4,32}_[A-Za-z0-9_-]{16,}", "tg_"),
    _secret(_ALONE + r"npm_[A-Za-z0-9]{36}", "npm_"),
    _secret(r"pypi-[A-Za-z0-9_-]{40,}", "pypi-"),
    _secret(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?", "eyJ"),
    _secret(r"://[^\s/:@\"'\\]{0,64}:([^\s/@\"'\\]{3,256})@", "://"),
    _secret(
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"
        r"(?:(?:[^-]|-(?!----)){0,8192}-----END (?:[A-Z0-9]+ )*PRIVATE KEY-----"
        r"|(?:\s|\\+[nrt]|[A-Za-z0-9+/=]{8,}|[A-Za-z0-9+/=]+\Z)*)",
        "-----BEGIN ",
    ),
)
"""Bearer tokens and other credentials of HTTP, keys of OpenAI and Anthropic and those who took over their form, Stripe,
AWS, GitHub, GitLab, Slack, Google, Hugging Face, npm and PyPI, JSON web tokens, passwords in URLs, private keys."""


class Redaction:
    """``secrets``: hide `SECRETS`; ``patterns``: regular expressions of the operator's own, each of which hides what it
    finds, or its first group where it has one. Raises `BadPatternError`."""

    def __init__(self, *, secrets: bool = True, patterns: Iterable[str] = ()) -> None:
        self._secrets = SECRETS if secrets else ()
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def text(self, text: str) -> str:
        """``text`` with what must not be written hidden; the same object where there is nothing to hide."""
        spans = self.spans(text)
        return _without(text, spans) if spans else text

    def spans(self, text: str) -> list[Span]:
        """What is to be hidden, in order, not overlapping."""
        found: list[Span] = []
        for secret in self._secrets:
            found += secret.spans(text)
        for pattern in self._patterns:
            found += [match.span(1 if match.lastindex else 0) for match in pattern.finditer(text)]
        return _merged(found)

    def document(self, body: bytes) -> bytes:
        """A JSON document; ``body`` itself where there is nothing to hide. Raises what `UNDECODABLE` names."""
        document = msgspec.json.decode(body)
        hidden = 0

        def visit(text: str) -> str:
            nonlocal hidden
            kept = self.text(text)
            hidden += kept is not text
            return kept

        changed = _map_texts(document, visit)
        return msgspec.json.encode(_without_spellings(changed)) if hidden else body

    def stream(self, data: bytes) -> bytes:
        """A stream of events; ``data`` itself where there is nothing to hide."""
        return _Stream(data, self).redacted()


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadPatternError(f"{pattern!r} is not a regular expression: {error}") from error
    if compiled.match(""):
        raise BadPatternError(f"{pattern!r} matches the empty text")
    return compiled


class _Stream:
    """Lines of a stream; ``documents``: what the data lines hold (a `str` where that is no JSON), by their place."""

    def __init__(self, data: bytes, redaction: Redaction) -> None:
        self._data = data
        self._redaction = redaction
        self._lines = _LINE.findall(data)
        self._documents = {
            place: _document_of(data)
            for place, line in enumerate(self._lines)
            if line.startswith(b"data:") and (data := line[5:].strip()) and data != _DONE
        }

    def redacted(self) -> bytes:
        texts: dict[Path, list[str]] = {}
        for place, document in self._documents.items():
            _collect(document, _beginning(document, place), texts, _ENGINES_OWN)
        kept = {path: self._kept(pieces) for path, pieces in texts.items()}
        if all(pieces is None for pieces in kept.values()):
            return self._data
        rest = {path: iter(pieces) for path, pieces in kept.items() if pieces is not None}

        def put(path: Path, text: str) -> str:
            return next(rest[path]) if path in rest else text

        lines = list(self._lines)
        for place, document in self._documents.items():
            changed = _without_spellings(_put(document, _beginning(document, place), put, _ENGINES_OWN))
            if changed is not document:
                lines[place] = _line_of(changed, lines[place])
        return b"".join(lines)

    def _kept(self, pieces: list[str]) -> list[str] | None:
        """One text's pieces with what must not be written hidden; ``None``: nothing is. Each piece is looked at by
        itself too: it may be a member that just changes. What never changes is no text that goes on."""
        spans = self._redaction.spans
        if len(set(pieces)) == 1:
            found = spans(pieces[0])
            return [_without(pieces[0], found)] * len(pieces) if found else None
        between = [end + number for number, end in enumerate(accumulate(map(len, pieces[:-1])))]
        together = spans("".join(pieces))
        apart = [_shifted(span, between) for span in spans("\0".join(pieces))]
        found = _merged([*together, *apart])
        return _cut(pieces, found) if found else None


def _document_of(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except UNDECODABLE:
        return data.decode("utf-8", "replace")


def _line_of(document: Any, was: bytes) -> bytes:
    end = was[len(was.rstrip(b"\r\n")) :]
    return b"data: " + (document.encode() if isinstance(document, str) else msgspec.json.encode(document)) + end


def _beginning(document: Any, place: int) -> Path:
    """Which text an event goes on with; what is no event of an API goes on with none."""
    return tuple(document.get(name) for name in _TOP) if isinstance(document, dict) else (place,)


def _map_texts(value: Any, kept: Callable[[str], str]) -> Any:
    """``value`` with each of its texts, and long names of members, as ``kept`` returns it; the same object where none
    is another. Raises `RecursionError`."""
    if isinstance(value, str):
        return kept(value)
    if isinstance(value, list):
        items = [_map_texts(item, kept) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        members = [
            (
                kept(name) if len(name) >= _SHORT_KEY else name,
                member if name in _OTHER_SPELLINGS else _map_texts(member, kept),
            )
            for name, member in value.items()
        ]
        same = all(new[1] is old[1] and new[0] is old[0] for new, old in zip(members, value.items(), strict=True))
        return value if same else dict(members)
    return value


def _collect(value: Any, path: Path, texts: dict[Path, list[str]], left_out: frozenset[str] = _NONE) -> None:
    """The texts of an event, each to the others of its path. Items of lists go by their ``index``, where they have one;
    members in ``left_out`` are not looked at. Raises `RecursionError`."""
    kind = type(value)
    if kind is str:
        texts.setdefault(path, []).append(value)
    elif kind is dict:
        for name, member in value.items():
            if type(member) in _HOLD_TEXTS and name not in left_out and name not in _OTHER_SPELLINGS:
                _collect(member, (*path, name), texts)
    elif kind is list:
        for place, item in enumerate(value):
            _collect(item, (*path, _number_of(item, place)), texts)


def _put(value: Any, path: Path, put: Callable[[Path, str], str], left_out: frozenset[str] = _NONE) -> Any:
    """``value`` with each text that `_collect` finds as ``put`` returns it, in the same order; the same object where
    none is another."""
    if isinstance(value, str):
        return put(path, value)
    if isinstance(value, list):
        items = [_put(item, (*path, _number_of(item, place)), put) for place, item in enumerate(value)]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        members = {
            name: member if name in left_out or name in _OTHER_SPELLINGS else _put(member, (*path, name), put)
            for name, member in value.items()
        }
        return members if any(members[name] is not value[name] for name in value) else value
    return value


def _number_of(item: Any, place: int) -> object:
    number = item.get("index") if isinstance(item, dict) else None
    return number if isinstance(number, int) else place


def _without_spellings(value: Any) -> Any:
    """Without what spells its texts a second time; the same object where nothing does."""
    if isinstance(value, list):
        items = [_without_spellings(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        members = {
            name: None if name in _OTHER_SPELLINGS and isinstance(member, list | dict) else _without_spellings(member)
            for name, member in value.items()
        }
        return members if any(members[name] is not value[name] for name in value) else value
    return value


def _merged(spans: list[Span]) -> list[Span]:
    """In order, those that overlap as one, none empty."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _without(text: str, spans: Sequence[Span]) -> str:
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    kept = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return HIDDEN.join(kept)


def _shifted(span: Span, between: list[int]) -> Span:
    """A span of the pieces with one character between each two, at ``between``, as one of the pieces without."""
    start, end = span
    return start - bisect_left(between, start), end - bisect_left(between, end)


def _cut(pieces: list[str], spans: list[Span]) -> list[str]:
    """The pieces without the spans of their whole; each is marked in the piece in which it begins."""
    kept: list[str] = []
    start = first = 0
    for piece in pieces:
        end = start + len(piece)
        while first < len(spans) and spans[first][1] <= start:
            first += 1
        at = start
        parts: list[str] = []
        for hidden_start, hidden_end in islice(spans, first, None):
            if hidden_start >= end:
                break
            if hidden_start >= start:
                parts += (piece[at - start : hidden_start - start], HIDDEN)
            at = min(hidden_end, end)
        kept.append("".join((*parts, piece[at - start :])))
        start = end
    return kept
