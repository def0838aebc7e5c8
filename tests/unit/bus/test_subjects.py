"""Ids as tokens: reversible, legal everywhere, and never two ids in one token. And every subject is in the catalog."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bus import subjects
from bus.validation import check_publish_subject, subject_matches
from schemas.catalog import CHANNELS, channel_of

_TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
ANY_TEXT = st.text(st.characters(codec=None), max_size=200)


@given(ANY_TEXT)
@example("")
@example("h_x")
@example("h_" + "0" * 32)
@example("=")
@example("=68_x")
@example("*")
@example(">")
@example("a.b")
@example("with space\r\n")
@example("research-run-42:researcher")
@example("é\U0001f642")
@example("\ud800")
@example("x" * 4096)
@example("x" * 128)
@example("x" * 129)
def test_an_id_is_one_legal_token_and_comes_back(text: str) -> None:
    """Letters, digits, ``-``, ``_`` and ``=`` only; up to 128 bytes it decodes to itself, beyond it is a hash."""
    token = subjects.encode_id(text)
    assert _TOKEN.fullmatch(token)
    check_publish_subject(token)
    if len(text.encode("utf-8", "surrogatepass")) <= subjects.MAX_REVERSIBLE_BYTES:
        assert subjects.decode_id(token) == text
        assert len(token) <= 3 * 128 + 2
    else:
        assert subjects.decode_id(token) is None
        assert re.fullmatch(r"h_[0-9a-f]{32}", token)


@given(ANY_TEXT, ANY_TEXT)
def test_two_ids_never_share_a_token(one: str, other: str) -> None:
    """Also not an id that looks like another's encoding or hash."""
    assert (subjects.encode_id(one) == subjects.encode_id(other)) == (one == other)
    token = subjects.encode_id(one)
    assert (subjects.encode_id(token) == token) == (one == token)


@pytest.mark.parametrize("token", ["=6", "=zz", "=6a", "=61", "a b", "é", "a.b", "=ED=A0", "=68"])
def test_what_was_never_encoded_does_not_decode(token: str) -> None:
    """Lower-case hex, needless escapes, halves of characters: a token has one spelling."""
    with pytest.raises(ValueError, match=r"encoded id|surrogates|can't"):
        subjects.decode_id(token)


SUBJECTS = {
    "worker_state": subjects.worker_state("w"),
    "ingress_state": subjects.ingress_state("i"),
    "kv": subjects.kv("w", 3),
    "kv_snapshot": subjects.kv_snapshot("w"),
    "index_source": subjects.index_source("w", 0),
    "index_match": subjects.INDEX_MATCH,
    "index_session": subjects.INDEX_SESSION,
    "admit": subjects.admit("m"),
    "admit_cancel": subjects.admit_cancel("m"),
    "decision": subjects.decision("w"),
    "placed": subjects.placed("w"),
    "request_accepted": subjects.request("accepted", "m"),
    "request_dispatched": subjects.request("dispatched", "m"),
    "request_first_token": subjects.request("first_token", "m"),
    "request_progress": subjects.request("progress", "m"),
    "request_end": subjects.request("end", "m"),
    "session": subjects.session("opened", "a/b/c/"),
    "tool": subjects.tool("start", "a/b/c/"),
    "hint": subjects.hint("w"),
    "hint_result": subjects.hint_result("w"),
    "hint_intent": subjects.hint_intent("p"),
    "policy_hint": subjects.policy("hint", "p"),
    "pool": subjects.pool("p"),
    "pool_reset": subjects.pool_reset("p"),
    "pool_state": subjects.pool_state("p"),
    "pool_snapshot": subjects.pool_snapshot("p"),
    "index_recognise": subjects.INDEX_RECOGNISE,
    "policy_route": subjects.policy("route", "p"),
    "policy_admit": subjects.policy("admit", "p"),
    "policy_lease": subjects.policy("lease", "p"),
    "trace": subjects.trace("request_end", "m", "a/b/c/"),
}


def test_every_subject_is_in_the_catalog() -> None:
    """What `bus.subjects` makes and what `schemas.catalog` (and so asyncapi.yaml) says are the same set."""
    assert {channel.name for channel in CHANNELS} == set(SUBJECTS)
    for name, subject in SUBJECTS.items():
        channel = channel_of(subject)
        assert channel is not None
        assert channel.name == name
        assert subject_matches(channel.pattern, subject)
    assert channel_of("tg.v1.unknown.x") is None
    assert channel_of("tg.v2.decision.x") is None


def test_snapshot_is_the_one_overlap() -> None:
    """``tg.v1.kv.*.*`` also sees the snapshot question; no other pattern takes another channel's subject."""
    for channel in CHANNELS:
        taken = {name for name, subject in SUBJECTS.items() if subject_matches(channel.pattern, subject)}
        expected = {channel.name} | ({"kv_snapshot"} if channel.name == "kv" else set())
        assert taken == expected
