"""The kinds of cases: each takes random numbers, and raises when what it tries goes wrong."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any, get_args

from services.ingress.decoding import unpacked
from services.ingress.endpoints import PATHS, Endpoint, read_request
from services.ingress.errors import IngressError, InvalidKeyError, KeysFileError, MisuseError, RequestError
from services.ingress.identity import FAMILIES, BodyFacts, read_headers, resolve
from services.ingress.keys import digest, presented_key, read_keys
from services.ingress.splice import members, set_member
from services.ingress.turn_state import TurnStates
from tests.support.hostile import HOSTILE
from tests.unit.ingress.test_sse import LINES, run
from tests.unit.web.test_server_connection import SERVED, fed

ENDPOINTS = tuple(endpoint for endpoint in get_args(Endpoint) if endpoint in PATHS.values())
STATES = TurnStates(b"a secret of sixteen bytes", 60.0)
LIMIT = 20_000
_WORDS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b"\t", b" ", b":", b",", b"0", b"-", b"+", b"0x", b"\xff", b"\xe2\x80\xa8"),
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b"1e999", b"null"),
    *(b"chunked", b"content-length: 3", b"expect: 100-continue", b"upgrade: h2c"),
)


def damaged(random: Random, data: bytes) -> bytes:
    """``data`` after a few accidents: bytes changed, put in, taken out, told twice, cut off."""
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        at = random.randint(0, len(data))
        end = min(len(data), at + random.choice((0, 1, 1, 3, 20)))
        put = random.choice((random.choice(_WORDS), random.randbytes(random.randint(0, 4)), data[at:end] * 2, b""))
        data = data[:at] + put + data[end:]
        if random.random() < 0.05:
            data = data[:at]
    return data


def cut(random: Random, data: bytes) -> list[bytes]:
    """``data`` in random pieces, sometimes byte by byte."""
    if random.random() < 0.2:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted({0, len(data), *(random.randint(0, len(data)) for _ in range(random.randint(0, 6)))})
    return [data[start:end] for start, end in pairwise(places)]


def value(random: Random, depth: int = 3) -> Any:
    """Some JSON."""
    kind = random.randint(0, 9 if depth else 6)
    if kind <= 6:
        return random.choice((None, True, -1, 2**70, 1.5, "", text(random)))
    if kind == 7:
        return [value(random, depth - 1) for _ in range(random.randint(0, 3))]
    return {text(random): value(random, depth - 1) for _ in range(random.randint(0, 3))}


def text(random: Random) -> str:
    return "".join(random.choice('ab"\\{}[],:/\u2028é😀\0\n\x7f ') for _ in range(random.randint(0, 6)))


def chat(random: Random) -> dict[str, Any]:
    """Something like a request, of whatever API."""
    said = {
        "model": random.choice(("m", "", 7, None)) if random.random() < 0.2 else "m",
        "messages": [{"role": "user", "content": value(random)} for _ in range(random.randint(0, 3))],
        "prompt": random.choice(("hello", [1, 2], [[1], [2]], value(random))),
        "input": random.choice(("hello", [{"role": "user", "content": value(random)}])),
        "stream": random.choice((True, False, None)),
        "stream_options": value(random),
        "metadata": value(random),
        "tools": value(random),
    }
    return {name: said[name] for name in said if random.random() < 0.8} | {text(random): value(random)}


def http(random: Random) -> None:
    """The server's parser: any pieces are answered as the whole is, junk is refused, nothing is raised."""
    wires = [random.choice(SERVED) for _ in range(random.randint(0, 2))]
    wires.append(random.choice([*SERVED, *(hostile.wire for hostile in HOSTILE if len(hostile.wire) < 2000)]))
    wire = damaged(random, b"".join(wires))
    whole, pieces = asyncio.run(fed([wire])), asyncio.run(fed(cut(random, wire)))
    assert whole == pieces, (whole, pieces)


def sse(random: Random) -> None:
    """An engine's stream: any pieces give what the whole gives, and every byte passes but those that are kept back."""
    end = random.choice((b"\n", b"\r\n", b"\r"))
    lines = [random.choice(LINES).encode() for _ in range(random.randint(0, 12))]
    stream = damaged(random, b"".join(line + random.choice((end, end, end, b"\n")) for line in lines))
    pieces, strip = cut(random, stream), random.random() < 0.5
    assert run(pieces, strip=strip) == run([stream], strip=strip)
    assert run(pieces, strip=False)[0] == stream


def spliced(random: Random) -> None:
    """What is put into a body is there, alone; of everything else not a byte is changed, and JSON stays JSON."""
    body = chat(random)
    raw = json.dumps(body, ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, 1))).encode()
    raw = damaged(random, raw) if random.random() < 0.5 else raw
    name = random.choice((*body, "priority", "cache_salt", text(random)))
    if not _served(raw):
        with suppress(MisuseError):
            set_member(raw, (name,), b'{"ours":1}')
        return
    after = set_member(raw, (name,), b'{"ours":1}')
    assert dict(_pairs(after)) == dict(_pairs(raw)) | {name: {"ours": 1}}
    untouched = [raw[one.start : one.end] for one in members(raw) if one.name != name]
    assert [after[one.start : one.end] for one in members(after) if one.name != name] == untouched


