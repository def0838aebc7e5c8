"""APIs that are passed on as they come: embeddings, tokens, and whatever else an engine serves below ``/v1``.

Of a body only the model is read; nothing is put into it. Who decides where it goes is admission, by load: there is no
chain to look for, and no session that it would move. Tokenizers compute nothing, so they go anywhere, unasked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qs

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.decoding import no_json
from services.ingress.endpoints import ClientRequest, Endpoint
from services.ingress.errors import BadRequestError
from services.ingress.identity import BodyFacts
from services.ingress.modalities import TEXT_ONLY, Media

_PATHS: dict[str, Endpoint] = {
    "/v1/embeddings": "embeddings",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Of an API that is not known; the known ones take POST."""

CLOSED = frozenset({"load_lora_adapter", "unload_lora_adapter"})
"""What changes an engine for everybody: for its operator only, at the engine itself."""

_PLAIN = re.compile(r"/v1/([A-Za-z0-9_-][A-Za-z0-9_.~:-]*)(?:/[A-Za-z0-9_~:-][A-Za-z0-9_.~:-]*)*")
"""No escapes, no dots that lead elsewhere, nothing empty: engines and proxies read it the same."""

_FIELD = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]*[; ]name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n', re.IGNORECASE
)
_MOST_NAME = 1024


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def passed_api(path: str) -> Endpoint | None:
    """Which of them a request target asks for, its query ignored."""
    path = path.partition("?")[0]
    known = _PATHS.get(path)
    if known is not None:
        return known
    plain = _PLAIN.fullmatch(path)
    return "passthrough" if plain is not None and plain[1] not in CLOSED else None


def read_passed(endpoint: Endpoint, method: str, query: str, body: bytes, models: Sequence[str]) -> ClientRequest:
    """One request. Its model is named in the JSON body, in a field of a form, or in the query; where it is not, it is
    the only one of ``models``, which the sender may use. Raises `BadRequestError`."""
    is_json = not body or body.lstrip()[:1] == b"{"
    model = (_in_json(body) if is_json else _in_form(body)) or _in_query(query)
    if model is None:
        if len(models) != 1:
            raise BadRequestError("model: must be named: it says which engines this is for", param="model")
        model = models[0]
    return ClientRequest(
        endpoint=endpoint,
        method=method,
        model=model,
        body=body,
        facts=BodyFacts(),
        prompt=None,
        media=TEXT_ONLY if is_json else Media(("file",), 1, len(body)),
    )


def _in_json(body: bytes) -> str | None:
    if not body:
        return None
    try:
        return _named.decode(body).model or None
    except msgspec.ValidationError as error:
        raise BadRequestError("model: must be a text", param="model") from error
    except UNDECODABLE as error:
        raise BadRequestError(no_json(body, error), reason="bad_json") from error


def _in_form(body: bytes) -> str | None:
    """Of ``multipart/form-data``, as uploads of sound and pictures are."""
    found = set()
    for field in _FIELD.finditer(body):
        value = body[field.end() : field.end() + _MOST_NAME].partition(b"\r\n")[0]
        found.add(value.decode("utf-8", "replace").strip())
    found.discard("")
    if len(found) > 1:
        raise BadRequestError("model: is named more than once", param="model")
    return found.pop() if found else None


def _in_query(query: str) -> str | None:
    try:
        found = parse_qs(query, max_num_fields=64).get("model", [])
    except ValueError:
        return None
    if len(set(found)) > 1:
        raise BadRequestError("model: is named more than once", param="model")
    return found[0] if found else None
