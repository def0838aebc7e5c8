"""Members are put into a body without touching another byte of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.endpoints import SPLICED, Endpoint, read_request
from services.ingress.errors import MisuseError
from services.ingress.splice import members, set_all, set_member, without_members

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["a", "b", 'q"', "\\", "{", "}", ",", "ключ", ""]) | st.text(max_size=4)
bodies = st.dictionaries(names, values, max_size=5)
layouts = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: "), ("\r\n , ", " :\n")])


def written(body: Any, layout: tuple[str, str], ascii_only: bool, indent: int | None) -> bytes:
    """``body`` as some client may write it, with space around it."""
    text = json.dumps(body, separators=layout, ensure_ascii=ascii_only, indent=indent)
    return b" \n" + text.encode("utf-8", "surrogatepass") + b"\t"


@pytest.mark.long
@given(bodies, layouts, st.booleans(), st.sampled_from([None, 1]), names, values)
def test_one_member(
    body: dict[str, Any], layout: tuple[str, str], ascii_only: bool, indent: int | None, name: str, value: Any
) -> None:
    """The result decodes to the original plus the member, and every other byte is the client's, in its order."""
    raw = written(body, layout, ascii_only, indent)
    spliced = set_member(raw, (name,), json.dumps(value).encode())
    assert json.loads(spliced.decode("utf-8", "surrogatepass")) == {**body, name: value}
    untouched = [raw[one.start : one.end] for one in members(raw) if one.name != name]
    assert [spliced[one.start : one.end] for one in members(spliced) if one.name != name] == untouched
    if name not in body:
        inserted = json.dumps(name).encode() + b":" + json.dumps(value).encode() + (b"," if body else b"")
        at = raw.index(b"{") + 1
        assert spliced == raw[:at] + inserted + raw[at:]
    else:
        member = next(one for one in members(raw) if one.name == name)
        assert spliced == raw[: member.start] + json.dumps(value).encode() + raw[member.end :]


@pytest.mark.long
@given(bodies, layouts, st.one_of(st.none(), bodies, scalars))
def test_a_nested_member(body: dict[str, Any], layout: tuple[str, str], options: Any) -> None:
    """``stream_options.include_usage``: made, added to what is there, or put in place of what is no object."""
    if options is not None:
        body = {**body, "stream_options": options}
    raw = written(body, layout, True, None)
    spliced = json.loads(set_member(raw, ("stream_options", "include_usage"), b"true"))
    before = options if isinstance(options, dict) else {}
    assert spliced == {**body, "stream_options": {**before, "include_usage": True}}


paths = st.tuples(names) | st.tuples(names, names)


@pytest.mark.long
@given(bodies, layouts, st.lists(st.tuples(paths, values), max_size=4))
def test_several_members(
    body: dict[str, Any], layout: tuple[str, str], wanted: list[tuple[tuple[str, ...], Any]]
) -> None:
    """In one look what comes of one after the other, byte for byte, also where one is in another."""
    changes = [(path, json.dumps(value).encode()) for path, value in wanted]
    raw = expected = written(body, layout, True, None)
    for path, value in changes:
        expected = set_member(expected, path, value)
    assert set_all(raw, changes) == expected


def test_every_occurrence_is_replaced() -> None:
    """Parsers differ on which of two equal names counts, so no occurrence keeps the client's value (user-cases F2)."""
    body = b'{"cache_salt":"mine","x":1,"cache_salt":"also mine","c\\u0061che_salt":"escaped"}'
    spliced = set_member(body, ("cache_salt",), b'"ours"')
    assert spliced == b'{"cache_salt":"ours","x":1,"cache_salt":"ours","c\\u0061che_salt":"ours"}'


def test_names_in_values_are_not_members() -> None:
    """Only the object's own members count, not what looks like one inside a value."""
    body = b'{"a":{"priority":1},"b":"\\"priority\\":2","c":[{"priority":3}]}'
    assert set_member(body, ("priority",), b"9") == b'{"priority":9,' + body[1:]


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b'"x"', b"{", b'{"a"', b'{"a":', b'{"a":[}', b"null"])
def test_anything_but_an_object_is_a_bug(body: bytes) -> None:
    """Bodies were decoded before they are spliced; anything else is a misuse, not a wrong result."""
    with pytest.raises(MisuseError):
        set_member(body, ("a", "b"), b"1")


@pytest.mark.long
@given(bodies, layouts, st.booleans(), st.sampled_from([None, 2]), st.sets(names, max_size=3))
def test_members_are_taken_out(
    body: dict[str, Any], layout: tuple[str, str], ascii_only: bool, indent: int | None, unwanted: set[str]
) -> None:
    """What is left reads as the object without them; a body that has none of them is the same bytes."""
    raw = written(body, layout, ascii_only, indent)
    left = without_members(raw, unwanted)
    assert json.loads(left) == {name: value for name, value in body.items() if name not in unwanted}
    assert unwanted & body.keys() or left == raw


def test_only_the_members_bytes_go() -> None:
    """First, last, in the middle, twice, escaped, nested ones not; all else stays as it was written."""
    body = b'{ "nvext" : {"a":[1,{}]} , "m":1.0 ,"n\\u0076ext":2,\n"t": {"nvext":3} , "nvext":"x,}" }'
    assert without_members(body, ("nvext",)) == b'{ "m":1.0 ,\n"t": {"nvext":3} }'
    assert without_members(b'{"nvext":1}', ("nvext",)) == b"{}"
    assert without_members(b'{"a":1,"b":2}', ("a", "b")) == b"{}"
    assert without_members(b" { } ", ("a",)) == b" { } "


@pytest.mark.long
def test_nesting_deeper_than_the_stack_is_spliced() -> None:
    """The scanner has no stack: a body that was read once can always be spliced."""
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"priority":1}'
    assert set_member(body, ("priority",), b"9") == body.replace(b'"priority":1', b'"priority":9')
    assert set_member(body, ("n",), b"9") == b'{"n":9,' + body[1:]


@pytest.mark.parametrize("endpoint", ["chat_completions", "completions", "responses", "messages"])
@pytest.mark.parametrize(
    "more",
    [
        b"",
        b',"priority":null',
        b',"prior\\u0069ty":3',
        b',"session_id":[[1]],"session_id":2',
        b',"cache_salt":7,"stream_options":{"include_usage":false}',
        b',"x":{"kv_hints":1},"kv_hints":null,"nvext":{}',
    ],
)
def test_what_a_body_lacks_is_known_when_it_is_read(endpoint: Endpoint, more: bytes) -> None:
    """Members that are not there are put in without another look, and the same body comes of it."""
    body = b'{"model":"m","messages":[],"input":"a","prompt":"\\"nvext\\":1"%b}' % more
    request = read_request(endpoint, body)
    assert request.absent == set(SPLICED) - json.loads(body).keys()
    for names in (SPLICED, ("priority",), ("priority", "kv_hints")):
        changes = [((name,), b"1") for name in names]
        assert set_all(body, changes, request.absent) == set_all(body, changes)
    nested = [(("stream_options", "include_usage"), b"true"), (("nvext", "cache_salt"), b'"s"')]
    assert set_all(body, nested, request.absent) == set_all(body, nested)
