"""Salts of tenants: nobody's can be computed or hit by another (spec: user-cases F2), on every path."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.effects import Forward
from services.ingress.endpoints import PATHS, Endpoint, endpoint_of, read_request
from services.ingress.salt import tenant_salt
from services.ingress.shell.attempt import Splices, spliced_body

SECRET = b"0123456789abcdef"
TEXTS = st.text(max_size=6)


@given(st.tuples(TEXTS, st.none() | TEXTS), st.tuples(TEXTS, st.none() | TEXTS))
def test_no_two_namespaces_meet(one: tuple[str, str | None], other: tuple[str, str | None]) -> None:
    """F2: salts are equal exactly where tenant and client's salt are; 'ab' with 'c' is not 'a' with 'bc'."""
    assert (tenant_salt(SECRET, *one) == tenant_salt(SECRET, *other)) == (one == other)


def test_a_salt_needs_the_secret() -> None:
    """Another secret gives other salts, however long it is; one salt is written down, since it must never change."""
    assert tenant_salt(SECRET, "acme") == tenant_salt(SECRET, "acme") != tenant_salt(SECRET + b"x", "acme")
    assert len({tenant_salt(b"s" * length, "acme") for length in (16, 64, 65, 200)}) == 4
    assert len({tenant_salt(SECRET, *pair) for pair in [("ab", "c"), ("a", "bc"), ("abc", ""), ("abc", None)]}) == 4
    assert tenant_salt(SECRET, "acme") == "5fe408e07bb46da109ee574f270bb636"


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b',"cache_salt":"theirs"',
        b',"cache_salt":"a","c\\u0061che_salt":"b"',
        b',"cache_salt":null',
        b',"cache_salt":{"x":1}',
        b',"nvext":{"cache_salt":"theirs","annotations":["x"]}',
        b',"nv\\u0065xt":{"cache\\u005fsalt":"theirs"},"cache_salt":""',
    ],
)
def test_the_clients_salt_never_reaches_an_engine(path: str, said: bytes) -> None:
    """F2, CVE-2025-46570: whatever a client says in whatever spelling, every reader of the body finds ours; nothing
    else of the body is touched."""
    endpoint: Endpoint | None = endpoint_of(path)
    assert endpoint is not None
    prompt = b'"prompt":"p","input":"i","messages":[{"role":"user","content":" cache_salt "}]'
    body = b'{"model":"m",%b%b}' % (prompt, said)
    request = replace(read_request(endpoint, body), tenant_salt="ours")
    assert (request.nvext_salt is None) == (b"nv" not in said)
    step = Forward("r", 0, "w", "http://w", 0, 1, None)
    sent, _ = spliced_body(request, Splices(usage=False), step)
    pairs = json.loads(sent, object_pairs_hook=list)
    assert {value for name, value in pairs if name == "cache_salt"} == {"ours"}
    assert [value for name, value in pairs if name == "nvext"] in (
        [],
        [[["cache_salt", "ours"]]],
        [[["cache_salt", "ours"], ["annotations", ["x"]]]],
        [[("cache_salt", "ours")]],
        [[("cache_salt", "ours"), ("annotations", ["x"])]],
    )
    assert prompt in sent
    assert b"theirs" not in sent
