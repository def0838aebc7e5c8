"""A model's own tokenizer and chat template, read from the files that the model ships with."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Raw
from tokenizers import AddedToken, Tokenizer

from bus.errors import SettingsError
from bus.log import EventLog
from kvcore.hashing import pack_tokens
from services.ingress.contents import Dialect
from services.ingress.decoded import DecodedCache, decode_all
from services.ingress.endpoints import ChatPrompt, TextPrompt
from services.ingress.errors import TemplateError
from services.ingress.prefix_tokens import Plan, PrefixTokenCache
from services.ingress.prompts import ChatTemplate, render_prompt
from services.ingress.shell.ascii_tokens import LONGEST, AsciiEncoder, UnsuitableError
from services.ingress.shell.memory import give_back_memory
from services.ingress.tokens import PromptTokens

log = EventLog(__name__)

BATCH_CHARACTERS = 64 * 1024
"""The tokenizer works on about so much at once: its own form of a text takes many times the text's memory."""

BATCHES = 4
"""So many batches of one long prompt are encoded at the same time, on as many cores."""

DECODED_SHARE = 4
"""Of the cache's bytes, one in so many is for messages and tools as they are decoded."""

LONG_BYTES = 256 * 1024
"""After more than this the memory that it took is given back."""

# The library's own threads cost more than a short text (measured: 0.7 ms instead of 0.45 for 500 tokens), and this is
# its only switch. Who sets it knows better.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class LocalTokenizer:
    """One model's tokenizer. `count` is called from several threads at once: the encoder runs without the
    interpreter's lock (spec: performance §D: ``encode_batch_fast``, never ``encode``), the cache under one of ours.
    `count` is `plan` and `finish`: the first holds the interpreter's lock, whatever thread it runs in.
    """

    def __init__(self, path: Path, *, cache_bytes: int) -> None:
        """``path``: the directory, or the ``tokenizer.json`` in it. Raises `SettingsError`."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises bare exceptions; whatever it is, this file is no tokenizer.
            raise SettingsError("tokenizers", f"{file} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._ascii = self._ascii_encoder(file)
        config = _read_config(file.parent)
        self.template = _read_template(file.parent, config)
        added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        verbatim = [
            token.content
            for token in added.values()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        ]
        self._decoded = DecodedCache(max_bytes=cache_bytes // DECODED_SHARE)
        self._cache = PrefixTokenCache(verbatim, max_bytes=cache_bytes - cache_bytes // DECODED_SHARE)
        self._lock = threading.Lock()
        self._batches = ThreadPoolExecutor(min(BATCHES, os.cpu_count() or 1), thread_name_prefix="tokenize-batch")
        # What the tokenizer puts before a text of its own accord (a BOS); chat templates write it themselves.
        self._leading = pack_tokens(self._tokenizer.encode("").ids)

    @property
    def hit_tokens(self) -> int:
        """Tokens that did not have to be encoded again."""
        return self._cache.hit_tokens

    @property
    def missed_tokens(self) -> int:
        return self._cache.missed_tokens

    def count(
        self,
        prompt: ChatPrompt | TextPrompt,
        block_size: int | None,
        dialect: Dialect = "vllm",
        salt: str | None = None,
        adapter: str | None = None,
    ) -> PromptTokens:
        """The prompt's tokens and chain, as an engine of this ``dialect`` has them. Raises `TemplateError`."""
        return self.finish(self.plan(prompt, dialect), block_size, salt, adapter)

    def plan(self, prompt: ChatPrompt | TextPrompt, dialect: Dialect = "vllm", apart: str = "") -> Plan:
        """Render the prompt and look it up under ``apart``: what is left to encode. Raises `TemplateError`."""
        if isinstance(prompt, ChatPrompt):
            if self.template is None:
                raise TemplateError("this tokenizer has no chat template")
            text, leading = render_prompt(self.template, prompt, dialect, partial(self._decode, apart)), b""
        else:
            text, leading = prompt.text, self._leading if prompt.add_special_tokens else b""
        with self._lock:
            return self._cache.find(text, leading, apart)

    def _decode(self, apart: str, raws: Sequence[Raw]) -> list[Any]:
        """What of these is not known from the turn before, and that."""
        with self._lock:
            found = self._decoded.find(raws, apart)
        items = [*found.items, *decode_all(raws[len(found.items) :])]
        entry = found.with_values(raws, items, self._decoded.max_bytes)
        if entry is not None:
            with self._lock:
                self._decoded.keep(entry)
        return items

    def finish(
        self, plan: Plan, block_size: int | None, salt: str | None = None, adapter: str | None = None
    ) -> PromptTokens:
        """Encode what is left, and remember the whole."""
        filled = plan.fill(self._encode(plan.missing), block_size, salt, adapter)
        with self._lock:
            self._cache.count(plan, filled)
            self._cache.keep(filled)
        if plan.missing_bytes > LONG_BYTES:
            give_back_memory()
        return filled.prompt

    def _encode(self, texts: list[str]) -> list[array[int]]:
        batches = list(_batches(texts))
        encoded = (
            map(self._encode_batch, batches) if len(batches) == 1 else self._batches.map(self._encode_batch, batches)
        )
        return [ids for batch in encoded for ids in batch]

    def _encode_batch(self, texts: list[str]) -> list[array[int]]:
        if self._ascii is None:
            return self._encode_any(texts)
        others = [text for text in texts if not text.isascii() or len(text) > LONGEST]
        encoded = iter(self._encode_any(others) if others else ())
        encode = self._ascii.encode
        return [encode(text) if text.isascii() and len(text) <= LONGEST else next(encoded) for text in texts]

    def _encode_any(self, texts: list[str]) -> list[array[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

    def _ascii_encoder(self, file: Path) -> AsciiEncoder | None:
        """The quicker way for ASCII, where it is the same."""
        try:
            definition = json.loads(file.read_bytes())
            return AsciiEncoder(definition, lambda text: self._tokenizer.encode(text, add_special_tokens=False).ids)
        except (UnsuitableError, KeyError, TypeError, ValueError) as error:
            log.info("ascii_goes_the_long_way", tokenizer=str(file), reason=str(error))
            return None

    def close(self) -> None:
        """End its threads, when they have done what they do."""
        self._batches.shutdown(wait=False)


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """``texts`` in order, `BATCH_CHARACTERS` at a time, or one that is longer."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError("tokenizers", f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError("tokenizers", f"{file} is not an object")
    return config


def _read_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The chat template, from its own file or from the configuration; of several, the one named ``default``."""
    file = directory / "chat_template.jinja"
    source: Any = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    variables = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            variables[name] = content
    try:
        return ChatTemplate(source, variables, lambda form: datetime.now().astimezone().strftime(form))
    except TemplateError as error:
        raise SettingsError("tokenizers", f"{directory}: {error}") from error
