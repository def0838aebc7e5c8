"""APIs that are passed on: which paths, and whose engines."""

from __future__ import annotations

import json

import pytest

from services.ingress import events
from services.ingress.answers import AnswerFacts
from services.ingress.effects import AskAdmission, CountPrompt, Forward
from services.ingress.endpoints import Endpoint
from services.ingress.errors import BadRequestError
from services.ingress.identity import read_headers, resolve
from services.ingress.passing import passed_api, read_passed
from services.ingress.requests import MEDIA_TOKENS
from tests.unit.ingress.builders import MODEL, Scene, granted

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\n'
    b'RIFF\x00name="model"\r\n\r\nfake\r\n--b\r\n'
    b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/embeddings?a=b", "embeddings"),
        ("/tokenize", "tokenize"),
        ("/detokenize", "detokenize"),
        ("/v1/rerank", "passthrough"),
        ("/v1/audio/transcriptions", "passthrough"),
        ("/v1/responses/resp_1.2/cancel", "passthrough"),
        ("/v1", None),
        ("/v1/", None),
        ("/v2/rerank", None),
        ("/reset_prefix_cache", None),
        ("/v1/load_lora_adapter", None),
        ("/v1/unload_lora_adapter", None),
        ("/v1/load_lora_adapter/", None),
    ],
)
def test_which_paths(path: str, api: str | None) -> None:
    assert passed_api(path) == api


@pytest.mark.parametrize(
    "path", ["//sleep", "/../sleep", "/./x", "/a/../../sleep", "/%2e%2e/sleep", "/a\\..\\b", "/a/", "/a b", "/.x", "/é"]
)
def test_a_path_that_may_lead_elsewhere_is_none(path: str) -> None:
    """Nobody reaches an engine's administration through a front door that joins paths."""
    assert passed_api(f"/v1{path}") is None


def model_of(body: bytes, query: str = "", models: tuple[str, ...] = ("a", "b")) -> str:
    return read_passed("passthrough", "POST", query, body, models).model


def test_where_the_model_is_named() -> None:
    assert model_of(b' {"x": [1], "model": "m"}') == "m"
    assert model_of(FORM) == "whisper"
    assert model_of(b"", "x=1&model=m%2F1") == "m/1"
    assert model_of(b"\x00\x01", models=("only",)) == "only"
    assert model_of(b"{}", models=("only",)) == "only"


@pytest.mark.parametrize(
    ("body", "query"),
    [
        (b"{}", ""),
        (b'{"model": 3}', ""),
        (b'{"model": "m"', ""),
        (b"{" * 20_000, ""),
        (b"", ""),
        (b"", "model=a&model=b"),
        (FORM.replace(b"--b--", b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\nother\r\n--b--"), ""),
    ],
)
def test_a_model_that_is_not_clear_is_a_clear_error(body: bytes, query: str) -> None:
    with pytest.raises(BadRequestError):
        model_of(body, query)


def received(endpoint: Endpoint, method: str = "POST", body: bytes = b"") -> events.RequestReceived:
    request = read_passed(endpoint, method, "", body or json.dumps({"model": MODEL}).encode(), [MODEL])
    signals = read_headers([(b"x-tidegate-session-id", b"s1")])
    return events.RequestReceived(
        request_id="r", request=request, resolved=resolve(signals, request.facts, endpoint, request_id="r")
    )


def test_it_is_decided_by_load_and_moves_no_session() -> None:
    house = Scene("a", "b")
    effects = house.play(received("embeddings"))
    assert not [effect for effect in effects if isinstance(effect, CountPrompt)]
    (question,) = [effect.question for effect in effects if isinstance(effect, AskAdmission)]
    assert (question.kind, question.endpoint, question.chain) == ("passthrough", "embeddings", b"")


@pytest.mark.parametrize("endpoint", ["tokenize", "detokenize"])
def test_what_computes_nothing_asks_nobody(endpoint: Endpoint) -> None:
    house = Scene("a")
    assert [
        type(effect) for effect in house.play(received(endpoint)) if isinstance(effect, Forward | AskAdmission)
    ] == [Forward]


def test_a_body_that_is_no_text_is_not_taken_for_a_prompt_of_its_size() -> None:
    house = Scene("a")
    effects = house.play(received("passthrough", body=b"\x00" * 1_000_000))
    (question,) = [effect.question for effect in effects if isinstance(effect, AskAdmission)]
    assert question.input_tokens == MEDIA_TOKENS


@pytest.mark.parametrize(
    ("method", "outcome", "again"),
    [
        ("POST", 503, False),
        ("POST", "connection_lost", False),
        ("POST", "connect_error", True),
        ("GET", 503, True),
        ("GET", "connection_lost", True),
    ],
)
def test_an_unknown_api_is_asked_twice_only_if_the_first_cannot_have_done_anything(
    method: str, outcome: int | events.AnswerFailure, again: bool
) -> None:
    house = Scene("a", "b")
    house.play(received("passthrough", method), granted("r", "a"))
    effects = house.play(
        events.FirstByte(request_id="r", attempt=0, status=outcome)
        if isinstance(outcome, int)
        else events.AnswerFailed(request_id="r", attempt=0, reason=outcome)
    )
    assert bool([effect for effect in effects if isinstance(effect, AskAdmission)]) is again


def test_an_unknown_api_takes_no_worker_from_others() -> None:
    house = Scene("a", "b")
    for _ in range(20):
        house.play(received("passthrough"), granted("r", "a"))
        house.play(
            events.FirstByte(request_id="r", attempt=0, status=500),
            events.RequestFailed(request_id="r"),
        )
    assert house.core.breaker.states(house.now) == {}


@pytest.mark.parametrize("endpoint", ["embeddings", "passthrough"])
def test_what_is_passed_on_need_not_be_json(endpoint: Endpoint) -> None:
    """A batch's results are lines of JSON, speech is sound: completed, whatever we can read of it."""
    house = Scene("a")
    house.play(received(endpoint), granted("r", "a"))
    house.play(
        events.FirstByte(request_id="r", attempt=0, status=200),
        events.AnswerEnded(request_id="r", attempt=0, answer=AnswerFacts(unreadable=1, complete=True)),
    )
    end, _ = house.end()
    assert (end.outcome, end.reason) == ("completed", None)
