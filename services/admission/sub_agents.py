"""Which sub-agents are over, though nobody says so: most harnesses never name a sub-agent's last request.

A sub-agent answers its parent with a turn that calls no tool. One that has called tools before is over with it. Of one
that never called any, nobody can tell what its answers mean (its tools may be plain text); it is taken for over when it
is idle and its parent goes on. A sub-agent that comes back is a new program.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.admission.estimators.least_recent import LeastRecentlyUsed

MAX_SUB_AGENTS = 65_536


@dataclass(slots=True)
class _SubAgent:
    parent: str
    open_turns: int = 0
    called_tools: bool = False
    answered: bool = False


class SubAgents:
    """Sub-agents by name; the longest untouched one makes room. Turns are to be balanced: each that `began` is `ended`
    once."""

    def __init__(self, limit: int = MAX_SUB_AGENTS) -> None:
        self._known: LeastRecentlyUsed[str, _SubAgent] = LeastRecentlyUsed(limit, lambda: _SubAgent(""), self._left)
        self._of: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, parent: str) -> tuple[str, ...]:
        """Sub-agents of ``parent`` that are not over."""
        return tuple(self._of.get(parent, ()))

    def began(self, name: str, parent: str | None) -> list[str]:
        """A turn of ``name`` waits or runs. Returns the sub-agents that are over by it; they are forgotten."""
        if parent is not None and parent != name:
            child = self._known.use(name)
            if child.parent != parent:
                self._unlink(name, child)
                child.parent = parent
                self._of.setdefault(parent, {})[name] = None
            child.open_turns += 1
            child.answered = False
        over = [each for each in self.of(name) if self._is_over(each)]
        for each in over:
            self.forget(each)
        return over

    def _is_over(self, name: str) -> bool:
        child = self._known.peek(name)
        return child is None or (child.answered and not child.open_turns)

    def ended(self, name: str, tool: str | None = None, *, completed: bool = False) -> bool:
        """A turn of ``name`` is over. Returns whether the sub-agent is over with it."""
        child = self._known.peek(name)
        if child is None:
            return False
        child.open_turns = max(0, child.open_turns - 1)
        if not completed:
            return False
        child.called_tools = child.called_tools or tool is not None
        child.answered = tool is None
        return child.answered and child.called_tools and not child.open_turns

    def forget(self, name: str) -> None:
        """It is over."""
        child = self._known.drop(name)
        if child is not None:
            self._unlink(name, child)

    def _left(self, name: str, child: _SubAgent) -> None:
        self._unlink(name, child)

    def _unlink(self, name: str, child: _SubAgent) -> None:
        siblings = self._of.get(child.parent)
        if siblings is not None:
            siblings.pop(name, None)
            if not siblings:
                del self._of[child.parent]
