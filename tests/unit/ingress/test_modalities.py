"""Media in prompts of any API: found where a model would see it, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.ingress.endpoints import ChatPrompt, Endpoint, LargePrompt, read_request
from services.ingress.modalities import TEXT_ONLY, Media, media_of

TEXT = {"type": "text", "text": 'look: {"type": "image"} and \\"type\\":\\"image_url\\"'}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def media(endpoint: Endpoint, **members: Any) -> Media:
    """As it is counted."""
    request = read_request(endpoint, json.dumps({"model": "m", **members}).encode())
    if isinstance(request.prompt, ChatPrompt):
        return media_of(request.body, request.prompt.messages)
    return request.media


def user(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(parts)}]


WITH: list[tuple[str, Endpoint, dict[str, Any], tuple[str, ...]]] = [
    ("chat image", "chat_completions", {"messages": user(TEXT, IMAGE)}, ("image",)),
    ("chat sound and video", "chat_completions", {"messages": user(SOUND, {"type": "video_url"})}, ("audio", "video")),
    ("chat tool result", "chat_completions", {"messages": user(IMAGE, role="tool")}, ("image",)),
    ("anthropic image", "messages", {"messages": user({"type": "image", "source": {}})}, ("image",)),
    (
        "anthropic image in a tool's result",
        "messages",
        {"messages": user({"type": "tool_result", "content": [{"type": "image"}, TEXT, {"type": "document"}]})},
        ("image", "file"),
    ),
    ("counted too", "count_tokens", {"messages": user({"type": "image"})}, ("image",)),
    ("responses image", "responses", {"input": user({"type": "input_image", "image_url": "x"})}, ("image",)),
    ("responses output", "responses", {"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]},
     ("file",)),
    ("responses screenshot", "responses",
     {"input": [{"type": "computer_call_output", "output": {"type": "computer_screenshot"}}]}, ("image",)),
    ("responses, stored before", "responses",
     {"input": user({"type": "input_image"}), "previous_response_id": "r"}, ("image",)),
    ("embeddings", "completions", {"prompt_embeds": "AAAA"}, ("embeddings",)),
    ("embeddings beside a text", "completions", {"prompt": "x", "prompt_embeds": ["AAAA", "BBBB"]}, ("embeddings",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "endpoint", "members", "kinds"), WITH, ids=[case[0] for case in WITH])
def test_media(name: str, endpoint: Endpoint, members: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Each API's parts, by what they hold."""
    assert media(endpoint, **members).modalities == kinds


WITHOUT: list[tuple[str, Endpoint, dict[str, Any]]] = [
    ("text that speaks of parts", "chat_completions", {"messages": user(TEXT)}),
    ("a plain text", "chat_completions", {"messages": [{"role": "user", "content": '{"type": "image"}'}]}),
    ("a tool's arguments", "messages", {"messages": user({"type": "tool_use", "input": {"type": "image"}})}),
    ("a tool's schema", "chat_completions", {"messages": user(TEXT), "tools": [{"type": "image"}]}),
    ("no message", "messages", {"messages": [[{"type": "image"}], 3]}),
    ("no embeddings", "completions", {"prompt": "x", "prompt_embeds": None}),
]


@pytest.mark.parametrize(("name", "endpoint", "members"), WITHOUT, ids=[case[0] for case in WITHOUT])
def test_no_media(name: str, endpoint: Endpoint, members: dict[str, Any]) -> None:
    """What only looks like it."""
    assert media(endpoint, **members) == TEXT_ONLY


def test_size() -> None:
    """Bytes of the parts in the body, so that they are not taken for text."""
    found = media("chat_completions", messages=user(TEXT, IMAGE, IMAGE))
    assert (found.parts, found.bytes) == (2, 2 * len(json.dumps(IMAGE)))


def test_a_prompt_that_is_let_go_is_looked_through_before() -> None:
    """Large bodies are mostly images."""
    body = json.dumps({"model": "m", "messages": user(IMAGE)}).encode()
    request = read_request("chat_completions", body, prompt_bytes=10)
    assert isinstance(request.prompt, LargePrompt)
    assert request.media.modalities == ("image",)


@pytest.mark.parametrize(
    ("members", "choices"),
    [
        ({"prompt_embeds": "A"}, 1),
        ({"prompt_embeds": ["A", "B"], "prompt": ""}, 2),
        ({"prompt_embeds": "A", "prompt": ["a", "b"], "n": 2}, 6),
        ({"prompt_embeds": "A", "prompt": [1, 2], "best_of": 3}, 6),
        ({"prompt": ["a", "b"], "n": 2, "best_of": 3}, 6),
    ],
)
def test_answers_asked_for(members: dict[str, Any], choices: int) -> None:
    """Each prompt, embedded or not, as often as the larger of ``n`` and ``best_of``; such a prompt is not scored."""
    request = read_request("completions", json.dumps({"model": "m", **members}).encode())
    assert (request.choices, request.prompt) == (choices, None)
