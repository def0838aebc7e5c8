"""The OpenAI Agents SDK with sessions: an agent, its tool, and a sub-agent that is a tool.

    pip install openai-agents
    python examples/harness/openai_agents_sdk.py --url http://127.0.0.1:8080 --model sim-8b

The SDK sends no id of its own (its ``SQLiteSession`` and ``group_id`` stay on the client). `session` is all that it
needs: headers of the model's settings, which every request of that agent then has. ``tool_choice`` is there for the
simulated engine, which calls a tool only if it must.
"""

import argparse
import asyncio
import uuid
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    Tool,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


def session(own: str, parent: str | None = None) -> ModelSettings:
    """Settings that say whose requests these are."""
    headers = {"x-tidegate-session-id": own}
    if parent is not None:
        headers["x-tidegate-parent-session-id"] = parent
    return ModelSettings(extra_headers=headers, tool_choice="required")


def list_files() -> str:
    """The files of the project."""
    return "README.md  main.py  tests/"


def sub_agent(model: Any, parent: str) -> Tool:
    """A sub-agent with a session of its own, below its parent's."""
    reader = Agent(
        name="Reader",
        instructions="Read what you are asked to read, and sum it up.",
        model=model,
        model_settings=session(f"{parent}-reader", parent),
        tools=[function_tool(list_files)],
    )
    return reader.as_tool(tool_name="read", tool_description="Have something read.")


async def main(url: str, model_name: str, api: str, run: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=900, max_retries=5)
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    model = kind(model=model_name, openai_client=client)
    agent = Agent(
        name="Planner",
        instructions="Plan the work, and have it done.",
        model=model,
        model_settings=session(run),
        tools=[sub_agent(model, run)],
    )
    result = await Runner.run(agent, "What does this project do?", max_turns=6)
    print(f"{run}: {result.final_output[:80]}")
    await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="sim-8b")
    parser.add_argument("--api", choices=("chat", "responses"), default="chat")
    parser.add_argument("--run", default=f"agents-sdk-{uuid.uuid4().hex[:6]}", help="the session's id")
    options = parser.parse_args()
    asyncio.run(main(options.url, options.model, options.api, options.run))
