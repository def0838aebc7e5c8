"""The extractors: what each API's body says, and what is wrong with a bad one (user-cases C6, bad input of issue A)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.session import InputTrigger
from services.ingress.endpoints import (
    LARGEST_NUMBER,
    ChatPrompt,
    ClientRequest,
    Endpoint,
    LargePrompt,
    TextPrompt,
    TokensPrompt,
    endpoint_of,
    read_request,
)
from services.ingress.errors import BadJsonError, BadRequestError, RequestError
from services.ingress.identity import resolve

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]}


def read(endpoint: Endpoint, **body: Any) -> ClientRequest:
    """A request whose body has these members, model included."""
    return read_request(endpoint, json.dumps({"model": "m", **body}).encode())


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/chat/completions", "chat_completions"),
        ("/v1/completions", "completions"),
        ("/v1/responses", "responses"),
        ("/v1/messages?beta=true", "messages"),
        ("/v1/messages/count_tokens?beta=true", "count_tokens"),
        ("/v1/chat/completions/", None),
        ("/v1/embeddings", None),
        ("/", None),
    ],
)
def test_paths(path: str, endpoint: str | None) -> None:
    """The query is ignored; what is no API of ours is nothing."""
    assert endpoint_of(path) == endpoint


def test_chat() -> None:
    """A chat body: model, stream, choices, the larger limit's name first, usage, priority; messages as they came."""
    tool = {"type": "function", "function": {"name": "f"}}
    request = read(
        "chat_completions",
        messages=[USER],
        stream=True,
        n=2,
        max_tokens=5,
        max_completion_tokens=7,
        tools=[tool],
        priority=3,
        stream_options={"include_usage": True},
        chat_template_kwargs={"enable_thinking": False},
        unknown={"a": [1]},
    )
    assert (request.model, request.stream, request.choices, request.max_output_tokens) == ("m", True, 2, 7)
    assert (request.usage_asked, request.priority, request.facts.has_tools) == (True, 3, True)
    assert isinstance(request.prompt, ChatPrompt)
    assert [json.loads(bytes(message)) for message in request.prompt.messages] == [USER]
    assert [json.loads(bytes(given)) for given in request.prompt.tools] == [tool]
    assert request.prompt.template_kwargs is not None
    assert json.loads(bytes(request.prompt.template_kwargs)) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("members", "asked"),
    [
        ({}, True),
        ({"stream": True}, False),
        ({"stream": True, "stream_options": None}, False),
        ({"stream": True, "stream_options": {}}, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", ["chat_completions", "completions"])
def test_usage_is_asked_for_or_comes_anyway(endpoint: Endpoint, members: dict[str, Any], asked: bool) -> None:
    """Only a stream has to ask for usage (user-cases C3)."""
    assert read(endpoint, messages=[USER], prompt="hi", **members).usage_asked == asked


@pytest.mark.parametrize(
    ("prompt", "expected", "choices"),
    [
        ("hi", TextPrompt("hi"), 1),
        (["hi"], TextPrompt("hi"), 1),
        ([1, 2, 4_294_967_295], TokensPrompt((1, 2, 4_294_967_295)), 1),
        ([[1, 2]], TokensPrompt((1, 2)), 1),
        (["a", "b"], None, 2),
        ([[1], [2], [3]], None, 3),
    ],
    ids=str,
)
def test_completions_prompts(prompt: Any, expected: object, choices: int) -> None:
    """Text or tokens, alone or in a list; a batch is served but not scored."""
    request = read("completions", prompt=prompt)
    assert (request.prompt, request.choices) == (expected, choices)


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[]], [-1], [1 << 32], [[1], "a"], None, 5], ids=str)
def test_bad_completions_prompts(prompt: Any) -> None:
    """A prompt of no known shape is a 400 that names it."""
    with pytest.raises(BadRequestError) as caught:
        read("completions", prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_best_of_counts_as_choices() -> None:
    """``best_of`` multiplies the work as ``n`` does."""
    assert read("completions", prompt="hi", n=2, best_of=4).choices == 4


def test_responses_stored_history_is_not_scored() -> None:
    """With ``previous_response_id`` or a stored ``conversation`` the prompt is not in the body: routed, not scored,
    never a 500 (C6); and nobody is recognised by a last message alone."""
    assert read("responses", input="hi").prompt is not None
    assert read("responses", input="hi", previous_response_id="resp_1").prompt is None
    for stored in ("conv_1", {"id": "conv_1"}):
        assert read("responses", input="hi", conversation=stored).prompt is None


@pytest.mark.parametrize(
    "members",
    [
        {"chat_template": "{{ messages }}"},
        {"documents": [{"title": "a", "text": "b"}]},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 100},
        {"truncate_prompt_tokens": -1},
    ],
)
def test_a_prompt_that_its_engine_makes_otherwise_is_not_scored(members: dict[str, Any]) -> None:
    """vLLM would make other tokens of it than of the messages alone: nothing is guessed."""
    request = read("chat_completions", messages=[{"role": "user", "content": "x"}], **members)
    assert request.prompt is None
    assert request.facts.input_trigger == "user_message"
    nothing: dict[str, Any] = {name: [] if name == "documents" else None for name in members}
    assert read("chat_completions", messages=[], **nothing).prompt is not None
    assert (read("completions", prompt="x", **members).prompt is None) == ("truncate_prompt_tokens" in members)


