"""Secrets are found in every form in which they reach a file, and nothing else is touched."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ingress.redaction import HIDDEN, BadPatternError, Redaction

OPENAI = "sk-proj-Ab3dEf6hIj9kLm2nOp5qRs8t"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7bq9\nq1C0/+==\n-----END RSA PRIVATE KEY-----"
NET = Redaction()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"export OPENAI_API_KEY={OPENAI} now", f"export OPENAI_API_KEY={HIDDEN} now"),
        ("curl -H 'Authorization: Bearer abcdefghijklmnop1234'", f"curl -H 'Authorization: Bearer {HIDDEN}'"),
        ("authorization: Basic dXNlcjpwYXNzd29yZA==", f"authorization: Basic {HIDDEN}"),
        ("id AKIAIOSFODNN7EXAMPLE.", f"id {HIDDEN}."),
        (
            "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
            f"aws_secret_access_key = {HIDDEN}",
        ),
        (f"a\n{PEM}\nb", f"a\n{HIDDEN}\nb"),
        (PEM[:60].replace("\n", "\\n"), HIDDEN),
        ("ghp_" + "a1" * 18, HIDDEN),
        ("key tg_k3vq7a2m_" + "a1-_" * 13, f"key {HIDDEN}"),
        ("postgres://app:hunter22@db:5432/x", f"postgres://app:{HIDDEN}@db:5432/x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-_d", HIDDEN),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, kept: str) -> None:
    """Alone, and escaped once more as in the arguments of a tool call."""
    assert NET.text(text) == kept
    arguments = json.dumps({"cmd": text})
    assert HIDDEN in NET.text(arguments)
    assert OPENAI not in NET.text(arguments)


@pytest.mark.parametrize(
    "text",
    [
        "the task-manager-with-a-very-long-name and sk-fading-circle-container",
        "https://example.org:8080/path?x=1@2",
        "a bearer of bad news",
        "the header Authorization: is needed",
        "-----BEGIN CERTIFICATE-----",
        "risk-1234567890123456789012345",
    ],
)
def test_what_does_not_is_left(text: str) -> None:
    """The very same object: nothing is built where there is nothing to hide."""
    assert NET.text(text) is text


def test_patterns_of_the_operator() -> None:
    """Each hides what it finds, or its group where that took part; one that cannot work is refused."""
    own = Redaction(secrets=False, patterns=(r"\b\d{4}-\d{4}\b", r"name: (\w+)|surname"))
    assert own.text(f"1234-5678, name: Ada surname {OPENAI}") == f"{HIDDEN}, name: {HIDDEN} {HIDDEN} {OPENAI}"
    for pattern in ("(", "a*"):
        with pytest.raises(BadPatternError):
            Redaction(patterns=(pattern,))


def test_a_document_without_secrets_is_the_clients_own_bytes() -> None:
    """Not decoded and encoded again: numbers, blanks, order and repeated names stay."""
    body = b'{ "a" : 1.50, "a":2, "text":"\\u0041 b" }'
    assert NET.document(body) is body


def test_a_document_with_a_secret() -> None:
    """In values at any depth, behind escapes of JSON, in names; what spells the text token by token goes too."""
    spelled = OPENAI.replace("s", "\\u0073", 1).replace("-", "\\u002d", 1)
    body = '{"messages":[{"content":[{"text":"x %s"}]}],"env":{"%s":"y"},"n":1,"logprobs":{"content":[1]}}'
    kept = json.loads(NET.document((body % (spelled, OPENAI)).encode()))
    assert kept == {
        "messages": [{"content": [{"text": f"x {HIDDEN}"}]}],
        "env": {HIDDEN: "y"},
        "n": 1,
        "logprobs": None,
    }


def chat_event(text: str, index: int = 0, **members: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": index, "delta": {"content": text}, **members}]}


def tool_event(arguments: str, index: int) -> dict[str, Any]:
    call = {"index": index, "function": {"arguments": arguments}}
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}


def messages_event(text: str, index: int = 0) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}


def responses_event(text: str, index: int = 0) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "item_id": "m", "output_index": index, "delta": text}


def completions_event(text: str, index: int = 0) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"index": index, "text": text}]}


def stream(*documents: dict[str, Any], end: bytes = b"\n\n") -> bytes:
    lines = [b"data: " + json.dumps(document).encode() for document in documents]
    return b"".join(line + end for line in [*lines, b"data: [DONE]"])


EVENTS = [chat_event, tool_event, messages_event, responses_event, completions_event]


@pytest.mark.long
@given(
    which=st.sampled_from(EVENTS),
    cuts=st.lists(st.integers(1, 60), max_size=8),
    end=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]),
)
@settings(max_examples=60)
def test_a_secret_in_pieces(which: Any, cuts: list[int], end: bytes) -> None:
    """Whatever deltas it comes in, with another text's deltas in between, it is hidden, and all the rest stays."""
    text = f"Here it is: {OPENAI}, keep it."
    edges = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    documents = [each for piece in pieces for each in (which(piece, 0), which("other ", 1))]
    kept = NET.stream(stream(*documents, end=end))
    assert b"sk-" not in kept
    assert kept.count(end) == len(documents) + 1
    lines = [line for line in kept.replace(b"\r", b"\n").split(b"\n") if line.startswith(b"data: {")]
    texts: dict[int, str] = {0: "", 1: ""}
    for place, line in enumerate(lines):
        without = json.dumps(which("@", place % 2)).split('"@"')
        said = json.dumps(json.loads(line[5:]))
        assert said.startswith(without[0])
        assert said.endswith(without[1])
        texts[place % 2] += json.loads(said[len(without[0]) : len(said) - len(without[1])])
    assert texts == {0: f"Here it is: {HIDDEN}, keep it.", 1: "other " * len(pieces)}


def test_a_stream_without_secrets_is_its_own_bytes() -> None:
    """The same object; members that repeat are not read as one text."""
    data = b": hello\n\nevent: x\n" + stream(*[chat_event("AKIA"), chat_event("x")] * 3)
    assert NET.stream(data) is data
    repeated = Redaction(patterns=(r"\d{4}",)).stream(stream({"id": "12", "text": "a"}, {"id": "12", "text": "b"}))
    assert HIDDEN.encode() not in repeated


def test_token_spellings_of_a_stream_go_with_the_secret() -> None:
    """Log probabilities and token ids say the same text again: in all events, not only in those of the secret."""
    logprobs = {"content": [{"token": "sk", "logprob": -1}]}
    events = [chat_event(piece, logprobs=logprobs, token_ids=[1, 2]) for piece in ("a ", OPENAI[:9], OPENAI[9:])]
    kept = NET.stream(stream(*events))
    assert b'"token"' not in kept
    assert b'"token_ids":null' in kept.replace(b" ", b"")


def test_lines_that_are_no_json() -> None:
    """An engine's text, and an event cut in two data lines, are looked through as they are."""
    data = f"data: oops {OPENAI}\n\ndata: fine\n\n".encode()
    assert NET.stream(data) == f"data: oops {HIDDEN}\n\ndata: fine\n\n".encode()
