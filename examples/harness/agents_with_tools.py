"""Agents that call tools, begin sub-agents, and tell of both: what a harness has to do, in a page.

Two lines make it a good client: the session's id (and its parent's) in the headers of each request, and an event when a
tool begins and ends. Here the simulated engine calls whatever tool it is told to, and tools sleep.

    TIDEGATE_RECORDER_TOOL_EVENTS_HTTP_PORT=9300 make up
    python examples/harness/agents_with_tools.py --tool-events http://127.0.0.1:9300/v1/tool_events
    tidegate trace export .tidegate/traces --as perfetto -o run.json   # then open it in ui.perfetto.dev
"""

import argparse
import asyncio
import json
import random
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

TOOL_S = {"read_file": (0.05, 0.2), "grep": (0.1, 0.4), "run_tests": (0.5, 2.5), "task": (0.0, 0.0)}
"""How long each runs. ``task`` is a sub-agent."""
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in TOOL_S
]


@dataclass
class Harness:
    """What all agents share. ``tool_events``: where tools are told of; empty: nobody is told, and readers infer."""

    client: AsyncOpenAI
    model: str
    tool_events: str
    turns: int
    seed: int
    words: int = 1_500
    requests: int = 0
    run: str = field(default_factory=lambda: f"agents-{uuid.uuid4().hex[:6]}")

    def tell(self, session: str, call: str, tool: str, event: str, **said: object) -> None:
        """One tool event, in the compact form."""
        event_type = {"schema": "tidegate.request.trace.v1", "event_type": event, "session_id": session}
        body = {
            **event_type,
            "event_time_unix_ms": now_ms(),
            "tool": {"tool_call_id": call, "tool_class": tool, **said},
        }
        request = urllib.request.Request(
            self.tool_events, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=5).close()

    async def agent(self, name: str, parent: str | None = None, turns: int | None = None) -> None:
        """One session: turns with a tool between each two, over one growing conversation."""
        tells = bool(self.tool_events) and "quiet" not in name
        rng = random.Random(f"{self.seed}{name.removeprefix(self.run)}")
        text = " ".join(rng.choice(("file", "test", "line", "call", "name", "type")) for _ in range(self.words))
        messages: list[Any] = [{"role": "system", "content": text}, {"role": "user", "content": "Find the bug."}]
        headers = {"x-tidegate-session-id": name} | ({"x-tidegate-parent-session-id": parent} if parent else {})
        last = (turns or self.turns) - 1
        for turn in range(last + 1):
            tool = rng.choice([name for name in TOOL_S if name != "task" or (parent is None and 0 < turn < last)])
            if turn == last:
                headers["x-tidegate-session-final"] = "true"
            async with self.client.chat.completions.stream(
                model=self.model,
                messages=messages,
                tools=TOOLS,
                max_tokens=256,
                extra_headers=headers,
                extra_body={"sim_tool": tool} if turn < last else None,
            ) as stream:
                answer = await stream.get_final_completion()
            self.requests += 1
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or []:
                began = now_ms()
                if tells:
                    await asyncio.to_thread(self.tell, name, call.id, tool, "tool_start", started_at_unix_ms=began)
                if tool == "task":
                    await self.agent(f"{name}-sub{turn}", parent=name, turns=3)
                await asyncio.sleep(rng.uniform(*TOOL_S[tool]))
                if tells:
                    ended = {"status": "ok", "started_at_unix_ms": began, "ended_at_unix_ms": now_ms()}
                    await asyncio.to_thread(self.tell, name, call.id, tool, "tool_end", **ended)
                result = " ".join(rng.choice(("ok", "failed", "found", "line")) for _ in range(80))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the front door")
    parser.add_argument("--tool-events", default="", help="the recorder's address for tool events")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=1_500, help="of the first prompt of each agent")
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    async with AsyncOpenAI(base_url=f"{said.url.rstrip('/')}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        harness = Harness(client, model, said.tool_events, said.turns, said.seed, said.words)
        names = [f"{harness.run}-{number}" + ("-quiet" if number % 3 == 2 else "") for number in range(said.agents)]
        await asyncio.gather(*(harness.agent(name) for name in names))
    print(f"{harness.requests} requests of {said.agents} agents; sessions are called {harness.run}-…")


if __name__ == "__main__":
    asyncio.run(main())
