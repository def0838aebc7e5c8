"""What a soak sees of the system besides its answers: who leads, whether all is well, what is in flight, what is on the
disk."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus
from load.soak.books import Level
from load.soak.house import House
from load.soak.parts import BLOCK_SIZE, MODEL
from load.soak.plan import ADMISSIONS, ENGINES, INDEXERS, INGRESSES
from schemas.base import UNDECODABLE, from_msgpack, to_msgpack
from schemas.index import MatchReply, MatchRequest
from schemas.trace import RequestMetrics, TraceRow
from segments.format import members, segment_indices, segment_name, unwrap

_SAMPLE_S = 0.5
_ASKS = 8
"""Questions to the indexers in which each of two answers at least once, but for one time in a hundred."""
_PRESSURE = (Path("/proc/pressure/cpu"), Path("/proc/pressure/io"))
_PREFIX = "tidegate"
_row = msgspec.json.Decoder(TraceRow)


@dataclass(frozen=True, slots=True)
class Still:
    """What is in flight when nobody asks any more: zero everywhere, or something leaked."""

    open_grants: int
    requests_open: int
    held: int
    in_flight: int
    engines_running: int

    @property
    def clean(self) -> bool:
        return self == Still(0, 0, 0, 0, 0)


class Watch:
    """``bus``: a connection of its own, past every relay. ``levels`` grows while `sample` runs, and so does
    ``shortage``: Unix seconds and `short_s` (nothing where the machine does not say). ``two_leaders``: how often two
    admissions were seen to lead at the same time."""

    def __init__(self, house: House, bus: Bus) -> None:
        self.levels: list[Level] = []
        self.shortage: list[tuple[float, float]] = []
        self.two_leaders = 0
        self._house = house
        self._bus = bus

    async def sample(self) -> None:
        """For ever, twice a second."""
        while True:
            short = short_s()
            if short is not None:
                self.shortage.append((time.time(), short))
            leaders = await self.leaders()
            # Two pages are read one after the other: the leadership may have gone over between them. It has not where
            # the first still leads after the second did.
            if len(leaders) > 1 and leaders[0] in await self.leaders():
                self.two_leaders += 1
            if len(leaders) == 1:
                open_ = total(await self._house.page(leaders[0]), "tidegate_requests_open")
                self.levels.append(Level(time.time(), open_, await self._in_flight()))
            await asyncio.sleep(_SAMPLE_S)

    async def leaders(self) -> list[str]:
        """The admissions that say they lead."""
        pages = [(name, await self._house.page(name)) for name in ADMISSIONS]
        return [name for name, page in pages if total(page, "tidegate_leader")]

    async def not_whole(self) -> str | None:
        """``None`` when every part is ready, one admission leads and each indexer's sources are ``synced``."""
        ended = self._house.ended()
        if ended:
            return f"{', '.join(ended)} not running"
        for name in self._house.parts:
            if not await self._house.ready(name):
                return f"{name} not ready"
        leaders = await self.leaders()
        if len(leaders) != 1:
            return f"{len(leaders)} admissions lead"
        return await self._not_synced()

    async def still(self) -> Still:
        """Both admissions together, all front doors, all engines."""
        admissions = [await self._house.page(name) for name in ADMISSIONS]
        engines = [await self._house.page(name) for name in ENGINES]
        return Still(
            open_grants=sum(total(page, "tidegate_open_grants") for page in admissions),
            requests_open=sum(total(page, "tidegate_requests_open") for page in admissions),
            held=sum(total(page, "tidegate_queue_depth", 'queue="admission_hold"') for page in admissions),
            in_flight=await self._in_flight(),
            engines_running=sum(total(page, "vllm:num_requests_running") for page in engines),
        )

    async def _in_flight(self) -> int:
        return sum([total(await self._house.page(name), "tidegate_ingress_in_flight") for name in INGRESSES])

    async def _not_synced(self) -> str | None:
        question = to_msgpack(MatchRequest(model=MODEL, block_size=BLOCK_SIZE, chain=b""))
        heard: set[str] = set()
        for _ in range(_ASKS):
            try:
                answer = await self._bus.request(subjects.INDEX_MATCH, question, timeout_s=1.0)
                reply = from_msgpack(answer.payload, MatchReply)
            except (BusError, *UNDECODABLE) as error:
                return f"an indexer does not answer: {error}"
            health = {match.worker: match.health for match in reply.matches}
            wrong = [f"{name} {health.get(name, 'unknown')}" for name in ENGINES if health.get(name) != "synced"]
            if wrong:
                return f"{reply.indexer}: {', '.join(wrong)}"
            heard.add(reply.indexer)
            if len(heard) == len(INDEXERS):
                return None
        return f"only {', '.join(heard)} answers of the indexers"


def total(page: str, name: str, label: str = "") -> int:
    """The sum of a metric's samples with this label; 0 where there is none."""
    found = 0.0
    for line in page.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and label in sample:
            found += float(value)
    return round(found)


def recorded(folder: Path) -> list[RequestMetrics]:
    """The request_end rows on the disk, repeated ones included; a torn end (its recorder was killed) is left out, as
    every reader does."""
    rows = []
    for index in segment_indices(_PREFIX, [path.name for path in folder.iterdir()]):
        for member in members((folder / segment_name(_PREFIX, index)).read_bytes()):
            for line in member.lines:
                row = _row.decode(unwrap(line))
                if row.event_type == "request_end" and row.request is not None:
                    rows.append(row.request)
    return rows


def short_s() -> float | None:
    """Seconds since boot in which something that could run waited for a processor or a disk (Linux's pressure stall
    information); ``None`` where the machine does not say."""
    try:
        lines = [path.read_text(encoding="ascii").splitlines()[0] for path in _PRESSURE]
        return sum(int(line.rpartition("total=")[2]) for line in lines) / 1e6
    except (OSError, IndexError, ValueError):
        return None