def test_anthropic_messages_keep_system_and_limit() -> None:
    """Messages: top-level system, ``max_tokens``, usage without asking."""
    request = read("messages", messages=[USER], system="be brief", max_tokens=9, stream=True)
    assert (request.max_output_tokens, request.usage_asked) == (9, True)
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.system is not None
    assert json.loads(bytes(request.prompt.system)) == "be brief"


TRIGGERS: list[tuple[Endpoint, dict[str, Any], InputTrigger]] = [
    ("chat_completions", {"messages": [USER]}, "user_message"),
    ("chat_completions", {"messages": [USER, {"role": "tool", "content": "x"}]}, "tool_result"),
    ("chat_completions", {"messages": [{"role": "function", "content": "x"}]}, "tool_result"),
    ("chat_completions", {"messages": [USER, {"role": "assistant", "content": "x"}]}, "other"),
    ("chat_completions", {"messages": [{"role": "developer", "content": "x"}]}, "other"),
    ("chat_completions", {"messages": []}, "other"),
    ("chat_completions", {"messages": [7]}, "other"),
    ("responses", {"input": "hi"}, "user_message"),
    ("responses", {"input": [{"role": "user", "content": "x"}]}, "user_message"),
    ("responses", {"input": [{"type": "function_call_output", "output": "x"}]}, "tool_result"),
    ("responses", {"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "tool_result"),
    ("responses", {"input": [{"type": "reasoning"}]}, "other"),
    ("responses", {"input": []}, "other"),
    ("messages", {"messages": [USER]}, "user_message"),
    ("messages", {"messages": [RESULT]}, "tool_result"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "user_message"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": "x"}]}, "other"),
    ("messages", {"messages": [USER, {"role": "system", "content": "x"}]}, "user_message"),
    ("messages", {"messages": [RESULT, {"role": "system", "content": []}, {"role": "system"}]}, "tool_result"),
    ("messages", {"messages": [{"role": "system", "content": "x"}]}, "other"),
    ("messages", {"messages": []}, "other"),
    ("completions", {"prompt": "hi"}, "other"),
]


@pytest.mark.parametrize(("endpoint", "body", "trigger"), TRIGGERS, ids=str)
def test_input_trigger(endpoint: Endpoint, body: dict[str, Any], trigger: InputTrigger) -> None:
    """The last item decides what made the client send (identity-and-traces §1.4)."""
    assert read(endpoint, **body).facts.input_trigger == trigger


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model":"m","messages":[]',
        b'{"model":"m","messages":[]}x',
        b'{"model":"m","messages":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=["empty", "open", "text", "cut", "trailing", "deep", "binary"],
)
def test_what_is_no_json_is_a_bad_json_error(body: bytes) -> None:
    """Bad JSON: 400, reason ``bad_json``, and never anything else, however deep."""
    with pytest.raises(BadJsonError) as caught:
        read_request("chat_completions", body)
    assert (caught.value.status, caught.value.reason) == (400, "bad_json")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, None),
        ({"model": 5, "messages": []}, "model"),
        ({"model": "", "messages": []}, "model"),
        ({"model": "m"}, None),
        ({"model": "m", "messages": {}}, "messages"),
        ({"model": "m", "messages": [], "stream": "yes"}, "stream"),
        ({"model": "m", "messages": [], "n": 1.5}, "n"),
        ({"model": "m", "messages": [], "max_tokens": "many"}, "max_tokens"),
        ([], None),
    ],
    ids=str,
)
def test_bad_members_are_named(body: object, param: str | None) -> None:
    """A member of the wrong type is a 400 that names it; what we do not serve by may have any type."""
    with pytest.raises(RequestError) as caught:
        read_request("chat_completions", json.dumps(body).encode())
    assert caught.value.status == 400
    assert getattr(caught.value, "param", None) == param


