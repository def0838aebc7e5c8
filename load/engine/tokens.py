"""The simulated model's tokenizer and chat template: text to token ids, cached by message.

Special tokens cut the text exactly, so that the ids of a conversation are the ids of its messages back to back; a
resent conversation costs only its new tail. `Tokenizer.encode_segments` is the only slow call; it releases the
interpreter lock and may run in a thread (spec: performance §D).
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.ingress import prompts
from services.ingress.canonical import shown_tool
from services.ingress.errors import TemplateError

ASSETS = Path(__file__).parent / "assets"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
CACHE_TOKENS = 1_000_000


class BadConversationError(ValueError):
    """The messages do not fit the chat template (the client's fault)."""

    reason = "bad_conversation"


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Tool-call arguments as the template writes them, so that they come back as the same tokens."""
    return json.dumps(arguments, ensure_ascii=False)


class ChatTemplate:
    """``chat_template`` of a ``tokenizer_config.json``, rendered as vLLM does."""

    def __init__(self, source: str) -> None:
        self._template = prompts.ChatTemplate(source, {}, str)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises `BadConversationError`."""
        shown = [shown_tool(tool) for tool in tools or ()]
        try:
            return self._template.render(messages, shown, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise BadConversationError(str(error)) from error


class Tokenizer:
    """Token ids as arrays of unsigned 32-bit integers. Not for use from several threads but `encode_segments`."""

    def __init__(self, folder: Path = ASSETS, cache_tokens: int = CACHE_TOKENS) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = ChatTemplate(config["chat_template"])
        end_token = self._tokenizer.token_to_id(config["eos_token"])
        assert end_token is not None
        self.end_token = end_token
        self.vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self._cache: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_tokens = 0
        self._cache_tokens = cache_tokens

    def encode(self, text: str) -> array[int]:
        """Token ids of ``text``; special tokens in it are recognised, none are added."""
        segments = self.segments(text)
        known = self.known(segments)
        missing = [segment for segment in dict.fromkeys(segments) if segment not in known]
        return self.join(segments, known, missing, self.encode_segments(missing))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Each token's entry in the vocabulary (byte-level spelling)."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    # The steps of `encode`, for callers that run the slow one (`encode_segments`) in a thread

    def segments(self, text: str) -> list[str]:
        """``text`` cut before each message."""
        first, *rest = text.split(MESSAGE_START)
        cut = [first] if first else []
        return cut + [MESSAGE_START + part for part in rest]

    def known(self, segments: Sequence[str]) -> dict[str, array[int]]:
        """Those of ``segments`` that are cached, with their ids."""
        found: dict[str, array[int]] = {}
        for segment in segments:
            ids = self._cache.get(segment)
            if ids is not None:
                found[segment] = ids
                self._cache.move_to_end(segment)
        return found

    def encode_segments(self, segments: Sequence[str]) -> list[array[int]]:
        """Token ids of each segment. Slow for long text; safe in a thread."""
        if not segments:
            return []
        encoded = self._tokenizer.encode_batch_fast(list(segments), add_special_tokens=False)
        return [array("I", item.ids) for item in encoded]

    def join(
        self,
        segments: Sequence[str],
        known: dict[str, array[int]],
        missing: Sequence[str],
        encoded: Sequence[array[int]],
    ) -> array[int]:
        """Token ids of ``segments`` back to back; what was ``missing`` is cached, and the oldest forgotten for it."""
        fresh = dict(zip(missing, encoded, strict=True))
        tokens = array("I")
        for segment in segments:
            tokens.extend(fresh[segment] if segment in fresh else known[segment])
        for segment, ids in fresh.items():
            if segment not in self._cache:
                self._cache[segment] = ids
                self._cached_tokens += len(ids)
        while self._cached_tokens > self._cache_tokens and self._cache:
            _, forgotten = self._cache.popitem(last=False)
            self._cached_tokens -= len(forgotten)
        return tokens
