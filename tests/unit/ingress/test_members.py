"""Members from their bytes: they say what decoding would, and of a large body nothing is built."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from services.ingress import members
from services.ingress.bodies import ChatBody, CompletionsBody, MessagesBody, ResponsesBody, decoders_of
from services.ingress.endpoints import Endpoint, LargePrompt, read_request
from services.ingress.errors import BadRequestError
from services.ingress.members import MOST_BRACES, MOST_ITEMS, USUAL_BYTES, Decoders, is_few, read_list
from tests.unit.ingress.test_completions_prompt import Forbidden, many

PAD = " " * USUAL_BYTES
"""Makes a body large."""


@pytest.mark.parametrize("kind", [ChatBody, CompletionsBody, ResponsesBody, MessagesBody])
def test_a_large_body_is_read_without_building_lists(kind: Any) -> None:
    """No member takes what it is, nor a list or an object of whatever the client sends."""
    found, left = [], [msgspec.inspect.type_info(decoders_of(kind)[1].type)]
    while left:
        each = left.pop()
        found.append(type(each).__name__)
        left += [field.type for field in getattr(each, "fields", ())] + list(getattr(each, "types", ()))
    built = {"AnyType", "ListType", "VarTupleType", "SetType", "DictType"}
    assert "RawType" in found
    assert not built & set(found)


def test_lists_of_many_items_are_not_built() -> None:
    """Neither are they counted where there is too much to count."""
    by: Any = Decoders()
    by.items = by.items_or_null = Forbidden()
    for item in ("1", "[]", '{"role":"user"}'):
        raw = msgspec.Raw(many(item, USUAL_BYTES // len(item)))
        assert read_list(raw, "messages", by=by) == ([msgspec.Raw(b"null")], False)
    by.objects = Forbidden()
    assert not is_few(msgspec.Raw(many("{}", MOST_BRACES + 1)), by=by)


def test_lists_of_few_items_are_built_whatever_their_texts_hold() -> None:
    """Commas and braces in a text make no items."""
    message = json.dumps({"role": "user", "content": ', "a": {' * (MOST_ITEMS * 2)})
    raw = msgspec.Raw(many(message, 3))
    assert len(memoryview(raw)) > USUAL_BYTES
    assert read_list(raw, "messages") == ([msgspec.Raw(message)] * 3, True)


@pytest.mark.parametrize("wrong", ["1", "-1.5", "true", "null", '"a"', "{}"])
@pytest.mark.parametrize("name", ["messages", "tools"])
def test_wrong_lists_are_refused_alike_in_bodies_of_any_size(name: str, wrong: str) -> None:
    """In the same words."""
    other = '"tools":[]' if name == "messages" else '"messages":[]'

    def refusal(pad: str) -> tuple[str, str | None] | None:
        try:
            read_request("chat_completions", f'{{"model":"m","{name}":{wrong},{other}{pad}}}'.encode())
        except BadRequestError as error:
            return str(error), error.param
        return None

    assert refusal("") == refusal(PAD)
    assert (refusal("") is None) == (name == "tools" and wrong == "null")


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        ("chat_completions", "messages"),
        ("chat_completions", "tools"),
        ("messages", "messages"),
        ("count_tokens", "tools"),
        ("responses", "input"),
        ("responses", "tools"),
    ],
)
def test_of_what_has_many_items_the_prompt_is_not_kept(endpoint: Endpoint, name: str) -> None:
    """Whatever bound the prompt has: it is placed as a large one, and who sent it is known all the same."""
    lists = {"input" if endpoint == "responses" else "messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "m", **lists, "metadata": {"user_id": "u_session_S"}, name: [1] * USUAL_BYTES}
    request = read_request(endpoint, json.dumps(body).encode())
    assert request.prompt == LargePrompt()
    assert request.facts.has_tools == (name == "tools")
    assert request.facts.fields == {"user_session": "S"}
    assert request.facts.one_shot == (name == "tools")


VALUES: list[Any] = [None, True, False, 0, -0.0, 0.5, 7, "", "a", '"', [], [0], {}, {"a": 1}, {"x-y": {"a": "b"}}]


@pytest.mark.parametrize("given", VALUES, ids=json.dumps)
@pytest.mark.parametrize("indent", [None, 2])
def test_a_member_is_what_it_is_when_it_is_decoded(given: Any, indent: int | None) -> None:
    """Its kind, whether Python takes it for true, what it holds."""
    raw = msgspec.Raw(json.dumps(given, indent=indent).encode().replace(b"[]", b"[ ]").replace(b"{}", b"{ }"))
    assert members.is_set(raw) == bool(given)
    assert members.is_true(raw) == (given is True)
    assert members.text(raw) == (given if isinstance(given, str) and given else None)
    assert members.value(raw) == given
    assert (members.given(raw) is None) == (given is None)
    held = given if isinstance(given, dict) else {}
    assert members.value(members.member(raw, "a")) == held.get("a")
    assert members.value(members.member(raw, "x-y", "a")) == held.get("x-y", {}).get("a")


def test_large_values_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there, and of no kind that anybody asks for."""
    monkeypatch.setattr(members, "_any", Forbidden())
    raw = msgspec.Raw(many("[]", members.SMALL_BYTES))
    assert members.is_set(raw)
    assert members.is_set(msgspec.Raw(b"0" + b"." + b"0" * members.SMALL_BYTES))
    assert members.value(raw) == bytes(raw).decode()
    assert members.text(raw) is None
    assert members.given(members.member(raw, "a")) is None


def test_numbers_that_nobody_holds_make_no_request_bad() -> None:
    """The engine judges them."""
    body = b'{"model":"m","messages":[],"documents":1e999,"nvext":{"cache_salt":1e999}}'
    assert read_request("chat_completions", body).nvext_salt == "1e999"
