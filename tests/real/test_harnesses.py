"""Real harnesses as docs/harnesses.md says to run them, before `tidegate up`: Claude Code, Codex, OpenAI's Agents SDK,
LangGraph, mini-swe-agent and Hermes. Each sends a session that Tidegate sees, and its next turn is found in the cache.
What the page has to copy for the first two and for Hermes is read from there.

Set HARNESS_PYTHON to a Python with ``openai-agents``, ``langgraph``, ``langchain-openai``, ``mini-swe-agent``,
``claude-agent-sdk`` and ``openai-codex-cli-bin`` (the last two bring the programs), and HERMES to the ``hermes``
executable of ``hermes-agent`` (it wants other versions of the same libraries).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.base import from_json
from schemas.trace import AgentContext, RequestMetrics, TraceRow
from tests.support.processes import start_process
from tests.support.system import RunningSystem, running_system

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "harness"
PAGE = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text(encoding="utf-8")
Turns = list[tuple[AgentContext, RequestMetrics]]
COUNTS = 10
"""Counts of tokens that Claude Code's ``/context`` asks for, at least."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSystem]:
    async with running_system(tmp_path_factory.mktemp("harnesses")) as system:
        yield system


def harness_python(module: str) -> str:
    """The Python that has ``module``. Skips the test with a reason when there is none."""
    python = os.environ.get("HARNESS_PYTHON")
    if not python:
        pytest.skip("no harnesses here: set HARNESS_PYTHON to a Python that has them")
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} has no {module}")
    return python


def harness_file(package: str, path: str) -> str:
    """A program that ``package`` brings. Skips the test with a reason where it is not there."""
    python = harness_python(package)
    found = subprocess.run(
        [python, "-c", f"import {package}; print({package}.__path__[0])"], capture_output=True, text=True, check=True
    )
    return str(Path(found.stdout.strip()) / path)


def to_copy(system: RunningSystem, section: str) -> str:
    """The first thing to copy of a section of the page, with this system's address."""
    text = PAGE.split(f"\n## {section}\n")[1]
    block = re.search(r"```\w*\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return block[1].replace("http://127.0.0.1:8080", system.url)


async def run(command: list[str], directory: Path, env: Mapping[str, str] | None = None, *, ends_with: int = 0) -> str:
    """A program in an empty folder and home, to its end; what it printed."""
    home = directory / "home"
    home.mkdir(exist_ok=True)
    settings = [f"{name}={value}" for name, value in {"HOME": str(home), **(env or {})}.items()]
    process = await start_process(
        ["env", "-C", str(directory), *settings, *command], directory, name=Path(command[0]).name
    )
    try:
        assert await process.wait(240) == ends_with, process.output
    finally:
        await process.close()
    return process.output


async def turns_of(system: RunningSystem, session: str, count: int, directory: Path) -> Turns:
    """What `tidegate tail`, the guide's check, shows of a session."""
    tail = [sys.executable, "-m", "tidegate", "tail", "--json", "--from-start", "--session", session]
    process = await start_process(
        [*tail, "--count", str(count), "--workdir", str(system.workdir)], directory, name=f"tail-{session}"
    )
    try:
        assert await process.wait(20) == 0, process.output
    finally:
        await process.close()
    rows = [from_json(line.encode(), TraceRow) for line in process.stdout.splitlines()]
    return [(row.agent_context, row.request) for row in rows if row.agent_context and row.request]


def assert_found_again(turns: Turns, family: str = "tidegate") -> None:
    """One session of turns, each of which finds what was before it."""
    assert {context.session.family for context, _ in turns if context.session} == {family}
    assert {(turn.outcome, turn.kind) for _, turn in turns} == {("completed", "turn")}
    for (_, before), (_, after) in pairwise(turns):
        assert (before.input_tokens or 0) - (after.cached_tokens or 0) <= 32
        assert after.worker == before.worker


async def test_claude_code(system: RunningSystem, tmp_path: Path) -> None:
    """A turn with a tool, one after the session is resumed, and ``/context``, which counts tokens at once."""
    claude = harness_file("claude_agent_sdk", "_bundled/claude")
    words = shlex.split(to_copy(system, "Claude Code"), comments=True)
    env = dict(word.split("=", 1) for word in words if "=" in word)
    (tmp_path / "notes.txt").write_text("nothing\n")
    tool = {"sim_tool": {"name": "Read", "arguments": {"file_path": str(tmp_path / "notes.txt")}}}
    asked = [claude, "-p", "Read it", "--output-format", "json", "--max-turns", "2"]
    said = await run(asked, tmp_path, {**env, "CLAUDE_CODE_EXTRA_BODY": json.dumps(tool)}, ends_with=1)
    session = re.findall(r'"session_id":"([0-9a-f-]+)"', said)[0]
    for text in ("Again", "/context"):
        await run([claude, "-p", text, "--output-format", "json", "--resume", session], tmp_path, env)
    rows = await turns_of(system, session, 3 + COUNTS, tmp_path)
    turns, counts = rows[:3], rows[3:]
    assert_found_again(turns, "claude_code")
    # what was to be said after the last result stands beside it, in one message
    assert [context.input_trigger for context, _ in turns] == ["user_message", "tool_result", "tool_result"]
    assert {(count.kind, count.outcome, count.status) for _, count in counts} == {("count_tokens", "completed", 200)}


async def test_codex(system: RunningSystem, tmp_path: Path) -> None:
    """A thread, resumed by another process."""
    codex = harness_file("codex_cli_bin", "bin/codex")
    folder = tmp_path / "home" / ".codex"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_copy(system, "Codex"))
    asked = [codex, "exec", "--skip-git-repo-check", "-s", "read-only", "--json"]
    said = await run([*asked, "Say hi"], tmp_path)
    thread = re.findall(r'"thread_id":"([0-9a-f-]+)"', said)[0]
    await run([*asked, "resume", thread, "Again"], tmp_path)
    turns = await turns_of(system, thread, 2, tmp_path)
    assert_found_again(turns, "codex")
    assert len({context.turn_id for context, _ in turns}) == 2


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_openai_agents_sdk(system: RunningSystem, tmp_path: Path, api: str) -> None:
    """An agent and its sub-agent are sessions of their own, and the parent is known."""
    session = f"sdk-{api}"
    script = str(EXAMPLES / "openai_agents_sdk.py")
    options = ["--url", system.url, "--model", "sim-8b", "--run", session, "--api", api]
    assert session in await run([harness_python("agents"), script, *options], tmp_path)
    turns = await turns_of(system, session, 2, tmp_path)
    children = await turns_of(system, f"{session}-reader", 2, tmp_path)
    assert_found_again(turns)
    assert_found_again(children)
    assert {context.parent_session_id for context, _ in turns} == {None}
    assert {context.parent_session_id for context, _ in children} == {session}
    assert [context.input_trigger for context, _ in children] == ["user_message", "tool_result"]


