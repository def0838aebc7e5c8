"""``POST /v1/embeddings`` as vLLM answers it: one vector of length 1 per input, made of its tokens, equal for equal
tokens. Nothing runs in the scheduler for it, and no KV is kept."""

from __future__ import annotations

import base64
import math
import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal
from uuid import uuid4

import msgspec

from load.engine.api import ApiError

DIMENSIONS = 64
MOST_INPUTS = 2048
"""As OpenAI's API allows."""


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """Unknown fields are ignored, as vLLM does."""

    input: Any
    """Text, token ids, or a list of either: see `inputs_of`."""

    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def inputs_of(given: Any) -> list[str | array[int]]:
    """The inputs, each a text or token ids. Raises `ApiError`."""
    several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    if len(several) > MOST_INPUTS:
        raise ApiError(f"at most {MOST_INPUTS} inputs are taken at once", param="input")
    return [_input(each) for each in several]


def _input(given: Any) -> str | array[int]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given:
        try:
            return array("I", given)
        except (TypeError, OverflowError) as error:
            raise ApiError(f"input must be text or token ids ({error})", param="input") from error
    raise ApiError("input must be a non-empty text, token ids, or a list of either", param="input")


def dimensions_of(body: EmbeddingsBody) -> int:
    """Members of each vector. Raises `ApiError`."""
    wanted = DIMENSIONS if body.dimensions is None else body.dimensions
    if not 1 <= wanted <= DIMENSIONS:
        raise ApiError(f"dimensions must be 1..{DIMENSIONS}, not {wanted}", param="dimensions")
    return wanted


def embedding(tokens: array[int], dimensions: int) -> array[float]:
    """The vector of one input: shorter ones are beginnings of longer ones, made length 1 again."""
    rng = random.Random(blake2b(tokens.tobytes(), digest_size=8).digest())
    values = [rng.gauss(0.0, 1.0) for _ in range(dimensions)]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return array("f", (value / length for value in values))


def embeddings_answer(prompts: Sequence[array[int]], model: str, created: int, body: EmbeddingsBody) -> bytes:
    """The answer's body. ``created`` in Unix seconds. Raises `ApiError`."""
    dimensions = dimensions_of(body)
    vectors = (embedding(tokens, dimensions) for tokens in prompts)
    as_text = body.encoding_format == "base64"
    data = [
        {
            "index": index,
            "object": "embedding",
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"embd-{uuid4().hex}", "object": "list", "created": created, "model": model}
    return msgspec.json.encode({**head, "data": data, "usage": usage})
