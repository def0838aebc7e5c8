"""One replay: the player's effects as requests, their ends as its events."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from tidegate.replay.content import Prompts
from tidegate.replay.endpoint import Asked, Endpoint
from tidegate.replay.player import Begin, Dispatch, Effect, Ended, Player, Tick
from tidegate.replay.report import Results
from tidegate.trace.play_nodes import PlayNode


class Listener(Protocol):
    """Hears how a run goes on."""

    def sent(self) -> None:
        """One request goes out."""

    def ended(self, failed: bool, skipped: int) -> None:
        """One request ended, and with it so many that will not be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What requests are called. ``suffix`` follows every session's name, so that a run's sessions are its own and not
    those of the recording or of another run. ``models``: node's model to what the endpoint is asked for."""

    models: dict[str | None, str]
    suffix: str = ""
    wants_ids: bool = False


class Run:
    """``results`` grow while `play` runs, so that they are there when it is cancelled."""

    def __init__(
        self,
        nodes: Sequence[PlayNode],
        player: Player,
        prompts: Prompts,
        endpoint: Endpoint,
        naming: Naming,
        listener: Listener,
    ) -> None:
        self.results = Results(told={}, due_ms={}, quiet=[])
        self._nodes = nodes
        self._player = player
        self._prompts = prompts
        self._endpoint = endpoint
        self._naming = naming
        self._listener = listener
        self._last = last_of_sessions(nodes)
        self._ended: list[Ended] = []
        self._wake = asyncio.Event()
        self._zero_s = 0.0

    async def play(self) -> None:
        """All of it. What is under way is cut when this is cancelled."""
        self._zero_s = time.monotonic()
        cpu_s = time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                self._carry_out(self._player.handle(Begin(), self._now_ms()), group)
                while not self._player.done:
                    await self._wait()
                    ended, self._ended = self._ended, []
                    for each in ended:
                        self._carry_out(self._player.handle(each, self._now_ms()), group)
                    self._carry_out(self._player.handle(Tick(), self._now_ms()), group)
        finally:
            self.results.wall_s = time.monotonic() - self._zero_s
            self.results.cpu_s = time.process_time() - cpu_s
            self.results.sent_back = self._prompts.sent_back
            self.results.not_told = self._prompts.not_told

    def _now_ms(self) -> float:
        """By the clock and not the loop's own time, which stands still while the loop is busy."""
        return (time.monotonic() - self._zero_s) * 1000

    async def _wait(self) -> None:
        """Until a request ended, or the next one is due."""
        due_ms, timer = self._player.next_ms, None
        if due_ms is not None:
            delay_s = max(0.0, (due_ms - self._now_ms()) / 1000)
            timer = asyncio.get_running_loop().call_later(delay_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._wake.clear()

    def _carry_out(self, effects: Sequence[Effect], group: asyncio.TaskGroup) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                self.results.due_ms[effect.node] = effect.due_ms
                self._listener.sent()
                group.create_task(self._send(effect.node))
            else:
                self.results.quiet.append(effect)
                if effect.skipped:
                    self._listener.ended(True, effect.skipped)

    async def _send(self, number: int) -> None:
        told = await self._endpoint.ask(self._asked(number), self._now_ms)
        if told.reason is None:
            self._prompts.ended(number, told.token_ids)
        self.results.told[number] = replace(told, token_ids=None)  # of a long run they would be gigabytes
        self._listener.ended(told.reason is not None, 0)
        self._ended.append(Ended(number, told.reason is None))
        self._wake.set()

    def _asked(self, number: int) -> Asked:
        node, naming = self._nodes[number], self._naming
        session, parent = sessions_of(node, naming.suffix)
        return Asked(
            request_id=node.request_id,
            model=naming.models[node.model],
            prompt=self._prompts.prompt(number),
            output_tokens=node.output_tokens,
            session=session,
            parent=parent,
            final=number in self._last,
            wants_ids=naming.wants_ids,
        )


def sessions_of(node: PlayNode, suffix: str) -> tuple[str | None, str | None]:
    """Its session and its parent's, as they are sent. Of a title or a compaction none: without its harness's marks it
    would be taken for a turn of its session."""
    if node.is_single or node.is_aside:
        return None, None
    return node.session + suffix, None if node.parent is None else node.parent + suffix


def last_of_sessions(nodes: Sequence[PlayNode]) -> set[int]:
    """Numbers of the turns that began last: they end their sessions."""
    last: dict[tuple[str, str], int] = {}
    for number, node in enumerate(nodes):
        if not node.is_aside:
            last[node.play, node.session] = number
    return set(last.values())


def first_plays(nodes: Sequence[PlayNode], limit: int | None) -> list[PlayNode]:
    """The nodes of the first ``limit`` plays, by the beginning of their first node; all without a limit."""
    names = list(dict.fromkeys(node.play for node in nodes))[:limit]
    kept = set(names)
    return [node for node in nodes if node.play in kept]


def raise_open_files() -> None:
    """Each stream is a connection: take as many as the system lets this process have."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