async def test_langgraph(system: RunningSystem, tmp_path: Path) -> None:
    """The thread of the checkpointer is the session."""
    python = harness_python("langgraph, langchain_openai")
    script = str(EXAMPLES / "langgraph_agent.py")
    await run([python, script, "--url", system.url, "--model", "sim-8b", "--run", "thread-7"], tmp_path)
    assert_found_again(await turns_of(system, "thread-7", 4, tmp_path))


async def test_mini_swe_agent(system: RunningSystem, tmp_path: Path) -> None:
    """The configuration of the guide; the simulated engine is told to call its only tool."""
    mini = Path(harness_python("minisweagent")).with_name("mini")
    call = json.dumps({"sim_tool": {"name": "bash", "arguments": {"command": "echo hi"}}})
    more = [
        f"model.model_kwargs.api_base={system.url}/v1",
        "model.model_kwargs.extra_headers.x-tidegate-session-id=mini-7",
        f"model.model_kwargs.extra_body={call}",
        "agent.step_limit=3",
    ]
    options = [word for each in ("mini.yaml", str(EXAMPLES / "mini_swe_agent.yaml"), *more) for word in ("-c", each)]
    env = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    await run([str(mini), "-y", "--exit-immediately", *options, "-t", "Say hi", "-o", "run.json"], tmp_path, env)
    assert_found_again(await turns_of(system, "mini-7", 3, tmp_path))


async def test_hermes(system: RunningSystem, tmp_path: Path) -> None:
    """The plugin says Hermes' own session id; a conversation that is resumed is the same session."""
    hermes = os.environ.get("HERMES")
    if not hermes:
        pytest.skip("no Hermes here: set HERMES to the executable of hermes-agent")
    home = tmp_path / "hermes"
    (home / "plugins").mkdir(parents=True)
    (home / "plugins" / "tidegate_session").symlink_to(EXAMPLES / "hermes_plugin")
    (home / "config.yaml").write_text(to_copy(system, "Hermes"))
    env = {"HERMES_HOME": str(home)}
    said = await run([hermes, "chat", "-Q", "-q", "Say hi"], tmp_path, env)
    session = said.split("session_id: ")[1].split()[0]
    await run([hermes, "chat", "-Q", "-q", "Again", "--resume", session], tmp_path, env)
    assert_found_again(await turns_of(system, session, 2, tmp_path))
