"""What the engine answers to chat and completions: JSON bodies and stream events, shaped as vLLM 0.32 shapes them.

Stream events are put together from bytes prepared once a request, so that a token costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from load.engine.misbehave import UsageMode
from load.engine.outputs import PlannedOutput

Endpoint = Literal["chat", "completions", "messages", "responses"]

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-sim"
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every part of one answer repeats. ``created``: Unix seconds."""

    endpoint: Endpoint
    answer_id: str
    model: str
    created: int
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageNumbers:
    """Tokens of one request. ``created_tokens``: prompt tokens newly cached, which vLLM does not say of
    completions."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_tokens,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }


def whole_answer(
    head: AnswerHead, plan: PlannedOutput, finish: str, usage: UsageNumbers | None, prompt: list[int] | None
) -> bytes:
    """The body of an answer that is not streamed. ``prompt``: its token ids, if the client wants token ids."""
    text = plan.text(0, len(plan.tokens))
    token_ids = plan.tokens.tolist() if prompt is not None else None
    body: dict[str, Any] = {"id": head.answer_id}
    if head.endpoint == "chat":
        message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None, "reasoning": None}
        if plan.call is not None and finish == "tool_calls":
            function = {"name": plan.call.name, "arguments": plan.call.arguments}
            message["tool_calls"] = [{"id": head.call_id, "type": "function", "function": function}]
        body |= {"object": "chat.completion", "created": head.created, "model": head.model}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        body["prompt_token_ids"] = prompt
    else:
        body |= {"object": "text_completion", "created": head.created, "model": head.model}
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        choice["prompt_token_ids"] = prompt
    choice["token_ids"] = token_ids
    body |= {"choices": [choice], "system_fingerprint": FINGERPRINT, "kv_transfer_params": None}
    if usage is not None:
        body["usage"] = usage.body()
    return _encode(body)


class AnswerStream:
    """The events of one streamed answer. ``usage_mode`` is how it misbehaves; ``continuous``: usage in every event;
    ``token_ids``: events carry the ids of their tokens (``return_token_ids``)."""

    def __init__(
        self,
        head: AnswerHead,
        plan: PlannedOutput,
        *,
        usage_mode: UsageMode = "normal",
        continuous: bool = False,
        token_ids: bool = False,
    ) -> None:
        self._plan = plan
        self._chat = head.endpoint == "chat"
        self._call_id = head.call_id
        self._usage_mode = usage_mode
        self._continuous = continuous
        self._untold: int | None = 0 if token_ids else None
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        common = f'"id":{_json(head.answer_id)},"object":"{kind}","created":{head.created},"model":{_json(head.model)}'
        self._common = f"data: {{{common}".encode()
        self._lead = self._common + b',"choices":[{"index":0,' + (b'"delta":' if self._chat else b'"text":')
        self._named = False

    def opening(self, usage: UsageNumbers) -> list[bytes]:
        """What comes before any token: the role, for chat."""
        if not self._chat:
            return []
        return [self._event(b'{"role":"assistant","content":""}', b"null", usage)]

    def tokens(self, start: int, end: int, finish: str | None, usage: UsageNumbers) -> list[bytes]:
        """Events of the tokens ``start``..``end``-1; the last one carries ``finish``."""
        deltas = [delta.encode() for delta in self._deltas(start, end)]
        if finish is not None and not deltas:
            deltas.append((b'{"content":""}' if self._plan.call is None else b"{}") if self._chat else b'""')
        events = [self._event(delta, b"null", usage) for delta in deltas[:-1]]
        if deltas:
            reason = b"null" if finish is None else b'"%b"' % finish.encode()
            events.append(self._event(deltas[-1], reason, usage, self._ids(end)))
        return events

    def closing(self, usage: UsageNumbers, *, include_usage: bool) -> list[bytes]:
        """What comes after the last token."""
        return [self.usage(usage), DONE] if include_usage and self._usage_mode != "omit" else [DONE]

    def usage(self, usage: UsageNumbers) -> bytes:
        """The last event of a client that asked for usage."""
        return self._common + b',"choices":[],"usage":' + _encode(usage.body()) + b"}\n\n"

    def _deltas(self, start: int, end: int) -> list[str]:
        text = _json(self._plan.text(start, end))
        if not self._chat:
            return [text] if len(text) > 2 else []
        deltas = ['{"content":' + text + "}"] if len(text) > 2 else []
        call, call_at, pieces = self._plan.call, self._plan.call_at, self._plan.arguments
        if call is None or call_at is None or pieces is None or end <= call_at:
            return deltas
        if not self._named:
            self._named = True
            named = {
                "id": self._call_id,
                "type": "function",
                "index": 0,
                "function": {"name": call.name, "arguments": ""},
            }
            deltas.append('{"tool_calls":[' + _json(named) + "]}")
        arguments = "".join(pieces[start:end])
        if arguments:
            deltas.append('{"tool_calls":[{"index":0,"function":{"arguments":' + _json(arguments) + "}}]}")
        return deltas

    def _ids(self, end: int) -> bytes:
        """Of the tokens up to ``end`` that no event has told yet, as a member of the choice."""
        if self._untold is None:
            return b""
        start, self._untold = self._untold, end
        return b',"token_ids":' + _encode(self._plan.tokens[start:end].tolist())

    def _event(self, delta: bytes, reason: bytes, usage: UsageNumbers, ids: bytes = b"") -> bytes:
        finish = b',"stop_reason":null' if reason != b"null" else b""
        tail = b',"logprobs":null,"finish_reason":' + reason + finish + ids + b"}]"
        if self._usage_mode == "null":
            tail += b',"usage":null'
        elif self._continuous and self._usage_mode == "normal":
            tail += b',"usage":' + _encode(usage.body())
        return self._lead + delta + tail + b"}\n\n"


def _json(value: Any) -> str:
    return _encode(value).decode()
