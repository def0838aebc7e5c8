"""Rows equal requests: whatever is asked of real engines, in whatever API, each is one row, and says what it was."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvcore import sequence_hashes_with_tail
from kvcore.hashing import pack_tokens
from schemas.trace import ReplayBlock
from tests.integration.ingress.support import ASSETS, MODEL, Stage, System, chat, until
from web.client import AnswerStream

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
TOKENIZERS = {MODEL: str(ASSETS)}


def text(prompt: Any, **members: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 4, **members}


CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # name, path, body, in the row
    ("plain", CHAT, chat(), {"replayable": True, "max_output_tokens": 8, "outcome": "completed"}),
    ("n", CHAT, chat(n=2), {"replayable": False, "choices": 2}),
    ("best-of", COMPLETIONS, text("x", best_of=2), {"replayable": False, "choices": 2}),
    ("batch", COMPLETIONS, text(["a", "b"]), {"replayable": False, "choices": 2, "replay": None}),
    ("tokens", COMPLETIONS, text([1, 2, 3]), {"replayable": True, "input_tokens": 3}),
    ("embeddings", COMPLETIONS, {"model": MODEL, "prompt_embeds": "AAAA", "max_tokens": 4},
     {"replayable": False, "modalities": ("embeddings",)}),
    ("image", CHAT, {"model": MODEL, "messages": [IMAGE], "max_tokens": 4},
     {"replayable": False, "modalities": ("image",), "replay": None}),
    ("image in Messages", "/v1/messages",
     {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}], "max_tokens": 4},
     {"replayable": False, "modalities": ("image",), "replay": None, "endpoint": "messages"}),
    ("image in a tool's result, in Messages", "/v1/messages",
     {"model": MODEL, "max_tokens": 4, "messages": [
         {"role": "user", "content": "look"},
         {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "see", "input": {}}]},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]}]},
     {"replayable": False, "modalities": ("image",), "replay": None}),
    ("image in Responses", "/v1/responses",
     {"model": MODEL, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     {"replayable": False, "modalities": ("image",), "replay": None, "endpoint": "responses"}),
    ("Messages", "/v1/messages",
     {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
     {"replayable": True, "max_output_tokens": 4}),
    ("Responses", "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 4},
     {"replayable": True, "max_output_tokens": 4}),
    ("refused by the engine", CHAT, chat(max_tokens=-1), {"outcome": "client_error", "status": 400}),
]  # fmt: skip


@pytest.mark.parametrize("tokenize", ["local", "engine"])
async def test_every_kind_of_request_is_one_row(system: System, tokenize: str) -> None:
    """n > 1, best_of, batches, embeddings, images, an engine's refusal: none is left out, as the peer's are (§2.1);
    an image is never counted by its text, whoever counts."""
    settings = {"tokenizers": TOKENIZERS, "tokenize": "local"} if tokenize == "local" else {"tokenize": "engine"}
    async with system.door(**settings) as door:
        for name, path, body, said in CASES:
            given = f"{tokenize}-{name}"
            answer = await door.post(body, path=path, x_request_id=given)
            row = await system.rows.by_x_request_id(given)
            assert row.status == answer.status, name
            assert {key: getattr(row, key) for key in said} == said, name
            if answer.status == 200:
                assert row.response_id == json.loads(answer.body)["id"]
                assert row.prefill_wait_time_ms is not None
                assert row.ttft_ms == pytest.approx(row.prefill_wait_time_ms + (row.prefill_time_ms or 0.0), abs=0.01)
        names = [f"{tokenize}-{name}" for name, *_ in CASES]
        assert len(system.rows.named(names)) == len(names)


async def read(stream: AnswerStream) -> bytes:
    """The whole of it."""
    pieces = []
    while piece := await stream.read():
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_hashes_of_the_answer_where_the_client_asks_for_its_tokens(system: System, path: str) -> None:
    """The engine's own ids of what it generated, after the prompt as we counted it: what the next turn begins with.
    Told in one piece or in many; who does not ask has the prompt's hashes only."""
    body = chat() if path == CHAT else text([5] * 20)
    prompt: list[int] = []
    async with system.door(tokenizers=TOKENIZERS, tokenize="local") as door:
        for number, asked in enumerate(({"stream": False}, {"stream": True}, {"return_token_ids": False})):
            given = f"ids-{path}-{number}"
            stream = await door.stream({**body, "return_token_ids": True, **asked}, path=path, x_request_id=given)
            told = await read(stream)
            row = await system.rows.by_x_request_id(given)
            assert isinstance(row.replay, ReplayBlock)
            if "stream" not in asked:
                assert row.replay.completion_sequence_hashes is msgspec.UNSET
                continue
            whole = chunks(told) if asked["stream"] else [json.loads(told)]
            generated = [one for part in whole for choice in part["choices"] for one in choice.get("token_ids") or []]
            if not asked["stream"]:
                prompt = whole[0].get("prompt_token_ids") or whole[0]["choices"][0]["prompt_token_ids"]
            assert len(generated) == row.output_tokens
            hashes = sequence_hashes_with_tail(pack_tokens([*prompt, *generated]), 16)
            assert row.replay.input_sequence_hashes == sequence_hashes_with_tail(pack_tokens(prompt), 16)
            assert row.replay.completion_sequence_hashes == hashes


def chunks(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events."""
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


async def test_what_is_not_accepted_has_no_row(stage: Stage) -> None:
    """Bad JSON, an unknown model, an unknown path, a method: refused before they are requests; each is counted by its
    reason, and none has facts or a row."""
    async with stage.door() as door:
        refusals = [
            (await door.post(b"{", x_request_id="never-1"), 400),
            (await door.post({**chat(), "model": "other"}, x_request_id="never-2"), 404),
            (await door.post({"model": MODEL}, x_request_id="never-3"), 400),
            (await door.post(chat(), path="/unknown", x_request_id="never-4"), 404),
            (await door.get(CHAT), 405),
        ]
        assert [answer.status for answer, _ in refusals] == [status for _, status in refusals]
        counted = (await door.get("/metrics")).body.decode()
        assert (await door.post(chat(), x_request_id="after")).status == 200
        await until(lambda: bool(stage.rows.named(["after"])))
    for reason in ("bad_json", "model_not_found", "bad_request", "unknown_url", "method_not_allowed"):
        assert f'tidegate_ingress_not_accepted_total{{reason="{reason}"}} 1.0' in counted, reason
    assert stage.rows.named([f"never-{number}" for number in range(1, 5)]) == []
