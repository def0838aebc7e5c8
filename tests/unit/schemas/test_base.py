"""Reading what strangers send on the bus: every way of being wrong is `BadMessageError`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas.base import BadMessageError, Message, from_json, from_msgpack
from schemas.kv import MAX_RANKS
from schemas.worker import WorkerState

STATE = (
    b'{"source":"s","epoch":1,"seq":0,"at_ms":1,"worker":"w","incarnation":"","health":"ready",'
    b'"profile":{"url":"http://x","model":"m"%b}%b}'
)


@pytest.mark.parametrize(
    ("read", "payload"),
    [
        (from_json, b'{"unknown":' + b"[" * 100_000),
        (from_msgpack, b"\x81\xa1u" + b"\x91" * 100_000),
        (from_json, b"\xff"),
        (from_msgpack, b"\xdd\xff\xff\xff\xff"),
        (from_msgpack, b"\x81\xa1\xff\xc0"),
        (from_json, b""),
        (from_msgpack, b""),
    ],
)
def test_what_cannot_be_read_is_a_bad_message(read: Callable[[bytes, type[Message]], Message], payload: bytes) -> None:
    """Nesting deeper than the stack, also in a field that is ignored, headers of gigantic arrays, wrong UTF-8."""
    with pytest.raises(BadMessageError):
        read(payload, WorkerState)


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        (b',"ranks":%d' % (MAX_RANKS + 1), b""),
        (b',"ranks":0', b""),
        (b',"ranks":-1', b""),
        (b',"block_size":0', b""),
        (b',"kv_tokens":-1', b""),
        (b"", b',"loads":[{"rank":-1}]'),
        (b"", b',"loads":[{"rank":0,"running":-1}]'),
        (b"", b',"loads":[{"rank":0,"kv_usage":NaN}]'),
        (b"", b',"loads":[{"rank":0,"kv_usage":1e300}]'),
        (b"", b',"streams":[{"rank":%d,"incarnation":"1"}]' % MAX_RANKS),
    ],
)
def test_a_worker_with_impossible_numbers_is_a_bad_message(profile: bytes, more: bytes) -> None:
    """Everybody loops over a worker's ranks and divides by its block size: the numbers are checked where they enter."""
    assert from_json(STATE % (b"", b""), WorkerState).profile.ranks == 1
    with pytest.raises(BadMessageError):
        from_json(STATE % (profile, more), WorkerState)


@pytest.mark.parametrize(
    "number", [b"1%b" % (b"0" * 400), b"9007199254740993", b"-1", b"1.5", b'"1"', b"true", b"null"]
)
@pytest.mark.parametrize("field", [b"seq", b"at_ms"])
def test_numbers_that_cannot_be_said_again_are_bad_messages(number: bytes, field: bytes) -> None:
    """What is read is added up and said again: JSON's readers hold 53 bits, and MessagePack 64."""
    payload = (STATE % (b"", b"")).replace(b'"%b":' % field, b'"%b":%b,"x":' % (field, number))
    with pytest.raises(BadMessageError):
        from_json(payload, WorkerState)
