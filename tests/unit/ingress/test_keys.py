"""API keys: what a file says, whose key a request brings, and what is never said of either."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.ingress.config import IngressSettings
from services.ingress.errors import InvalidKeyError, KeysFileError
from services.ingress.keys import Key, Keyring, allowed, digest, presented_key, read_keys

SECRET = "abcdefghijklmnopqrstuvwxyz234567"
ACME = f"tg_acme01_{SECRET}"
OTHER = f"tg_other1_{SECRET}"


def line(key: str = ACME, /, **members: Any) -> bytes:
    entry = {"id": key.split("_")[1], "sha256": digest(key), "tenant": "acme", **members}
    return json.dumps(entry).encode()


def test_a_file_of_keys() -> None:
    """Comments, blank lines, a mark at the front and Windows' ends of lines are no entries; every member is read."""
    limits: dict[str, Any] = {
        "models": ["sim-*"],
        "requests_per_s": 2.5,
        "burst": 5,
        "tokens_per_min": 60_000,
        "expires_at": 100,
    }
    data = b"\xef\xbb\xbf# ours\r\n\r\n" + line(name="CI", **limits) + b"\r\n" + line(OTHER, tenant="o.1-x_y") + b"\n"
    ring = read_keys(data)
    assert [key.id for key in ring] == ["acme01", "other1"]
    found = ring.find(ACME, 99.9)
    assert (found.tenant, found.name, found.requests_per_s, found.burst) == ("acme", "CI", 2.5, 5)
    assert (found.may_use("sim-8b"), found.may_use("sim"), ring.find(OTHER, 0).may_use("any")) == (True, False, True)
    assert allowed(["a", "sim-1"], found) == ["sim-1"]
    with pytest.raises(InvalidKeyError, match="expired"):
        ring.find(ACME, 100)
    assert list(read_keys(b"")) == []


@pytest.mark.parametrize(
    ("data", "number", "rule"),
    [
        (b"\n{", 2, "is not a JSON object"),
        (line() + b"\n" + line(), 2, "id acme01 is there twice"),
        (line(tenants="a"), 1, "unknown field `tenants`"),
        (line(ACME, **{ACME: 1}), 1, "unknown field `tg_...`"),
        (line(tenant=""), 1, "tenant must"),
        (line(tenant="a/b"), 1, "tenant must"),
        (line(tenant="é"), 1, "tenant must"),
        (line(sha256="00"), 1, "sha256 must"),
        (line(id="A_b"), 1, "id must"),
        (line(models=[""]), 1, "models must"),
        (line(requests_per_s=0), 1, "requests_per_s must"),
        (line(requests_per_s="2"), 1, "Expected `float | null`, got `str`"),
        (line(burst=2), 1, "burst needs requests_per_s"),
        (line(requests_per_s=1, burst=0), 1, "burst must"),
        (line(tokens_per_min=-1), 1, "tokens_per_min must"),
        (b"\xff", 1, "is not a JSON object"),
        (b"[" * 100_000, 1, "Expected `object`"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_of_it_shown(data: bytes, number: int, rule: str) -> None:
    """Line and rule; a key that somebody wrote there in full is in no error."""
    with pytest.raises(KeysFileError) as caught:
        read_keys(data)
    assert caught.value.line == number
    assert rule in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "tg_",
        "tg_acme01_",
        f"tg_acme01_{SECRET}x",
        f"tg_acme01_{SECRET[:-1]}",
        f"tg_other1_{SECRET}",
        f"TG_acme01_{SECRET}",
        f"tg_acme01_{SECRET.upper()}",
        f"tg_acme01_{SECRET}\n",
        f"tg_nobody_{SECRET}",
        digest(ACME),
        f"tg_acme01_{digest(ACME)}",
        "tg_acme01_" + "a" * 10_000,
        "tg_acme01_\udcff",
        "tg_acmé01_" + SECRET,
    ],
)
def test_only_the_whole_key_opens(key: str) -> None:
    """No part of it, no other spelling, not what the file holds; the error says nothing of it."""
    with pytest.raises(InvalidKeyError) as caught:
        Keyring([Key(id="acme01", sha256=digest(ACME), tenant="acme")]).find(key, 0.0)
    assert str(caught.value) == "The API key is not valid."


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([("authorization", f"Bearer {ACME}")], ACME),
        ([("AUTHORIZATION", f"bearer   {ACME} ")], ACME),
        ([("X-Api-Key", ACME)], ACME),
        ([("api-key", ACME)], ACME),
        ([("x-api-key", "sk-dummy"), ("authorization", f"Bearer {ACME}")], ACME),
        ([("x-api-key", ACME), ("authorization", f"Bearer {ACME}")], ACME),
        ([("x-api-key", ACME), ("authorization", f"Bearer {OTHER}")], "Two different"),
        ([("x-api-key", ACME), ("x-api-key", OTHER)], "Two different"),
        ([("authorization", f"Basic {ACME}")], "No API key"),
        ([("authorization", ACME)], "No API key"),
        ([("x_api_key", ACME)], "No API key"),
        ([("x-tidegate-key", ACME), ("cookie", ACME)], "No API key"),
        ([("authorization", "Bearer ")], "No API key"),
        ([("authorization", "Bearer sk-other")], "not valid"),
    ],
)
def test_where_a_key_is_looked_for(headers: list[tuple[str, str]], found: str) -> None:
    """In the headers of the official clients; two of ours that differ are refused, nobody chooses between them."""
    raw = [(name.encode(), value.encode()) for name, value in headers]
    if found in (ACME, OTHER):
        assert presented_key(raw) == found
        return
    with pytest.raises(InvalidKeyError, match=found) as caught:
        presented_key(raw)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keys_file": "k"}, "keys_file needs cache_salt_secret_file"),
        ({"keys_file": "k", "cache_salt_secret": "short"}, "16 bytes or more"),
        ({"keys_file": "k", "cache_salt_secret": "a" * 16, "cache_salt_secret_file": "f"}, "cannot both be set"),
        ({"require_cache_salt": True}, "require_cache_salt needs keys_file"),
    ],
)
def test_settings_that_would_not_keep_tenants_apart(settings: dict[str, Any], said: str) -> None:
    """Whoever sets keys says with which secret tenants' caches are kept apart, or that they are not."""
    with pytest.raises(ValueError, match=said):
        IngressSettings(instance="i", **settings)
    assert not IngressSettings(instance="i", host="0.0.0.0", keys_file="k", splice_cache_salt=False).exposed
