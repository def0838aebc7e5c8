"""LangGraph with sessions: the thread's id, which only the checkpointer knows, is sent as the session's.

    pip install langgraph langchain-openai
    python examples/harness/langgraph_agent.py --url http://127.0.0.1:8080 --model sim-8b

A model's ``default_headers`` are one client's, and all threads share that; so the node binds the header of the thread
that it runs for. A subgraph's node does the same, with an id of its own and its thread's as the parent.
"""

import argparse
import uuid
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph


def list_files() -> str:
    """The files of the project."""
    return "README.md  main.py  tests/"


def graph(model: ChatOpenAI) -> Any:
    """A node that asks the model and one that runs its tools, in a circle."""

    def ask(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        must = isinstance(
            state["messages"][-1], HumanMessage
        )  # for the simulated engine, which calls no tool by itself
        with_tools = model.bind_tools([tool(list_files)], tool_choice="required" if must else "auto")
        session = config["configurable"]["thread_id"]
        return {"messages": with_tools.bind(extra_headers={"x-tidegate-session-id": session}).invoke(state["messages"])}

    def run_tools(state: MessagesState) -> dict[str, Any]:
        calls = state["messages"][-1].tool_calls
        return {"messages": [ToolMessage(list_files(), tool_call_id=call["id"]) for call in calls]}

    built = StateGraph(MessagesState)
    built.add_node("ask", ask)
    built.add_node("tools", run_tools)
    built.add_edge(START, "ask")
    built.add_conditional_edges("ask", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    built.add_edge("tools", "ask")
    return built.compile(checkpointer=InMemorySaver())


def main(url: str, model_name: str, run: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model_name, max_tokens=64, timeout=900, max_retries=5
    )
    agent = graph(model)
    thread = {"configurable": {"thread_id": run}}
    for question in ("What does this project do?", "And its tests?"):
        state = agent.invoke({"messages": [HumanMessage(question)]}, thread)
    print(f"{run}: {state['messages'][-1].content[:80]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="sim-8b")
    parser.add_argument("--run", default=f"langgraph-{uuid.uuid4().hex[:6]}", help="the session's id")
    options = parser.parse_args()
    main(options.url, options.model, options.run)
