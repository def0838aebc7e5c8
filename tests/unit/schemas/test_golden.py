"""The wire format: golden bytes of every message, older and newer peers, bytes that are no message."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.admit import AdmitReply, Granted, Held, Refused
from schemas.base import BadMessageError, Message, from_json, from_msgpack, to_msgpack
from schemas.catalog import CHANNELS, decode, message_types
from schemas.kv import KvHeaders
from schemas.pool import PoolHeaders
from schemas.session import SessionKey
from schemas.trace import TraceRow
from tests.unit.schemas.samples import DIRECTORY, KV_HEADERS, MSGPACK, SAMPLES, encoded, golden_file

IDS = [type(sample).__name__ for sample in SAMPLES]


def read(payload: bytes, kind: type[Message]) -> Message:
    return from_msgpack(payload, kind) if issubclass(kind, MSGPACK) else from_json(payload, kind)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_golden_bytes(sample: Message) -> None:
    """A message is written as the golden bytes, byte for byte, and the golden bytes are read as the message."""
    golden = golden_file(sample).read_bytes()
    assert encoded(sample) == golden
    assert read(golden, type(sample)) == sample


def test_every_message_has_a_sample_and_every_file_a_message() -> None:
    """Nothing in the catalog goes untested, no golden file is left over."""
    assert {type(sample) for sample in SAMPLES} == set(message_types()) - {KvHeaders, PoolHeaders}
    assert {file.name for file in DIRECTORY.iterdir()} == {golden_file(sample).name for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_a_newer_writer_is_understood(sample: Message) -> None:
    """Unknown fields are ignored, at the top and inside."""

    def extended(value: object) -> object:
        if isinstance(value, dict):
            return {**{key: extended(item) for key, item in value.items()}, "future_field": [{"a": None}]}
        return [extended(item) for item in value] if isinstance(value, list) else value

    kind = type(sample)
    free = {"parts", "numbers", "payload"}  # open mappings, where a further key is content
    if issubclass(kind, MSGPACK):
        payload = msgspec.msgpack.encode({**msgspec.msgpack.decode(encoded(sample)), "future_field": 1})
        assert from_msgpack(payload, kind) == sample
        return
    tree = msgspec.json.decode(encoded(sample))
    holds_open_mapping = any(f'"{name}":' in encoded(sample).decode() for name in free)
    wider = {**tree, "future_field": 1} if holds_open_mapping else extended(tree)
    assert from_json(msgspec.json.encode(wider), kind) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_defaults_are_not_written_and_not_needed(sample: Message) -> None:
    """An older writer's message, without the newer optional fields, reads with their defaults."""
    kind = type(sample)
    needed = {field.name for field in msgspec.structs.fields(kind) if field.required}
    tag = msgspec.inspect.type_info(kind)
    assert isinstance(tag, msgspec.inspect.StructType)
    bare = {name: getattr(sample, name) for name in needed}
    message = kind(**bare)
    payload = encoded(message)
    tree = msgspec.msgpack.decode(payload) if issubclass(kind, MSGPACK) else msgspec.json.decode(payload)
    always = {"schema", "event_source"} if kind is TraceRow else set()
    assert set(tree) == needed | ({tag.tag_field} if tag.tag_field else set()) | always
    assert read(payload, kind) == message


NO_MESSAGES = [b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b'{"worker": 1}', b"\x81"]


def read_or_reason(payload: bytes, kind: type[Message]) -> Message | str:
    try:
        return read(payload, kind)
    except BadMessageError as error:
        return error.reason


@pytest.mark.parametrize("kind", [type(sample) for sample in SAMPLES], ids=IDS)
def test_what_is_no_message_is_the_peer_s_fault(kind: type[Message]) -> None:
    """One error with a stable reason, whatever came; a message without required fields is its defaults."""
    fields = msgspec.structs.fields(kind)
    expected: dict[bytes, Message | str] = dict.fromkeys(NO_MESSAGES, "bad_message")
    if not any(field.required for field in fields):
        expected[b"{}"] = kind()
        if all(field.name != "worker" for field in fields):
            expected[b'{"worker": 1}'] = kind()
    assert {payload: read_or_reason(payload, kind) for payload in NO_MESSAGES} == expected


def test_the_three_replies_are_told_apart() -> None:
    """`AdmitReply` is one of three, by its tag."""
    for sample in SAMPLES:
        if isinstance(sample, Held | Granted | Refused):
            assert msgspec.msgpack.decode(to_msgpack(sample), type=AdmitReply) == sample
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"type": "other"}), type=AdmitReply)


def test_decoding_by_subject() -> None:
    """The catalog knows which message a subject promises and in which encoding."""
    by_name = {channel.name: channel for channel in CHANNELS}
    for sample in SAMPLES:
        for channel in by_name.values():
            if type(sample) in channel.messages:
                subject = channel.address.replace("{", "").replace("}", "")
                assert decode(subject, encoded(sample)) == sample
    for subject in ("tg.v1.kv.w1.0", "tg.v1.nothing", "x"):
        with pytest.raises(BadMessageError):
            decode(subject, b"{}")


def test_kv_headers() -> None:
    """The names on the wire; what is constant is left out; they come back."""
    assert KV_HEADERS.to_headers() == {
        "Tg-Worker": "w1",
        "Tg-Rank": "1",
        "Tg-Incarnation": "1760000000.1",
        "Tg-Seq": "9",
        "Tg-Dialect": "vllm",
        "Tg-Part": "1",
        "Tg-Parts": "2",
        "Tg-First": "1",
    }
    assert KvHeaders.from_headers(KV_HEADERS.to_headers()) == KV_HEADERS
    plain = KvHeaders(worker="w1", rank=0, incarnation="i", seq=0, dialect="sglang")
    assert set(plain.to_headers()) == {"Tg-Worker", "Tg-Rank", "Tg-Incarnation", "Tg-Seq", "Tg-Dialect"}
    assert KvHeaders.from_headers(plain.to_headers()) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"Tg-Seq": "x"},
        {"Tg-Seq": ""},
        {"Tg-Seq": "-1"},
        {"Tg-Rank": "-1"},
        {"Tg-Rank": "0.5"},
        {"Tg-Dialect": "trt"},
        {"Tg-Part": "2"},
        {"Tg-Parts": "0"},
        {"Tg-Worker": None},
        {"Tg-Incarnation": None},
    ],
)
def test_kv_headers_that_cannot_be(change: dict[str, str | None]) -> None:
    """Missing, not a number, or numbers that contradict each other."""
    headers = {**KV_HEADERS.to_headers(), **change}
    with pytest.raises(BadMessageError):
        KvHeaders.from_headers({name: value for name, value in headers.items() if value is not None})


@pytest.mark.long
@given(st.lists(st.text(max_size=20), min_size=4, max_size=4), st.lists(st.text(max_size=20), min_size=4, max_size=4))
def test_a_session_key_s_text_is_its_own(one: list[str], other: list[str]) -> None:
    """Reversible, and equal only for equal keys, whatever the harness puts into the parts."""

    def key(parts: list[str]) -> SessionKey:
        return SessionKey(tenant=parts[0], family="body", root=parts[2], agent=parts[3])

    assert SessionKey.from_text(key(one).text()) == key(one)
    assert (key(one).text() == key(other).text()) == (key(one) == key(other))
    with pytest.raises(ValueError, match="four parts"):
        SessionKey.from_text("a/b/c")
