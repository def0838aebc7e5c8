"""What the simulated model says: planned in full when a request arrives, deterministic from prompt and seed.

Prose is made of words that are single tokens and single pre-tokens, so that a client which sends the text back as an
assistant message gets the same token ids again, and the KV of prompt and output is a prefix of the next prompt.
"""

from __future__ import annotations

import random
import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from load.engine.tokens import Tokenizer, arguments_text

PlannedFinish = Literal["stop", "length", "tool_calls"]

_WORD = re.compile(r"Ġ[a-z]{3,12}")
_FIRST_WORD = re.compile(r"[A-Z][a-z]{2,12}")
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes: ``arguments`` is JSON text, spaced as `load.engine.tokens.arguments_text` does."""

    name: str
    arguments: str

    def markup(self) -> str:
        """As the chat template writes it."""
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {self.arguments}}}\n</tool_call>'

    @property
    def arguments_at(self) -> int:
        """Byte offset of the arguments in `markup`."""
        return len(f'<tool_call>\n{{"name": "{self.name}", "arguments": '.encode())


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """Tokens with what each of them adds to the answer.

    ``texts``: prose of each token (empty for markup and the end token). ``arguments``: what each token adds to the
    tool call's arguments; ``call_at``: index of the first token of the call, ``None`` without one.
    """

    tokens: array[int]
    texts: list[str]
    finish: PlannedFinish
    call: ToolCall | None = None
    call_at: int | None = None
    arguments: list[str] | None = None

    def text(self, start: int, end: int) -> str:
        return "".join(self.texts[start:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """How much may be said. ``max_tokens`` is what the request and the model's length allow."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    asked: bool = True
    """The client named a maximum; with ``ignore_eos`` exactly that many tokens come."""


