"""What the hints service hears: admission, and a bridge whose engine does what a test says."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from bus import subjects
from bus.facts import FactNumbers
from bus.interface import BusMessage
from bus.nats import NatsBus
from bus.tasks import Tasks
from schemas.base import from_json, to_json
from schemas.hint import ActionResult, HintCommand, HintOutcome, HintResult
from schemas.session import Lease, SessionFact, SessionKey
from schemas.worker import WorkerProfile, WorkerState
from tests.support.processes import HelperProcess

KEY = SessionKey(family="dynamo", root="s with.odd*id")
WORKER = "w/1"

Results = tuple[ActionResult, ...]


def answers(outcome: HintOutcome) -> Callable[[HintCommand], Awaitable[Results | None]]:
    """An engine of which every action has this outcome."""

    async def answer(command: HintCommand) -> Results:
        return tuple(
            ActionResult(action_id=each.action_id, action_type=each.action_type, outcome=outcome)
            for each in command.envelope.actions
        )

    return answer


class Scripted:
    """``lower``: what the bridge does with a command; ``None`` of it: the command is lost."""

    def __init__(self, bus: NatsBus, lower: Callable[[HintCommand], Awaitable[Results | None]]) -> None:
        self._bus = bus
        self._lower = lower
        self._sessions = FactNumbers("admission-1", 1)
        self._bridge = FactNumbers("bridge-w1", 1)
        self._tasks = Tasks()
        self.commands: list[HintCommand] = []
        self.answered = 0

    async def start(self) -> None:
        await self._bus.subscribe(subjects.hint(WORKER), self._on_hint)

    async def stop(self) -> None:
        await self._tasks.stop()

    def worker(self, kv_tokens: int = 10_000) -> None:
        profile = WorkerProfile(
            url="http://x", model="m", engine="simulated", block_size=16, kv_tokens=kv_tokens, features=("tier:host",)
        )
        state = WorkerState(
            **self._bridge.stamp("worker.state", time.time()),
            worker=WORKER, incarnation="1", health="ready", profile=profile,
        )  # fmt: skip
        self._bus.publish(subjects.worker_state(WORKER), to_json(state))

    def session(self, state: Any, key: SessionKey = KEY, *, tokens: int = 1000, leased_s: float = 0.0) -> None:
        now = time.time()
        lease = None
        if leased_s:
            ends = int((now + leased_s) * 1000)
            lease = Lease(owner=key.text(), epoch=1, since_ms=int(now * 1000), expires_ms=ends, tokens=tokens)
        fact = SessionFact(
            **self._sessions.stamp(f"session.{state}", now),
            session=key, session_id=key.root, state=state, worker=WORKER, rank=0, context_tokens=tokens, lease=lease,
        )  # fmt: skip
        self._bus.publish(subjects.session(state, key.text()), to_json(fact))

    @property
    def actions(self) -> list[str]:
        return [action.action_type for command in self.commands for action in command.envelope.actions]

    def payload(self, number: int) -> dict[str, Any]:
        """Of the action that was sent as the ``number``-th."""
        return [action.payload for command in self.commands for action in command.envelope.actions][number]

    def _on_hint(self, message: BusMessage) -> None:
        command = from_json(message.payload, HintCommand)
        self.commands.append(command)
        self._tasks.start("hint", self._answer(command))

    async def _answer(self, command: HintCommand) -> None:
        results = await self._lower(command)
        self.answered += 1
        if results is None:
            return
        self._bus.publish(subjects.hint_result(WORKER), to_json(self.result(command, results)))

    def result(self, command: HintCommand, results: Results) -> HintResult:
        """As the worker's bridge answers it."""
        return HintResult(
            **self._bridge.stamp("hint.result", time.time()),
            worker=WORKER, rank=0, session=command.session, message_id=command.envelope.message_id, results=results,
        )  # fmt: skip


async def leads(process: HelperProcess) -> None:
    """Until the service leads."""
    await process.wait_said("leadership key=hints epoch=")


def metrics(process: HelperProcess) -> dict[tuple[str, ...], float]:
    """The service's page: values by name and label values, in the order of the labels' names."""
    found = re.search(r"http_listening url=(\S+)", process.stderr)
    assert found is not None, process.output
    with urlopen(f"{found[1]}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {(each.name, *(value for _, value in sorted(each.labels.items()))): each.value for each in samples}
