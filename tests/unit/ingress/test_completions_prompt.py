"""What a completions body's ``prompt`` is, and that nothing is built of one that is not kept."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from services.ingress.completions_prompt import (
    MOST_TEXTS,
    MOST_TOKENS,
    NAMED_BYTES,
    Decoders,
    Given,
    count_texts,
    is_empty,
    read_prompt,
)
from services.ingress.endpoints import LargePrompt, read_request
from services.ingress.errors import BadJsonError, BadRequestError


class Forbidden:
    """A decoder that must not be asked."""

    def decode(self, raw: bytes) -> Any:
        """Ends the test."""
        raise AssertionError(f"{len(raw)} bytes were built")


def builds_nothing() -> Decoders:
    """Decoders none of which may be asked."""
    decoders: Any = Decoders()
    for name in vars(decoders):
        setattr(decoders, name, Forbidden())
    return decoders  # type: ignore[no-any-return]


def many(item: str, count: int) -> bytes:
    """A list of ``count`` times the same."""
    return b"[" + b",".join([item.encode()] * count) + b"]"


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (many("1", MOST_TOKENS + 1), 1),
        (many("[1]", 100_000), 100_000),
        (many("[ -1, 2 ]", 3), 3),
        (b"[\n[],[1]]", 2),
        (b"[" + many("1", MOST_TOKENS + 1) + b"]", 1),
        (many('"a"', MOST_TEXTS + 1), MOST_TEXTS + 1),
    ],
    ids=["tokens", "lists", "lists of anything", "an empty list", "one list", "texts"],
)
def test_of_batches_and_large_prompts_nothing_is_built(raw: bytes, count: int) -> None:
    """They are counted in their bytes, though they may be kept."""
    assert read_prompt(raw, by=builds_nothing()) == (None, count)


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (b'"a text"', 1),
        (b"[1,2,3]", 1),
        (b"[" + b" " * 100 + b"1]", 1),
        (b"[[1,2,3]]", 1),
        (b"[[1],[2]]", 2),
        (b'["a"]', 1),
        (rb'["a \"word\"", "ends in \\"]', 2),
        (rb'["\\"]', 1),
    ],
)
def test_of_what_is_not_kept_nothing_is_built(raw: bytes, count: int) -> None:
    """What it is, its first bytes say."""
    assert read_prompt(raw, keep=False, by=builds_nothing()) == (None, count)


@pytest.mark.parametrize("prompt", [b"[1,2,3]", b'"text"', b"[[1,2]]", b'["a"]'])
def test_a_large_body_has_a_large_prompt(prompt: bytes) -> None:
    """The body's bound is looked at before its prompt is."""
    body = b'{"model":"m","prompt":%s}' % prompt
    assert read_request("completions", body, prompt_bytes=10).prompt == LargePrompt()
    assert read_request("completions", body, prompt_bytes=len(body)).prompt not in (LargePrompt(), None)


def test_what_is_wrong_in_a_large_prompt_the_engine_says() -> None:
    """It would have to be built; what is no JSON, and what has no shape at all, is refused all the same."""
    body = b'{"model":"m","prompt":%s}'
    assert read_request("completions", body % b'[1,"a"]', prompt_bytes=10).prompt == LargePrompt()
    for wrong, error in ((b"[1,]", BadJsonError), (b'"\xff"', BadJsonError), (b"[{}]", BadRequestError)):
        with pytest.raises(error):
            read_request("completions", body % wrong, prompt_bytes=10)


ITEMS: list[Any] = [1, -1, 1 << 32, 1 << 80, 1.5, True, None, "a", 'a",["', "\\", [], [1], [1, 2], [-1], ["a"], [[1]]]
ITEMS += [{}, {"a": [1]}, [None], [1 << 33]]


def plainly(prompt: Any) -> tuple[Given, int] | None:
    """The same by decoding everything; ``None`` for what is refused."""
    try:
        given = msgspec.convert(prompt, str | list[int | str | list[int]])
    except msgspec.ValidationError:
        return None
    if isinstance(given, str):
        return given, 1
    if len({type(item) for item in given}) != 1:
        return None
    if isinstance(given[0], int):
        given = [given]
    if len(given) > 1:
        return None, len(given)
    only = given[0]
    if isinstance(only, str):
        return only, 1
    return (tuple(only), 1) if only and all(0 <= each < 1 << 32 for each in only) else None


@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n\t", ":")], ids=["dense", "spaced"])
def test_it_is_what_it_is_when_everything_is_decoded(separators: tuple[str, str]) -> None:
    """Whatever stands beside whatever; what is refused is refused."""
    lists = [list(items) for count in (0, 1, 2, 3) for items in itertools.product(ITEMS, repeat=count)]
    for prompt in [*lists, *ITEMS]:
        raw = json.dumps(prompt, separators=separators).encode()
        read: tuple[Given, int] | None
        try:
            read = read_prompt(raw)
        except (BadRequestError, msgspec.ValidationError):
            read = None
        assert read == plainly(prompt), raw


@pytest.mark.parametrize("odd", ['"a"', "-1", "null", "[[1]]", "{}"])
@pytest.mark.parametrize("item", ["1", "[1]"])
def test_large_wrong_prompts_are_refused_without_building_them(item: str, odd: str) -> None:
    """The item that is wrong is looked for in small ones only: that takes building the others."""
    raw = many(item, NAMED_BYTES)[:-1] + b"," + odd.encode() + b"]"
    if item == "[1]" and odd == "-1":
        raw = raw.replace(b",-1", b',[1],"-1"')
    decoders: Any = Decoders()
    decoders.member = Forbidden()
    with pytest.raises(BadRequestError, match=r"^prompt: ") as caught:
        read_prompt(raw, by=decoders)
    assert caught.value.param == "prompt"


def test_texts_are_counted_by_their_quotes() -> None:
    """Escaped quotes end none; behind a backslash at a text's end a quote is not seen, and the number is too low."""
    assert count_texts(rb'["a","\"b\"", "\\\"c"]') == 3
    assert count_texts(rb'["a","b\\","c","d\\"]') == 3
    assert [is_empty(raw) for raw in (b'""', b"[ \n]", b'[""]', b"[[]]", b'"]"')] == [True, True, False, False, False]


def test_embeddings_are_counted_and_not_built() -> None:
    """A list of texts in base64; of anything else the engine says what is wrong."""

    def choices(embeds: bytes, prompt: bytes) -> int:
        return read_request("completions", b'{"model":"m","prompt_embeds":%s,"prompt":%s}' % (embeds, prompt)).choices

    assert choices(b'["AA","BB"]', b"[ ]") == 2
    assert choices(b"[1,2,3]", b"null") == 1
    assert choices(b'"AA"', b"[[1],[2]]") == 3
    assert choices(b"[ ]", b'"x"') == 1
