"""Programs: what the laboratory runs. A program is one agent session: turns with tool gaps between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from load.sim.content import Chain


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and what follows it.

    ``prompt_tokens`` is the whole prompt, ``new_tokens`` what of it no cache of any size could hold. ``chain``: content
    of prompt and output. ``tool``: what the program calls next (``None``: nothing, it is over), for ``gap_s`` seconds.
    ``children`` start when the turn ends; the next turn waits for them too. ``fails``: at its first token (or where it
    waits for that for too long) its client goes away and the program with it (``abort``), or asks again (``retry``).
    """

    prompt_tokens: int
    output_tokens: int
    new_tokens: int
    chain: Chain
    tool: str | None = None
    gap_s: float = 0.0
    children: tuple[Program, ...] = ()
    fails: Literal["", "abort", "retry"] = ""


@dataclass(frozen=True, slots=True)
class Program:
    """``label``: its class, as an agent type would name it. ``arrival_s``: its start (open loop; children: with their
    parent's turn). ``single``: one request without a session, which no figure of programs counts."""

    name: str
    label: str
    arrival_s: float
    turns: tuple[Turn, ...]
    parent: str | None = None
    single: bool = False

    @property
    def final_tokens(self) -> int:
        """Its last context, in tokens."""
        return self.turns[-1].prompt_tokens + self.turns[-1].output_tokens


def with_children(programs: Sequence[Program]) -> Iterator[Program]:
    """``programs`` and everything they start, parents first."""
    for program in programs:
        yield program
        for turn in program.turns:
            yield from with_children(turn.children)