def _pairs(raw: bytes) -> Sequence[tuple[str, Any]]:
    """The members of an object in order, each as often as it is there."""
    found = json.loads(raw.decode(), object_pairs_hook=lambda pairs: pairs)
    if not isinstance(found, list):
        raise TypeError("no object")
    return [(name, json.loads(json.dumps(_plain(each)))) for name, each in found]


def _plain(found: Any) -> Any:
    """Objects that were read as lists of pairs, as objects again."""
    if isinstance(found, list) and found and all(isinstance(each, tuple) for each in found):
        return {name: _plain(each) for name, each in found}
    return [_plain(each) for each in found] if isinstance(found, list) else found


def _served(raw: bytes) -> bool:
    """Whether it is a request: nothing else is ever spliced."""
    try:
        read_request("chat_completions", raw)
    except RequestError:
        return False
    return True


def request(random: Random) -> None:
    """Whatever a body says, it is read or refused by name; then its sender is known by some identity."""
    endpoint = random.choice(ENDPOINTS)
    raw = damaged(random, json.dumps(chat(random)).encode("utf-8", "surrogatepass"))
    try:
        asked = read_request(endpoint, raw, prompt_bytes=random.choice((None, 50)))
    except RequestError as error:
        assert error.status == 400
        return
    assert asked.body == raw
    resolve({}, asked.facts, endpoint, request_id="r")


def identity(random: Random) -> None:
    """Headers of any bytes: an identity whose parts are printable, or that of the request itself."""
    names = [name for family in FAMILIES for name in (*family.root, family.agent, family.parent) if name]
    names += ["x-codex-turn-metadata", "x-tidegate-session-final", "x-tidegate-background"]
    headers = [
        (random.choice(names).encode().title(), damaged(random, random.choice((b"a", b"", b'{"thread_id":"t"}'))))
        for _ in range(random.randint(0, 5))
    ]
    found = resolve(read_headers(headers), BodyFacts(), random.choice(ENDPOINTS), request_id="r").identity
    assert found.session_id
    assert found.session_id.isascii()
    assert found.session_id.isprintable()
    assert found.key.tenant == "default"


def turn_state(random: Random) -> None:
    """A token of ours says what was put in, to its own session and in time; a changed one says nothing."""
    worker, session, now = f"worker-{random.randint(0, 9)}", text(random), float(random.randint(0, 10**9))
    token = STATES.make(worker, session, now).decode()
    assert STATES.read(token, session, now) == worker
    other = damaged(random, token.encode()).decode("latin-1")
    assert STATES.read(other, session, now) in (None, worker)
    assert STATES.read(token, session + "x", now) is None
    assert STATES.read(token, session, now + 61) is None


def keys(random: Random) -> None:
    """A keys file is read or refused with its line and rule; neither error nor entry ever shows a key."""
    secret = "".join(random.choice("abcXYZ012_-") for _ in range(40))
    key = f"tg_{random.choice(('acme', 'bees'))}_{secret}"
    lines = [
        json.dumps({"id": "acme", "sha256": digest(key), "tenant": "acme", "requests_per_s": value(random, 0)}),
        json.dumps({"id": "bees", "sha256": digest(key), "tenant": text(random), "models": value(random, 1)}),
        json.dumps({"id": "more", "sha256": digest(key), "tenant": "t"}),
        f"# {key}",
        key,
    ]
    data = damaged(random, "\n".join(random.sample(lines, random.randint(0, 4))).encode())
    try:
        ring = read_keys(data)
    except KeysFileError as error:
        assert secret not in str(error)
        return
    try:
        ring.find(damaged(random, key.encode()).decode("latin-1"), 0.0)
    except InvalidKeyError as error:
        assert secret not in str(error)


def credentials(random: Random) -> None:
    """Whatever credentials a request brings: one key, or an error that does not show it."""
    places = (b"authorization", b"Authorization", b"x-api-key", b"api-key", b"cookie")
    key = b"tg_acme_0123456789abcdef0123"
    headers = [
        (random.choice(places), damaged(random, random.choice((b"Bearer ", b"bearer", b"Basic ", b"")) + key))
        for _ in range(random.randint(0, 4))
    ]
    try:
        assert presented_key(headers).startswith("tg_")
    except InvalidKeyError as error:
        assert "0123456789abcdef" not in str(error)


def packed(random: Random) -> None:
    """A gzip body comes out as it went in, or not at all, and never larger than it may be."""
    plain = random.randbytes(random.randint(0, 200)) * random.choice((1, 1, 50, 2000))
    body = damaged(random, gzip.compress(plain, mtime=0))
    try:
        found = unpacked(body, LIMIT)
    except IngressError:
        return
    assert len(found) <= LIMIT


KINDS: dict[str, Callable[[Random], None]] = {
    "http": http,
    "sse": sse,
    "splice": spliced,
    "request": request,
    "identity": identity,
    "turn_state": turn_state,
    "keys": keys,
    "credentials": credentials,
    "packed": packed,
}


def run_case(kind: str, number: int) -> None:
    """One case, always the same."""
    KINDS[kind](Random(f"{kind}/{number}"))
