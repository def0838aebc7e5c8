"""Settings of the ingress."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

from bus.settings import CommonSettings
from services.ingress.capture import HeaderList
from services.ingress.redaction import BadPatternError, Redaction
from services.ingress.salt import LEAST_SECRET_BYTES

MEBIBYTE = 1024 * 1024

MOST_TURN_STATE_S = 86_400


class IngressSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP front door: where it listens, how it counts tokens, how long it waits for whom, what it adds.

    ``host``, ``port``: where clients connect (the health pages are served there too). ``tenant``: whose requests
    these are without keys. ``workers``: processes behind the port, each named ``<instance>-<number>``; bounds are of
    each, keys' limits of all together (docs/operations.md). ``keys_file``: who may ask (docs/security.md); read again
    when it changes.

    ``tls_cert``, ``tls_key``: PEM files (the key may be in the certificate's); clients then must speak TLS. Read again
    when they change. ``tls_client_ca``: clients must bring a certificate of this authority (docs/security.md).

    ``splice_cache_salt``: with keys, each tenant's prompts are cached apart: its ``cache_salt``, which is derived with
    ``cache_salt_secret`` (or the one in ``cache_salt_secret_file``; the same at every front door, 16 bytes or more),
    stands in for the client's. ``require_cache_salt``: APIs in which engines read none (Messages) get 501.
    ``engine_api_key`` (or the one in ``engine_api_key_file``): what engines are brought in place of clients' keys.
    ``engine_tls_ca``: the authority (PEM) of engines at ``https://``; empty: the system's.

    ``passthrough``: ``/v1/embeddings``, ``/tokenize``, ``/detokenize`` and whatever else is below ``/v1`` is passed on
    to an engine of the model that it names, as it comes (docs/operations.md); off: 404. Unset: with keys, only those
    three: what an unknown API keeps, one tenant could read of another.

    ``tokenizers``: model to the directory or ``tokenizer.json`` of its tokenizer. ``tokenize``: ``local``: with those;
    ``engine``: by the engine's ``/tokenize``; ``auto``: local where there is one, else the engine; ``none``: neither.
    ``tokenize_threads`` work on at most ``tokenize_queue`` prompts; a request over that bound, or whose tokens take
    longer than ``tokenize_timeout_s``, is placed without its tokens. ``prompt_bytes``: a request with a larger body is
    not counted by anybody (``too_large``): a tokenizer needs many times a prompt's memory. ``tokenize_cache_bytes``:
    tokens and decoded messages of conversations, kept per model, so that a resent one costs its new tail.

    ``text_blocks``: a prompt without tokens is placed by where its text was sent before, in blocks of
    ``text_block_bytes`` bytes of UTF-8, of which the first ``text_bytes`` count; off: by session and load.

    ``recognise_sessions``: a request that names nobody is taken for the next turn of the conversation that it goes on
    from, by what it says (an indexer knows; see docs/operations.md); off: each is a session of its own. Without an
    answer in ``recognise_deadline_ms`` it is a new session, and so it is with one of less than
    ``recognise_confidence`` (more than 0.9 leaves nothing but forks and repetitions, see docs/operations.md).

    ``body_bytes``: larger requests get 413. ``held_body_bytes``: bodies of all requests that are being read, or whose
    engine has not begun to answer; a request that does not fit gets 503 ``busy`` before its body is read.
    ``body_timeout_s``: a body that is not there in this time, from the end of its headers, gets 408.
    ``event_bytes``: the largest single event of a stream. ``max_in_flight``: accepted requests that have not ended;
    over it: 429. ``row_window``: trace rows not yet acknowledged. ``trace_fine_tokens``: the row of a longer prompt
    has a hash for every 512 tokens or so instead of one for each block (docs/adr/0018); 0: every prompt's.

    ``connect_timeout_s``, ``first_byte_timeout_s``, ``idle_timeout_s``, ``total_timeout_s``: of the engine's answer,
    each named separately in traces. ``stall_timeout_s``: a client that does not read its answer is cut after it.

    ``admit_idle_s``: silence of the admission service after which the request is placed without it (``fallback``)
    or, with ``fallback`` off, refused. ``admit_deadline_s``: how long a held request waits in all.
    ``worker_lost_s``: a worker unheard for longer gets nothing.

    ``held_comment_s``: a stream that is held for so long is begun with a comment, and told again as often until its
    engine answers, so that nobody between takes it for dead (0: never; then an answer begins with its engine's).

    ``breaker_failures``: a worker on which so many requests in a row failed (no connection, a lost one, silence, a 5xx)
    is left alone for ``breaker_open_s``, then gets one to try, and is left alone for twice as long if that fails too
    (``breaker_longest_s`` at most); 0: never.

    ``turn_state_s``: how long the ``x-codex-turn-state`` of an answer is good (0: none is given). Front doors read each
    other's where they share ``cache_salt_secret``.

    ``retry``: once, on another worker, when the first failed before its first byte.
    ``hedge_after_ms``: a request whose engine has not begun to answer in this time is sent to another one as well, if
    admission grants that at once, and the one that begins first is heard; in place of the retry (0: never;
    docs/adr/0037).
    ``splice_usage``: ask the engine for usage (and keep the extra chunk from clients that did not ask).
    ``splice_priority``: send the priority that admission decided. ``strip_hints``: members of clients' bodies that are
    for schedulers, and that these engines refuse: read here and not sent on.
    ``splice_session_id``: send the session's id in the body; unset: for turns, to engines that take hints, which name
    sessions by it.
    ``splice_continuum``: tell vLLM's Continuum plug-in in ``vllm_xargs`` whose step a turn is. ``splice_kv_hints``: put
    the hints for a session into its next turn, for workers whose bridge says that this is how they take them.
    ``forward_headers``: more header names to forward; a trailing ``*`` stands for any ending.

    ``capture`` (docs/capture.md): prompts (``requests``), or prompts and ``answers``, are written into segments in
    ``capture_directory``, of the models and sessions that ``capture_models`` and ``capture_sessions`` name (empty:
    all), with the headers of ``capture_headers`` (a trailing ``*`` stands for any ending). A larger body than
    ``capture_bytes`` is left out. At most ``capture_rows`` requests and ``capture_held_bytes`` wait for the disk.
    ``capture_redact_secrets``: what looks like a credential is hidden, and so is what the regular expressions of
    ``capture_redact`` find. Segments roll and stay as the recorder's do (``capture_roll_bytes``, …).
    """

    host: str = "127.0.0.1"
    port: int = 8080
    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    tenant: str = "default"
    keys_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    splice_cache_salt: bool = True
    cache_salt_secret: str = ""
    cache_salt_secret_file: str = ""
    require_cache_salt: bool = False
    engine_api_key: str = ""
    engine_api_key_file: str = ""
    engine_tls_ca: str = ""

    passthrough: bool | None = None

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

    recognise_sessions: bool = False
    recognise_deadline_ms: int = 250
    recognise_confidence: float = 0.6

    body_bytes: int = 32 * MEBIBYTE
    held_body_bytes: int = 512 * MEBIBYTE
    body_timeout_s: float = 60.0
    header_bytes: int = 65_536
    event_bytes: int = 8 * MEBIBYTE
    max_in_flight: int = 4096
    row_window: int = 8192
    trace_fine_tokens: int = 8192

    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 120.0
    total_timeout_s: float = 3600.0
    stall_timeout_s: float = 120.0

    admit_idle_s: float = 2.0
    admit_deadline_s: float = 600.0
    worker_lost_s: float = 5.0
    fallback: bool = True
    held_comment_s: float = 0.0

    breaker_failures: int = 5
    breaker_open_s: float = 5.0
    breaker_longest_s: float = 60.0

    turn_state_s: float = 600.0

    retry: bool = True
    hedge_after_ms: int = 0
    splice_usage: bool = True
    splice_priority: bool = True
    strip_hints: tuple[Literal["nvext", "priority"], ...] = ()
    splice_session_id: bool | None = None
    splice_continuum: bool = False
    splice_kv_hints: bool = False
    forward_headers: tuple[str, ...] = ()

    capture: Literal["off", "requests", "answers"] = "off"
    capture_directory: str = ""
    capture_models: tuple[str, ...] = ()
    capture_sessions: tuple[str, ...] = ()
    capture_headers: tuple[str, ...] = ()
    capture_redact_secrets: bool = True
    capture_redact: tuple[str, ...] = ()
    capture_bytes: int = 4 * MEBIBYTE
    capture_rows: int = 1024
    capture_held_bytes: int = 128 * MEBIBYTE
    capture_roll_bytes: int = 256 * MEBIBYTE
    capture_roll_age_s: float = 0.0
    capture_keep_segments: int = 0
    capture_keep_bytes: int = 16_384 * MEBIBYTE
    capture_keep_age_s: float = 0.0

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
            "recognise_deadline_ms",
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
            "breaker_open_s",
            "capture_bytes",
            "capture_rows",
            "capture_held_bytes",
            "capture_roll_bytes",
        )
        for key in positive:
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be greater than 0")
        if self.trace_fine_tokens < 0:
            raise ValueError("trace_fine_tokens must not be negative")
        if self.held_comment_s < 0:
            raise ValueError("held_comment_s must not be negative")
        if not 0 <= self.turn_state_s <= MOST_TURN_STATE_S:
            raise ValueError(f"turn_state_s must be between 0 and {MOST_TURN_STATE_S}")
        if self.hedge_after_ms < 0:
            raise ValueError("hedge_after_ms must not be negative")
        if self.hedge_after_ms and not self.retry:
            raise ValueError("hedge_after_ms needs retry: a request that may not be sent again is not sent twice")
        if self.breaker_failures < 0:
            raise ValueError("breaker_failures must not be negative")
        if self.breaker_longest_s < self.breaker_open_s:
            raise ValueError("breaker_longest_s must not be less than breaker_open_s")
        if not 0 <= self.recognise_confidence <= 1:
            raise ValueError("recognise_confidence must be between 0 and 1")
        if not 0 <= self.port <= 65_535:
            raise ValueError("port must be between 0 and 65535")
        if not self.tls_cert and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca need tls_cert")
        if not self.tenant:
            raise ValueError("tenant must not be empty")
        if self.tokenize == "local" and not self.tokenizers:
            raise ValueError("tokenizers must name at least one tokenizer when tokenize is local")
        if self.held_body_bytes < self.body_bytes:
            raise ValueError("held_body_bytes must not be less than body_bytes")
        if self.admit_idle_s > self.admit_deadline_s:
            raise ValueError("admit_idle_s must not exceed admit_deadline_s")
        self._check_salt()
        self._check_capture()

    def _check_salt(self) -> None:
        if self.cache_salt_secret and self.cache_salt_secret_file:
            raise ValueError("cache_salt_secret and cache_salt_secret_file cannot both be set")
        if self.engine_api_key and self.engine_api_key_file:
            raise ValueError("engine_api_key and engine_api_key_file cannot both be set")
        if not (self.engine_api_key.isascii() and self.engine_api_key.isprintable()):
            raise ValueError("engine_api_key must be printable ASCII")
        if self.cache_salt_secret and len(self.cache_salt_secret.encode()) < LEAST_SECRET_BYTES:
            raise ValueError(f"cache_salt_secret must have {LEAST_SECRET_BYTES} bytes or more")
        if self.require_cache_salt and not self.salts:
            raise ValueError("require_cache_salt needs keys_file and splice_cache_salt")
        if self.salts and not (self.cache_salt_secret or self.cache_salt_secret_file):
            raise ValueError(
                "keys_file needs cache_salt_secret_file (32 random bytes, the same at every front door: "
                "`openssl rand -hex 32`), or splice_cache_salt = false: then tenants share the engines' caches"
            )

    def _check_capture(self) -> None:
        if self.capture != "off" and not self.capture_directory:
            raise ValueError("capture_directory must be set where capture is not off")
        for key in ("capture_roll_age_s", "capture_keep_segments", "capture_keep_bytes", "capture_keep_age_s"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be 0 (no limit) or more")
        if self.capture_held_bytes < 2 * self.capture_bytes:
            raise ValueError("capture_held_bytes must be at least twice capture_bytes: a prompt and its answer")
        try:
            HeaderList(self.capture_headers)
        except ValueError as error:
            raise ValueError(f"capture_headers: {error}") from error
        try:
            Redaction(patterns=self.capture_redact)
        except BadPatternError as error:
            raise ValueError(f"capture_redact: {error}") from error

    @property
    def salts(self) -> bool:
        """Whether tenants' prompts are cached apart."""
        return bool(self.keys_file) and self.splice_cache_salt

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach ``host`` and everybody may ask, for want of keys and of an authority that
        clients must be known to."""
        return not self.keys_file and not self.tls_client_ca and self.reachable

    @property
    def keys_in_clear(self) -> bool:
        """Whether keys come from other machines without TLS, as far as we know."""
        return bool(self.keys_file) and not self.tls_cert and self.reachable

    @property
    def reachable(self) -> bool:
        """Whether ``host`` is an address that other machines can reach."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True