def test_members_that_we_do_not_serve_by_may_be_anything() -> None:
    """The engine judges its own members; ours only the few we need."""
    request = read("chat_completions", messages=[USER], temperature="hot", user=[], metadata=1, seed={})
    assert request.model == "m"
    assert read("chat_completions", messages=[USER], stream=None, n=None, tools=None).choices == 1


@pytest.mark.parametrize(
    "member",
    [
        {"prompt_cache_key": "k" * 9_000_000},
        {"metadata": {"user_id": "user_x_session_" + "k" * 9_000_000}},
        {"client_metadata": {"x-codex-turn-metadata": json.dumps({"turn_id": "k" * 9_000_000})}},
    ],
    ids=["prompt_cache_key", "user_id", "turn_metadata"],
)
def test_an_oversized_identity_field_is_no_identity(member: dict[str, Any]) -> None:
    """Ids travel in every fact of the request: one that fits into a body but not into a message counts as absent."""
    request = read("chat_completions", messages=[USER], **member)
    assert request.facts.fields == {}


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "member",
    [{"metadata": {"user_id": '{"a":' + DEEP}}, {"client_metadata": {"x-codex-turn-metadata": '{"a":' + DEEP[:8000]}}],
    ids=["user_id", "turn_metadata"],
)
def test_deep_nesting_inside_an_identity_field_is_no_identity(member: dict[str, Any]) -> None:
    """JSON in a text, nested deeper than the stack, is as unreadable as any other text."""
    request = read("chat_completions", messages=[USER], **member)
    resolved = resolve({}, request.facts, "chat_completions", request_id="r")
    assert resolved.identity.key.family == "request"


@pytest.mark.parametrize("endpoint", ["chat_completions", "responses", "messages"])
def test_nesting_at_the_edge_of_the_stack_is_an_answer(endpoint: Endpoint) -> None:
    """Whatever the depth: a request, or a 400. The body is decoded in steps, and each has a stack of its own."""
    seen = set()
    for depth in range(900, 1010):
        nested = "[" * depth + "]" * depth
        for content in (nested, f'[{{"type":"x","a":{nested}}}]'):
            body = f'{{"model":"m","%s":[{{"role":"user","content":{content}}}]}}'
            try:
                read_request(endpoint, (body % ("input" if endpoint == "responses" else "messages")).encode())
                seen.add(200)
            except RequestError as error:
                seen.add(error.status)
    assert seen == {200, 400}


def test_numbers_are_cut_to_what_travels() -> None:
    """The engine judges its own members; in our messages a number has 53 bits (JSON's readers hold no more)."""
    huge = 10**400
    request = read("chat_completions", messages=[USER], max_tokens=huge, priority=-huge)
    assert (request.max_output_tokens, request.priority) == (LARGEST_NUMBER, -LARGEST_NUMBER)
    hinted = read("responses", input="x", max_output_tokens=huge, nvext={"agent_hints": {"priority": 1 << 64}})
    assert (hinted.max_output_tokens, hinted.priority) == (LARGEST_NUMBER, -LARGEST_NUMBER)
    assert read("messages", messages=[USER], max_tokens=huge).max_output_tokens == LARGEST_NUMBER


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat_completions", {"messages": [USER]}),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
    ],
)
def test_a_cache_salt_is_read_where_engines_read_it(endpoint: Endpoint, body: dict[str, object]) -> None:
    """A text is the prompt's namespace; anything else is for the engine to refuse."""
    assert read(endpoint, **body, cache_salt="tenant-a").cache_salt == "tenant-a"
    assert [read(endpoint, **body, cache_salt=bad).cache_salt for bad in ("", None, 3, ["a"])] == [None] * 4
    assert read(endpoint, **body).cache_salt is None


@pytest.mark.parametrize(
    ("endpoint", "member"),
    [("chat_completions", '"messages":[%s]'), ("completions", '"prompt":[%s]'), ("messages", '"messages":[%s]')],
)
def test_a_prompt_over_its_bound_is_let_go_once_it_is_read(endpoint: Endpoint, member: str) -> None:
    """Read, a prompt of many small parts takes twenty times its bytes: it is not held while the request lives."""
    one = "7" if endpoint == "completions" else '{"role":"user","content":"x"}'
    body = ('{"model":"m",%s}' % (member % ",".join([one] * 50))).encode()
    assert read_request(endpoint, body, prompt_bytes=len(body)) == read_request(endpoint, body)
    large = read_request(endpoint, body, prompt_bytes=len(body) - 1)
    assert large == replace(read_request(endpoint, body), prompt=LargePrompt())
