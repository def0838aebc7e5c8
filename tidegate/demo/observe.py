"""The demo's watchers: decisions and trace rows from the bus, what each engine served, what the recorder wrote."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Collection
from contextlib import aclosing
from pathlib import Path

from bus.interface import Bus, BusMessage, Subscription
from bus.subjects import ROOT, decode_id
from bus.tasks import Tasks
from schemas.base import from_json
from schemas.decision import Decision
from schemas.trace import TraceRow
from segments.format import members, segment_indices, segment_name, unwrap
from tidegate.errors import TidegateError
from tidegate.rows import read_row
from web.client import HttpClient, Timeouts
from web.errors import WebError


class Watcher:
    """Collects from the bus between `start` and `stop`. ``decisions``: request ids by worker, as the subjects say;
    ``stored``: request ids of the rows in order, repeats included."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks = Tasks()
        self._subscription: Subscription | None = None
        self._new_row = asyncio.Event()
        self.decisions: dict[str, list[str]] = defaultdict(list)
        self.rows: dict[str, TraceRow] = {}
        self.stored: list[str] = []

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(f"{ROOT}.decision.>", self._on_decision)
        await self._bus.flush()
        self._tasks.start("rows", self._read_rows())

    async def wait_for_rows(self, requests: Collection[str], timeout_s: float) -> None:
        """Until these requests have their row, or the time is over: the figures will tell."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.rows.keys() >= set(requests):
                    self._new_row.clear()
                    await self._new_row.wait()
        except TimeoutError:
            return

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        await self._tasks.stop()

    def _on_decision(self, message: BusMessage) -> None:
        decision = from_json(message.payload, Decision)
        worker = decode_id(message.subject.rsplit(".", 1)[1]) or decision.worker
        self.decisions[worker].append(decision.request_id)

    async def _read_rows(self) -> None:
        async with aclosing(self._bus.tail(f"{ROOT}.trace.request_end.>")) as rows:
            async for stored in rows:
                row = read_row(stored.payload)
                if row is not None and row.request is not None:
                    self.stored.append(row.request.request_id)
                    self.rows[row.request.request_id] = row
                    self._new_row.set()


async def fetch_served(engines: dict[str, str]) -> dict[str, list[str]]:
    """Request ids that each simulated engine (worker to URL) says it served. Raises `TidegateError`."""
    client = HttpClient()
    served = {}
    try:
        for worker, url in engines.items():
            answer = await client.fetch("GET", f"{url}/sim/served", [], b"", Timeouts(total_s=5.0))
            served[worker] = served_requests(answer.body)
    except (WebError, ValueError, LookupError, TypeError) as error:
        raise TidegateError(f"an engine does not say what it served: {error!r}") from error
    finally:
        await client.close()
    return served


def served_requests(body: bytes) -> list[str]:
    """The ids in an engine's answer to ``GET /sim/served``."""
    return [str(request) for request in json.loads(body)["served"]]


def recorded_requests(directory: Path, prefix: str = "tidegate") -> list[str]:
    """Request ids of the request_end rows in the recorder's segments, in order, repeats included; a torn
    end (its recorder was killed) is left out, as every reader does."""
    requests = []
    for index in segment_indices(prefix, [path.name for path in directory.iterdir()]):
        for member in members((directory / segment_name(prefix, index)).read_bytes()):
            for line in member.lines:
                row = read_row(unwrap(line))
                if row is not None and row.event_type == "request_end" and row.request is not None:
                    requests.append(row.request.request_id)
    return requests
