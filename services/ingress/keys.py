"""API keys: what a keys file says, and whose key a request brings (docs/security.md, docs/adr/0025).

A key is ``tg_<id>_<secret>``: the id is public and finds the entry, the secret is 256 random bits. The file holds the
SHA-256 of the whole key: of a guess among 2^256 nothing is won by a slow hash, and one that is quick can be checked for
every request. Digests are compared in constant time, also where no entry has the id.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.errors import InvalidKeyError, KeysFileError
from web.headers import Headers

PREFIX = "tg_"
MOST_KEY_BYTES = 256
MOST_KEYS = 100_000
CREDENTIAL_HEADERS = (b"authorization", b"x-api-key", b"api-key")
"""Where clients put keys: OpenAI's and Anthropic's, and Azure's spelling."""

_KEY = re.compile(r"tg_([a-z0-9]{4,32})_([A-Za-z0-9_-]{16,200})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[a-z0-9]{4,32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOBODY = "0" * 64
_MISSING = "No API key was given. Send one as 'Authorization: Bearer tg_...' or 'x-api-key: tg_...'."
_WRONG = "The API key is not valid."


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry, a line of the file.

    ``id``: the public part. ``sha256``: of the whole key, in hex. ``name``: for people. ``models``: those that it may
    use, a trailing ``*`` stands for any ending; empty: all. ``requests_per_s`` on average, ``burst`` at once (unset:
    what a second allows, at least one). ``tokens_per_min``: of prompts and answers, on average. ``expires_at``: Unix
    seconds.
    """

    id: str
    sha256: str
    tenant: str
    name: str = ""
    models: tuple[str, ...] = ()
    requests_per_s: float | None = None
    burst: int | None = None
    tokens_per_min: int | None = None
    expires_at: int | None = None

    def may_use(self, model: str) -> bool:
        """Whether the list of models has it."""
        return not self.models or any(
            model.startswith(one[:-1]) if one.endswith("*") else model == one for one in self.models
        )


_decoder = msgspec.json.Decoder(Key)


class Keyring:
    """The keys of one file."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys: Mapping[str, Key] = {key.id: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, presented: str, now: float) -> Key:
        """The entry of a key that a client brought, at Unix time ``now`` (s). Raises `InvalidKeyError`."""
        said = _KEY.fullmatch(presented) if len(presented) <= MOST_KEY_BYTES else None
        key = self._keys.get(said[1]) if said is not None else None
        known = hmac.compare_digest(digest(presented), key.sha256 if key is not None else _NOBODY)
        if key is None or not known:
            raise InvalidKeyError(_WRONG)
        if key.expires_at is not None and now >= key.expires_at:
            raise InvalidKeyError("The API key has expired.")
        return key


def digest(key: str) -> str:
    """What the file holds of a key: its SHA-256 in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def presented_key(headers: Headers) -> str:
    """The one key of ours that a request brings; credentials of another form beside it are passed over (harnesses
    send one in each header). Raises `InvalidKeyError` for none, and for two that differ."""
    found = {text for text in _credentials(headers) if text.startswith(PREFIX)}
    if len(found) > 1:
        raise InvalidKeyError("Two different API keys were given.")
    if not found:
        raise InvalidKeyError(_WRONG if any(_credentials(headers)) else _MISSING)
    return found.pop()


def _credentials(headers: Headers) -> Iterator[str]:
    for name, raw in headers:
        lower = name.lower()
        if lower not in CREDENTIAL_HEADERS:
            continue
        value = raw.strip(b" \t").decode("latin-1")
        if lower == b"authorization":
            scheme, _, value = value.partition(" ")
            value = value.strip() if scheme.lower() == "bearer" else ""
        if value:
            yield value


def read_keys(data: bytes) -> Keyring:
    """The keys of a file: a JSON object a line; blank lines and those that begin with ``#`` are passed over.

    Raises `KeysFileError` naming the line and the rule; then nothing of the file counts.
    """
    keys: dict[str, Key] = {}
    for number, line in entries(data):
        if len(keys) >= MOST_KEYS:
            raise KeysFileError(number, f"more than {MOST_KEYS} keys")
        key = _read(number, line)
        if key.id in keys:
            raise KeysFileError(number, f"id {key.id} is there twice")
        keys[key.id] = key
    return Keyring(keys.values())


def entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and text of every line that is an entry."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        text = line.strip()
        if text and not text.startswith(b"#"):
            yield number, text


def _read(number: int, line: bytes) -> Key:
    try:
        key = _decoder.decode(line)
    except UNDECODABLE as error:
        raise KeysFileError(number, _problem(error)) from error
    checks = (
        (_ID.fullmatch(key.id), "id must be 4 to 32 lower-case letters and digits"),
        (_DIGEST.fullmatch(key.sha256), "sha256 must be 64 hex digits in lower case"),
        (_TENANT.fullmatch(key.tenant), "tenant must be 1 to 64 letters, digits, '.', '_' or '-'"),
        (all(key.models), "models must not hold an empty name"),
        (key.requests_per_s is None or 0 < key.requests_per_s <= 1e6, "requests_per_s must be over 0, at most 1e6"),
        (key.burst is None or key.burst > 0, "burst must be greater than 0"),
        (key.burst is None or key.requests_per_s is not None, "burst needs requests_per_s"),
        (key.tokens_per_min is None or 0 < key.tokens_per_min <= 10**12, "tokens_per_min must be over 0, at most 1e12"),
    )
    for holds, rule in checks:
        if not holds:
            raise KeysFileError(number, rule)
    return key


def _problem(error: Exception) -> str:
    """msgspec's sentence, never with a byte of the line: somebody may have written a key there."""
    if isinstance(error, msgspec.ValidationError):
        return re.sub(r"tg_\w+", "tg_...", str(error).replace(" - at `$.", " at `"))
    return "is not a JSON object"


def allowed(models: Collection[str], key: Key | None) -> list[str]:
    """Those of ``models`` that a key may use; without keys: all."""
    return [model for model in models if key is None or key.may_use(model)]
