"""Every subject of ``tg.v1`` and the one encoder that turns hostile ids into subject tokens and KV keys.

Letters, digits and ``-`` stand for themselves; so does ``_`` except in a leading ``h_``; every other byte of the
UTF-8 text becomes ``=XX``. The empty id is ``=``. Ids over 128 bytes become ``h_`` + BLAKE2b-128 in hex (the full id
travels in the payload). Tokens are legal in subjects, KV keys and object names alike.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

ROOT = "tg.v1"
MAX_REVERSIBLE_BYTES = 128

TRACE_STREAM = "TG_TRACES"
TRACE_SUBJECTS = f"{ROOT}.trace.>"
MESSAGE_ID = "Nats-Msg-Id"
"""The header by which the stream stores a row once, however often it is sent."""
BUCKET_LEADERS = "TG_LEADERS"
BUCKET_WORKERS = "TG_WORKERS"
BUCKET_STATISTICS = "TG_STATISTICS"
BUCKET_CALIBRATIONS = "TG_CALIBRATIONS"
BUCKET_LEARNED = "TG_LEARNED"
OBJECTS_SNAPSHOTS = "TG_SNAPSHOTS"
SNAPSHOTS_TTL_S = 3600.0
"""Age at which a snapshot goes by itself: those of bridges that never come back would fill the store."""

INDEX_MATCH = f"{ROOT}.index.match"
INDEX_SESSION = f"{ROOT}.index.session"
INDEX_RECOGNISE = f"{ROOT}.index.recognise"

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_ASCII = {code: f"={code:02X}" for code in range(128) if code not in _PLAIN}
_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


def encode_id(text: str) -> str:
    """``text`` as one subject token. Reversible up to 128 bytes, else a 128-bit hash with prefix ``h_``."""
    return _short_id(text) if len(text) <= MAX_REVERSIBLE_BYTES else _encoded(text)


def _encoded(text: str) -> str:
    if text.isascii() and 0 < len(text) <= MAX_REVERSIBLE_BYTES and not text.startswith("h_"):
        token = text.replace("=", "=3D").replace("/", "=2F")
        # Nearly all in a fifth of the time, most others in a tenth.
        return token if _TOKEN.fullmatch(token) else text.translate(_ASCII)
    raw = text.encode("utf-8", "surrogatepass")
    if not raw:
        return "="
    if len(raw) > MAX_REVERSIBLE_BYTES:
        return "h_" + blake2b(raw, digest_size=16).hexdigest()
    token = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in raw)
    return f"=68{token[1:]}" if token.startswith("h_") else token


# A turn's session, model and worker are named in a dozen subjects.
_short_id = lru_cache(maxsize=4_096)(_encoded)


def decode_id(token: str) -> str | None:
    """Inverse of `encode_id`; ``None`` for a hashed id. Raises `ValueError` for what `encode_id` never writes."""
    if token == "=":  # noqa: S105 - the empty id, not a secret
        return ""
    if token.startswith("h_"):
        return None
    raw = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), token.encode("ascii"))
    text = raw.decode("utf-8", "surrogatepass")
    if encode_id(text) != token:
        raise ValueError(f"not an encoded id: {token!r}")
    return text


def worker_state(worker: str) -> str:
    return f"{ROOT}.worker.state.{encode_id(worker)}"


def ingress_state(ingress: str) -> str:
    return f"{ROOT}.ingress.state.{encode_id(ingress)}"


def kv(worker: str, rank: int) -> str:
    return f"{ROOT}.kv.{encode_id(worker)}.{rank}"


def kv_snapshot(worker: str) -> str:
    return f"{ROOT}.kv.snapshot.{encode_id(worker)}"


def pool(name: str) -> str:
    return f"{ROOT}.pool.{encode_id(name)}"


def pool_reset(name: str) -> str:
    return f"{ROOT}.pool.reset.{encode_id(name)}"


def pool_state(name: str) -> str:
    return f"{ROOT}.pool.state.{encode_id(name)}"


def pool_snapshot(name: str) -> str:
    return f"{ROOT}.pool.snapshot.{encode_id(name)}"


def index_source(worker: str, rank: int) -> str:
    return f"{ROOT}.index.source.{encode_id(worker)}.{rank}"


def admit(model: str) -> str:
    return f"{ROOT}.admit.{encode_id(model)}"


def admit_cancel(model: str) -> str:
    return f"{ROOT}.admit.cancel.{encode_id(model)}"


def decision(worker: str) -> str:
    return f"{ROOT}.decision.{encode_id(worker)}"


def placed(worker: str) -> str:
    return f"{ROOT}.placed.{encode_id(worker)}"


def request(event: str, model: str) -> str:
    """``event``: accepted, dispatched, first_token, progress or end."""
    return f"{ROOT}.request.{event}.{encode_id(model)}"


def session(state: str, key_text: str) -> str:
    """``state``: as `schemas.session.SessionFact.state`; ``key_text``: `SessionKey.text`."""
    return f"{ROOT}.session.{state}.{encode_id(key_text)}"


def tool(event: str, key_text: str) -> str:
    return f"{ROOT}.tool.{event}.{encode_id(key_text)}"


def hint(worker: str) -> str:
    return f"{ROOT}.hint.{encode_id(worker)}"


def hint_result(worker: str) -> str:
    return f"{ROOT}.hint.result.{encode_id(worker)}"


def hint_intent(policy: str) -> str:
    """``policy``: the name of the user's policy that publishes it."""
    return f"{ROOT}.hint.intent.{encode_id(policy)}"


def policy(kind: str, name: str) -> str:
    """``kind``: route, admit, lease or hint."""
    return f"{ROOT}.policy.{kind}.{encode_id(name)}"


def trace(event_type: str, model: str, key_text: str) -> str:
    """``event_type``: request_end, tool or decision."""
    return f"{ROOT}.trace.{event_type}.{encode_id(model)}.{encode_id(key_text)}"


def calibration(model: str, profile: str) -> str:
    """A key of `BUCKET_CALIBRATIONS`. ``profile``: as `schemas.calibration.Calibration.profile`."""
    return f"{encode_id(model)}.{encode_id(profile)}"
