"""What the agents of `load.bench.agents` do: the laboratory's programs as conversations, smaller by a scale. Pure.

Programs are drawn by `load.sim.workloads`: coding agents (``swe``), and among them some with sub-agents (``tree``).
Tokens and the seconds of tools are divided by their scale. A tool call has about 40 tokens at least, so that answers
are longer than the programs' divided by the scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from load.engine.tokens import Tokenizer
from load.sim.programs import Program
from load.sim.workloads import SWE_TOOLS, generate
from load.workload.sessions import words

TREE_EVERY, TREE_AT = 8, 2
"""One program of so many has sub-agents, that at this place."""

SHARED_TOKENS = 6_400
"""Of a system prompt, tools included, that all sessions of a kind share (before scaling)."""

TOKENS_A_WORD = 1.35
TOOLS_TOKENS = 375
"""What the chat template makes of `TOOLS`."""
RESULT_TOKENS = 20
"""What it adds around a tool's result, with the beginning of the answer."""
CALL_TOKENS = 40
"""Of a call without words."""

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": tool.name,
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
    for tool in sorted(SWE_TOOLS, key=lambda tool: tool.name)
)


@dataclass(frozen=True, slots=True)
class Scales:
    """By which seconds and tokens are divided."""

    time: float
    tokens: float


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One request. ``text``: the task, or what the last tool said; it joins the conversation first.

    ``tool``: what the answer calls, with ``command`` (``None``: it is the last one, of ``max_tokens`` tokens). Then the
    tool runs for ``gap_s`` seconds, and the ``children`` beside it; both are waited for.
    """

    text: str
    tool: str | None
    command: str
    max_tokens: int
    gap_s: float
    children: tuple[AgentSession, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSession:
    """A root session or a sub-agent. ``kind``: whose system prompt it has."""

    session_id: str
    kind: str
    system_prompt: str
    turns: tuple[AgentTurn, ...]
    parent: str | None = None

    def headers(self, turn: int) -> dict[str, str]:
        """Identity headers of turn ``turn`` (from 0); the last one says that the session ends."""
        headers = {"x-tidegate-session-id": self.session_id}
        if self.parent is not None:
            headers["x-tidegate-parent-session-id"] = self.parent
        if turn == len(self.turns) - 1:
            headers["x-tidegate-session-final"] = "true"
        return headers


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """Root sessions in the order of their start. ``shared``: tokens of each kind's system prompt, tools included;
    ``tools``: of those, with which every prompt begins."""

    roots: tuple[AgentSession, ...]
    shared: dict[str, int]
    tools: int

    @property
    def sessions(self) -> tuple[AgentSession, ...]:
        """Sub-agents included, parents first."""
        return tuple(_with_children(self.roots))

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def _with_children(sessions: Sequence[AgentSession]) -> Iterator[AgentSession]:
    for session in sessions:
        yield session
        for turn in session.turns:
            yield from _with_children(turn.children)


def plan(count: int, seed: int, scales: Scales) -> AgentPlan:
    """``count`` root sessions; equal arguments give equal plans."""
    plain = generate("swe", count=count, seed=seed, shared_tokens=SHARED_TOKENS)
    trees = generate("tree", count=count, seed=seed, shared_tokens=SHARED_TOKENS)
    programs = [(trees if number % TREE_EVERY == TREE_AT else plain)[number] for number in range(count)]
    maker = _Maker(seed, scales)
    roots = tuple(maker.session(program) for program in programs)
    tokenizer = Tokenizer()
    shared = {}
    for kind, prompt in maker.prompts.items():
        text = tokenizer.template.render([{"role": "system", "content": prompt}], TOOLS, add_generation_prompt=False)
        shared[kind] = len(tokenizer.encode(text))
    tools = tokenizer.template.render([], TOOLS, add_generation_prompt=False)
    return AgentPlan(roots, shared, len(tokenizer.encode(tools)))


class _Maker:
    def __init__(self, seed: int, scales: Scales) -> None:
        self._seed = seed
        self._scales = scales
        self.prompts: dict[str, str] = {}

    def session(self, program: Program) -> AgentSession:
        if program.label not in self.prompts:
            self.prompts[program.label] = self._words(program.label, SHARED_TOKENS / self._scales.tokens - TOOLS_TOKENS)
        turns = []
        known = SHARED_TOKENS
        for number, turn in enumerate(program.turns):
            key = f"{program.name}/{number}"
            output = turn.output_tokens / self._scales.tokens
            turns.append(
                AgentTurn(
                    text=f"{key} "
                    + self._words(key, (turn.prompt_tokens - known) / self._scales.tokens - RESULT_TOKENS),
                    tool=turn.tool,
                    command=self._words(f"{key}/command", output - CALL_TOKENS),
                    max_tokens=max(4, round(output)),
                    gap_s=turn.gap_s / self._scales.time,
                    children=tuple(self.session(child) for child in turn.children),
                )
            )
            known = turn.prompt_tokens + turn.output_tokens
        return AgentSession(program.name, program.label, self.prompts[program.label], tuple(turns), program.parent)

    def _words(self, key: str, tokens: float) -> str:
        return words(self._seed, key, max(1, round(tokens / TOKENS_A_WORD)))
