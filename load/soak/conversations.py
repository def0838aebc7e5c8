"""What the agents of a soak say in each API, and how an answer to it ended. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from load.workload.sessions import words

Api = Literal["chat_completions", "completions", "responses", "messages", "count_tokens", "embeddings"]

PATHS: dict[Api, str] = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "embeddings": "/v1/embeddings",
}
TALKING: tuple[Api, ...] = ("chat_completions", "completions", "responses", "messages")
"""APIs in which a session has turns; the two others are asked beside them."""

_ENDS: dict[Api, bytes] = {
    "chat_completions": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "responses": b"event: response.completed",
    "messages": b"event: message_stop",
}
_LONG_EVERY, _LONG_TOKENS, _SHORT_TOKENS = 3, 250, 24
_SYSTEM_WORDS, _TURN_WORDS = 160, 30
_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``aborts_after``: pieces of the answer after which its client goes away (``None``: it stays)."""

    api: Api
    body: dict[str, Any]
    stream: bool
    aborts_after: int | None = None


class Conversation:
    """One session of one agent: a prompt that grows by the answer and a tool's result with each turn."""

    def __init__(self, seed: int, session: str, model: str) -> None:
        self._random = random.Random(f"{seed}/{session}")
        self._seed = seed
        self._model = model
        self.session = session
        self.api: Api = self._random.choice(TALKING)
        self.turns = self._random.randint(2, 5)
        self.turn = 0
        app = self._random.randrange(3)
        self._system = f"You are agent {app}. " + words(seed, f"soak-app-{app}", _SYSTEM_WORDS)
        self._said: list[dict[str, Any]] = [{"role": "user", "content": self._words("task")}]

    @property
    def over(self) -> bool:
        return self.turn >= self.turns

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Who asks; the last turn says that it is the last."""
        headers = [(b"x-tidegate-session-id", self.session.encode("ascii"))]
        if self.turn == self.turns - 1:
            headers.append((b"x-tidegate-session-final", b"true"))
        return headers

    def pause_s(self) -> float:
        """How long the tool runs before the next turn."""
        return self._random.uniform(0.05, 0.5)

    def beside(self) -> Ask | None:
        """What some agents ask before a turn: how many tokens it has, or an embedding."""
        if self.api == "messages" and self._random.random() < 0.4:
            body = {"model": self._model, "system": self._system, "messages": self._messages()}
            return Ask("count_tokens", body, stream=False)
        if self.api == "completions" and self._random.random() < 0.2:
            return Ask("embeddings", {"model": self._model, "input": self._words("embedded")}, stream=False)
        return None

    def ask(self) -> Ask:
        """The next turn; asked again after a failure it is the same but for its length and patience."""
        stream = self._random.random() < 0.7
        tokens = _LONG_TOKENS if self._random.randrange(_LONG_EVERY) == 0 else _SHORT_TOKENS
        aborts_after = self._random.randint(1, 6) if stream and self._random.random() < 0.08 else None
        body = {"model": self._model, "stream": stream, **self._prompt(tokens)}
        return Ask(self.api, body, stream, aborts_after)

    def answered(self) -> None:
        """The turn is over: the answer and its tool's result join the conversation."""
        self.turn += 1
        command = {"command": f"step {self.turn}"}
        text, result, call = f"Step {self.turn} it is.", self._words("result"), f"call_{self.turn}"
        if self.api == "messages":
            use = {"type": "tool_use", "id": call, "name": "shell", "input": command}
            told = {"type": "tool_result", "tool_use_id": call, "content": result}
            self._said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]
        elif self.api == "chat_completions":
            function = {"name": "shell", "arguments": msgspec.json.encode(command).decode()}
            calls = [{"id": call, "type": "function", "function": function}]
            said = {"role": "assistant", "content": text, "tool_calls": calls}
            self._said += [said, {"role": "tool", "tool_call_id": call, "content": result}]
        else:
            self._said += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]

    def _prompt(self, tokens: int) -> dict[str, Any]:
        match self.api:
            case "messages":
                tool: dict[str, Any] = {"name": "shell", "description": "Runs it.", "input_schema": _SCHEMA}
                return {"system": self._system, "messages": self._messages(), "tools": [tool], "max_tokens": tokens}
            case "responses":
                return {"instructions": self._system, "input": self._messages(), "max_output_tokens": tokens}
            case "completions":
                text = "\n".join([self._system, *(str(message["content"]) for message in self._said)])
                return {"prompt": text, "max_tokens": tokens, "ignore_eos": True}
            case _:
                tool = {"type": "function", "function": {"name": "shell", "parameters": _SCHEMA}}
                messages = [{"role": "system", "content": self._system}, *self._said]
                return {"messages": messages, "tools": [tool], "max_tokens": tokens, **self._call()}

    def _call(self) -> dict[str, Any]:
        """Every other chat turn calls its tool; the others are long answers."""
        return {"sim_tool": "shell"} if self.turn % 2 else {"ignore_eos": True}

    def _messages(self) -> list[dict[str, Any]]:
        return list(self._said)

    def _words(self, what: str) -> str:
        return words(self._seed, f"{self.session}/{self.turn}/{what}", _TURN_WORDS)


KEPT_BYTES = 65_536
"""The end of a stream that `stream_end` needs: its last event whole."""


def stream_end(api: Api, tail: bytes) -> str | None:
    """``done`` for a stream that ends as its API says, the reason for one that ends with an error inside, ``None`` for
    one that was cut. ``tail``: its last `KEPT_BYTES`."""
    ended = _ENDS[api] in tail
    event = tail.rstrip().rpartition(b"\n\n")[2]
    data = next((line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")), b"")
    if b"error" in data and (reason := error_code(data)) is not None:
        return reason
    return "done" if ended else None


def error_code(body: bytes) -> str | None:
    """The reason in an error of any API: ours where there is one, else its type; ``None``: this is no error."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(said, dict):
        return None
    error = said.get("error")
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return str(said.get("code") or "error") if said.get("type") == "error" else None
