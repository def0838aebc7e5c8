"""Settings of the ingress."""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec

from bus.settings import CommonSettings

MEBIBYTE = 1024 * 1024


class IngressSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP front door: where it listens, how it counts tokens, how long it waits for whom, what it adds.

    ``host``, ``port``: where clients connect (the health pages are served there too). ``tenant``: whose requests
    these are until keys are configured.

    ``tokenizers``: model to the directory or ``tokenizer.json`` of its tokenizer. ``tokenize``: ``local``: with those;
    ``engine``: by the engine's ``/tokenize``; ``auto``: local where there is one, else the engine; ``none``: neither.
    ``tokenize_threads`` work on at most ``tokenize_queue`` prompts; a request over that bound, or whose tokens take
    longer than ``tokenize_timeout_s``, is placed without its tokens. ``prompt_bytes``: a request with a larger body is
    not counted by anybody (``too_large``): a tokenizer needs many times a prompt's memory. ``tokenize_cache_bytes``:
    tokens of conversations that are kept per model, so that a resent one costs its new tail.

    ``text_blocks``: a prompt without tokens is placed by where its text was sent before, in blocks of
    ``text_block_bytes`` bytes of UTF-8, of which the first ``text_bytes`` count; off: by session and load.

    ``body_bytes``: larger requests get 413. ``held_body_bytes``: bodies of all requests that are being read or are not
    over; a request that does not fit gets 503 ``busy`` before its body is read. ``body_timeout_s``: a body that is not
    there in this time, from the end of its headers, gets 408. ``event_bytes``: the largest single event of a stream.
    ``max_in_flight``: accepted requests that have not ended; over it: 429. ``row_window``: trace rows not yet
    acknowledged.

    ``connect_timeout_s``, ``first_byte_timeout_s``, ``idle_timeout_s``, ``total_timeout_s``: of the engine's answer,
    each named separately in traces. ``stall_timeout_s``: a client that does not read its answer is cut after it.

    ``admit_idle_s``: silence of the admission service after which the request is placed without it (``fallback``)
    or, with ``fallback`` off, refused. ``admit_deadline_s``: how long a held request waits in all.
    ``worker_lost_s``: a worker unheard for longer gets nothing.

    ``retry``: once, on another worker, when the first failed before its first byte. ``splice_usage``: ask the engine
    for usage (and keep the extra chunk from clients that did not ask). ``splice_priority``: send the priority that
    admission decided. ``splice_session_id``: send the session's id in the body, for engines that use it.
    ``forward_headers``: more header names to forward; a trailing ``*`` stands for any ending.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tenant: str = "default"

    tokenizers: dict[str, str] = msgspec.field(default_factory=dict)
    tokenize: Literal["auto", "local", "engine", "none"] = "auto"
    tokenize_threads: int = 2
    tokenize_queue: int = 64
    tokenize_timeout_s: float = 2.0
    prompt_bytes: int = 4 * MEBIBYTE
    tokenize_cache_bytes: int = 256 * MEBIBYTE

    text_blocks: bool = True
    text_block_bytes: int = 256
    text_bytes: int = MEBIBYTE

    body_bytes: int = 32 * MEBIBYTE
    held_body_bytes: int = 512 * MEBIBYTE
    body_timeout_s: float = 60.0
    header_bytes: int = 65_536
    event_bytes: int = 8 * MEBIBYTE
    max_in_flight: int = 4096
    row_window: int = 8192

    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float = 3600.0
    stall_timeout_s: float = 120.0

    admit_idle_s: float = 2.0
    admit_deadline_s: float = 600.0
    worker_lost_s: float = 5.0
    fallback: bool = True

    retry: bool = True
    splice_usage: bool = True
    splice_priority: bool = True
    splice_session_id: bool = False
    forward_headers: tuple[str, ...] = ()

    stop_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        positive = (
            "tokenize_threads",
            "tokenize_queue",
            "tokenize_timeout_s",
            "prompt_bytes",
            "tokenize_cache_bytes",
            "text_block_bytes",
            "text_bytes",
            "body_bytes",
            "held_body_bytes",
            "body_timeout_s",
            "header_bytes",
            "event_bytes",
            "max_in_flight",
            "row_window",
            "connect_timeout_s",
            "first_byte_timeout_s",
            "idle_timeout_s",
            "total_timeout_s",
            "stall_timeout_s",
            "admit_idle_s",
            "admit_deadline_s",
            "worker_lost_s",
        )
        for key in positive:
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be greater than 0")
        if not 0 <= self.port <= 65_535:
            raise ValueError("port must be between 0 and 65535")
        if not self.tenant:
            raise ValueError("tenant must not be empty")
        if self.tokenize == "local" and not self.tokenizers:
            raise ValueError("tokenizers must name at least one tokenizer when tokenize is local")
        if self.held_body_bytes < self.body_bytes:
            raise ValueError("held_body_bytes must not be less than body_bytes")
        if self.admit_idle_s > self.admit_deadline_s:
            raise ValueError("admit_idle_s must not exceed admit_deadline_s")

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach ``host`` (there are no credentials yet, so that everybody may ask)."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True
