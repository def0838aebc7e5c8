"""What the agents of a soak say, and how they read what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.soak.conversations import TALKING, Api, Conversation, error_code, stream_end
from services.ingress.replies import error_event, error_reply

ENDS: dict[Api, bytes] = {
    "chat_completions": b'data: {"choices":[]}\n\ndata: [DONE]\n\n',
    "completions": b'data: {"choices":[]}\n\ndata: [DONE]\n\n',
    "responses": b'event: response.completed\ndata: {"type":"response.completed","response":{"error":null}}\n\n',
    "messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}


@given(seed=st.integers(0, 1000), session=st.sampled_from(["a", "b", "c", "d", "e"]))
def test_a_conversation_grows_turn_by_turn(seed: int, session: str) -> None:
    """Each turn's prompt begins with the whole of the one before, in every API, and the last says that it is the
    last."""
    talk = Conversation(seed, session, "m")
    before = ""
    while not talk.over:
        last = talk.turn == talk.turns - 1
        assert dict(talk.headers).get(b"x-tidegate-session-final") == (b"true" if last else None)
        ask = talk.ask()
        said = ask.body.get("messages") or ask.body.get("input") or ask.body["prompt"]
        text = str(said).rstrip("]")
        assert text.startswith(before)
        before = text
        talk.answered()


@pytest.mark.parametrize("api", TALKING)
def test_the_end_of_a_stream(api: Api) -> None:
    """Complete, broken off with an error inside, and cut are three things, in each API."""
    assert stream_end(api, ENDS[api]) == "done"
    assert stream_end(api, ENDS[api][:10]) is None
    assert stream_end(api, b'data: {"x":1}\n\n' + error_event(api, 502, "connection_lost", "It broke off.")) is not None


def test_an_errors_reason() -> None:
    """Ours where there is one; what is no error has none."""
    assert error_code(error_reply("chat_completions", 503, "stopping", "Soon.").body) == "stopping"
    assert error_code(error_reply("messages", 503, "stopping", "Soon.").body) == "overloaded_error"
    assert error_code(b'{"choices": []}') is None
    assert error_code(b"no JSON") is None
