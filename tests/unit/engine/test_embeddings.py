"""Embeddings of the simulated engine: what is taken, and what equal inputs share."""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import Any

import pytest

from load.engine.api import ApiError
from load.engine.embeddings import DIMENSIONS, EmbeddingsBody, embeddings_answer, inputs_of


def vectors(prompts: list[array[int]], **options: Any) -> list[Any]:
    body = json.loads(embeddings_answer(prompts, "m", 7, EmbeddingsBody(input="", **options)))
    assert (body["object"], body["model"], body["created"]) == ("list", "m", 7)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert [entry["index"] for entry in body["data"]] == list(range(len(prompts)))
    return [entry["embedding"] for entry in body["data"]]


def test_equal_tokens_have_equal_vectors_of_length_1() -> None:
    """Whatever stands beside them, in either encoding."""
    one, two = array("I", [1, 2, 3]), array("I", [1, 2, 4])
    first, second, again = vectors([one, two, one])
    assert first == again != second
    assert len(first) == DIMENSIONS
    assert math.isclose(sum(value * value for value in first), 1.0, rel_tol=1e-5)
    (packed,) = vectors([one], encoding_format="base64")
    assert array("f", base64.b64decode(packed)).tolist() == first


def test_fewer_dimensions_are_the_first_ones() -> None:
    """Made length 1 again."""
    one = array("I", [1, 2, 3])
    (whole,), (short,) = vectors([one]), vectors([one], dimensions=4)
    scale = whole[0] / short[0]
    assert [value * scale for value in short] == pytest.approx(whole[:4], rel=1e-5)


@pytest.mark.parametrize("dimensions", [0, -1, DIMENSIONS + 1])
def test_dimensions_have_bounds(dimensions: int) -> None:
    """A 400 that names them."""
    with pytest.raises(ApiError, match=f"1..{DIMENSIONS}"):
        vectors([array("I", [1])], dimensions=dimensions)


def test_inputs() -> None:
    """A text, token ids, or a list of either."""
    assert inputs_of("a") == ["a"]
    assert inputs_of(["a", "b"]) == ["a", "b"]
    assert inputs_of([1, 2]) == [array("I", [1, 2])]
    assert inputs_of([[1], [2, 3]]) == [array("I", [1]), array("I", [2, 3])]


@pytest.mark.parametrize("given", ["", [], [""], [[]], None, {}, [-1], [1, "a"], ["a"] * 2049])
def test_what_is_no_input(given: Any) -> None:
    """A 400 that names the member."""
    with pytest.raises(ApiError) as caught:
        inputs_of(given)
    assert (caught.value.status, caught.value.param) == (400, "input")
