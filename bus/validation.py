"""What subjects and headers must look like, and how subjects match: one rule for both implementations.

NATS itself lets empty tokens and wildcards in a published subject pass; here they are a caller's bug, because an id
that was not encoded (`bus.subjects.encode_id`) is the only way to get them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_HEADER_START = len("NATS/1.0\r\n") + len("\r\n")
_WHITE = (" ", "\t", "\r", "\n")
_UNFIT = re.compile(r"[ \t\r\n*>]|\.\.|^\.|\.\Z|^\Z")


@lru_cache(maxsize=8_192)  # the same subjects again and again: a look-up instead of a search
def check_publish_subject(subject: str) -> None:
    """Raises `ValueError` for an empty token, white space or a wildcard."""
    if _UNFIT.search(subject):
        raise ValueError(f"not a subject to publish on: {subject!r}")


def check_subscribe_subject(subject: str) -> None:
    """Raises `ValueError` for an empty token, white space, or a wildcard that is not a token of its own."""
    *first, last = subject.split(".")
    plain = [part for part in first if part != "*"] + ([] if last in ("*", ">") else [last])
    if not all(plain) or any(mark in part for part in plain for mark in (*_WHITE, "*", ">")):
        raise ValueError(f"not a subject to subscribe to: {subject!r}")


def subject_matches(pattern: str, subject: str) -> bool:
    """``*`` stands for one token, a last ``>`` for one or more."""
    wanted = pattern.split(".")
    found = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(found) == len(wanted) and all(a in ("*", b) for a, b in zip(wanted, found, strict=True))


def header_bytes(headers: Mapping[str, str]) -> int:
    """What the headers add to a message's size."""
    return _HEADER_START + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())


def clean_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """As they arrive: values without line breaks and outer white space. Raises `ValueError` for a bad name."""
    cleaned = {}
    for key, value in headers.items():
        _check_header_name(key)
        cleaned[key] = value.replace("\r", " ").replace("\n", " ").strip()
    return cleaned


def header_block(headers: Mapping[str, str]) -> bytes:
    """As they go over the wire. Raises `ValueError` for a bad name."""
    lines = "".join([f"{key}: {value}\r\n" for key, value in clean_headers(headers).items()])
    return f"NATS/1.0\r\n{lines}\r\n".encode()


@lru_cache(maxsize=256)  # there are few
def _check_header_name(name: str) -> None:
    if not name or any(not 33 <= ord(mark) <= 126 or mark == ":" for mark in name):
        raise ValueError(f"not a header name: {name!r}")