class Speaker:
    """Plans outputs. ``mean_tokens``: mean length of an answer that ends by itself (uniform within half of it).

    ``words``: what prose is made of, each with its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, *, mean_tokens: int = 64, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._mean_tokens = mean_tokens
        self._seed = seed
        self._words = self._single_tokens(_WORD)
        self._first_words = self._single_tokens(_FIRST_WORD)
        self._texts = {token: text for text, token in (*self._words, *self._first_words)}
        self.words = [text for text, _ in self._words]
        self._word_tokens = [token for _, token in self._words]
        self._first_tokens = [token for _, token in self._first_words]

    def _single_tokens(self, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
        """Words of the vocabulary that encode to themselves, in order of their ids."""
        entries = sorted(
            ((token, name) for name, token in self._tokenizer.vocabulary.items() if pattern.fullmatch(name))
        )
        texts = [name.replace("Ġ", " ") for _, name in entries]
        encoded = self._tokenizer.encode_segments(texts)
        return [
            (text, token)
            for text, (token, _), ids in zip(texts, entries, encoded, strict=True)
            if len(ids) == 1 and ids[0] == token
        ]

    def generator(self, prompt: array[int], seed: int | None) -> random.Random:
        """The generator of one request's output: equal prompts and seeds say the same."""
        digest = blake2b(prompt.tobytes(), digest_size=8, key=f"{self._seed}:{seed or 0}".encode()[:64])
        return random.Random(digest.digest())

    def plan(
        self,
        prompt: array[int],
        limits: OutputLimits,
        *,
        seed: int | None = None,
        call: ToolCall | None = None,
        starts_message: bool = True,
    ) -> PlannedOutput:
        """The whole output. ``starts_message``: it follows ``assistant\\n`` and so begins with a capital word."""
        rng = self.generator(prompt, seed)
        if call is not None:
            return self._plan_call(rng, limits, call)
        half = max(1, self._mean_tokens // 2)
        natural = max(limits.min_tokens, rng.randint(half, 3 * half), 2)
        if limits.ignore_eos:
            count, finish = (limits.max_tokens if limits.asked else min(natural, limits.max_tokens)), "length"
        else:
            count, finish = (natural, "stop") if natural <= limits.max_tokens else (limits.max_tokens, "length")
        tokens, texts = self._prose(rng, count - 1 if finish == "stop" else count, starts_message)
        if finish == "stop":
            tokens.append(self._tokenizer.end_token)
            texts.append("")
        return PlannedOutput(tokens, texts, "stop" if finish == "stop" else "length")

    def _prose(self, rng: random.Random, count: int, starts_message: bool) -> tuple[array[int], list[str]]:
        tokens = array("I", rng.choices(self._word_tokens, k=count))
        if starts_message and count:
            tokens[0] = rng.choice(self._first_tokens)
        table = self._texts
        return tokens, [table[token] for token in tokens]

    def _plan_call(self, rng: random.Random, limits: OutputLimits, call: ToolCall) -> PlannedOutput:
        """A few words, then the call; cut at ``max_tokens`` like any other output."""
        prose, texts = self._prose(rng, rng.randint(4, 16), True)
        markup = "\n" + call.markup()
        tokens = self._tokenizer.encode_segments([markup])[0]
        start, end = 1 + call.arguments_at, 1 + call.arguments_at + len(call.arguments.encode())
        pieces = _pieces(markup.encode(), self._tokenizer.pieces(tokens), start, end)
        call_at = len(prose)
        arguments = [""] * call_at + pieces + [""]
        prose.extend(tokens)
        prose.append(self._tokenizer.end_token)
        texts += [""] * (len(tokens) + 1)
        finish: PlannedFinish = "tool_calls"
        if len(prose) > limits.max_tokens:
            finish = "length"
            prose, texts = prose[: limits.max_tokens], texts[: limits.max_tokens]
            arguments = arguments[: limits.max_tokens]
        return PlannedOutput(prose, texts, finish, call, call_at, arguments)


def _pieces(markup: bytes, names: Sequence[str], start: int, end: int) -> list[str]:
    """What each token adds of ``markup[start:end]``. A byte-level token has one character for each byte, and a
    character may be split over tokens; plain added tokens (the markup's ends) are ASCII."""
    pieces = []
    offset = 0
    decoder = getincrementaldecoder("utf-8")("replace")
    for name in names:
        after = offset + len(name)
        pieces.append(decoder.decode(markup[max(offset, start) : max(start, min(after, end))]))
        offset = after
    return pieces


def wanted_call(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None, flag: str | None
) -> Mapping[str, Any] | None:
    """The function that will be called: the flag's, the named one, the first if one is required; else ``None``.

    Raises `ValueError` for a name that is not among ``tools``.
    """
    functions: list[Mapping[str, Any]] = [
        tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)
    ]
    name = flag
    if name is None and isinstance(choice, Mapping):
        name = str(choice.get("function", {}).get("name"))
    if name is None:
        return functions[0] if choice == "required" and functions else None
    for function in functions:
        if function.get("name") == name:
            return function
    raise ValueError(f"tool {name!r} is not among the tools of this request")


def invent_arguments(function: Mapping[str, Any], rng: random.Random, words: Sequence[str]) -> str:
    """JSON arguments that fit the function's schema (object, string, number, boolean, array, enum)."""
    schema = function.get("parameters")
    value = _invent(schema, rng, words, 0) if isinstance(schema, Mapping) else {}
    return arguments_text(value if isinstance(value, dict) else {})


def _invent(schema: Mapping[str, Any], rng: random.Random, words: Sequence[str], depth: int) -> Any:
    options = schema.get("enum")
    if isinstance(options, list) and options:
        return options[0]
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or depth >= _MAX_DEPTH:
            return {}
        return {
            str(name): _invent(inner, rng, words, depth + 1) if isinstance(inner, Mapping) else None
            for name, inner in properties.items()
        }
    if kind == "array":
        inner = schema.get("items")
        return [_invent(inner, rng, words, depth + 1)] if isinstance(inner, Mapping) and depth < _MAX_DEPTH else []
    simple: dict[Any, Any] = {"integer": rng.randint(1, 99), "number": rng.randint(1, 99), "boolean": True}
    return simple.get(kind, " ".join(rng.choices(words, k=3)).strip())
