"""One trace, two replays: the online player and the laboratory send each request at the same moment; and where answers
take as long as they took, that is when it was recorded to go."""

from __future__ import annotations

import heapq
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.sim.clock import PS_PER_MS
from load.sim.played import node_rows, played
from load.sim.recorded import load_recording
from load.sim.replays import figures
from load.sim.run import SimConfig
from load.sim.timing import LinearRun, Work
from services.admission.policies.round_robin import RoundRobin
from tests.unit.tidegate.trace.making import SAMPLE, Row, request_row, write
from tidegate.replay.player import Begin, Dispatch, Effect, Ended, Player, Tick
from tidegate.trace.agentic_mooncake import agentic_mooncake_lines, laboratory_lines
from tidegate.trace.figures import Figures
from tidegate.trace.plays import PlayNode, Plays, read_plays
from tidegate.trace.reading import read_trace
from tidegate.trace.replayable import playable
from tidegate.trace.writing import write_lines

ENOUGH, LITTLE = 200_000, 6_000
"""KV tokens of a worker: for all, and such that the long requests of some traces cannot be served."""

Times = dict[int, float]


class OneMillisecond:
    """Of every iteration: how long an answer takes depends on its own length alone."""

    kv_tokens = ENOUGH
    kv_bytes = 1
    longest_run = 1 << 20

    def step(self, work: Work) -> int:
        del work
        return PS_PER_MS

    def decode_run(self, decodes: int, context: int, steps: int) -> LinearRun:
        del decodes, context, steps
        return LinearRun(PS_PER_MS, 0)


def online(nodes: Sequence[PlayNode], takes: Callable[[int], float | None], speed: float, lanes: int | None) -> Times:
    """When the player sends each; ``takes``: ms of its answer, ``None``: it fails at once."""
    player = Player(nodes, speed=speed, lanes=lanes)
    sent: Times = {}
    ends: list[tuple[float, int]] = []

    def carry_out(effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                sent[effect.node] = now
                heapq.heappush(ends, (now + (takes(effect.node) or 0.0), effect.node))

    carry_out(player.handle(Begin(), 0.0), 0.0)
    while not player.done:
        due = math.inf if player.next_ms is None else player.next_ms
        if ends and ends[0][0] <= due:
            now, number = heapq.heappop(ends)
            carry_out(player.handle(Ended(number, takes(number) is not None), now), now)
        else:
            carry_out(player.handle(Tick(), due), due)
    return sent


def offline(plays: Plays, speed: float, lanes: int | None, kv_tokens: int) -> tuple[Times, Times]:
    """When the laboratory sends each that is served, and how long that takes, on workers that nobody waits for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plays.jsonl"
        write_lines(laboratory_lines(plays), path)
        recording = load_recording(path, speed=speed)
    config = SimConfig(
        workers=len(plays.nodes), timing=OneMillisecond(), kv_tokens=kv_tokens, block_size=recording.block_size
    )
    result, skipped = played(recording, RoundRobin(), config, lanes)
    assert set(figures(recording, result, skipped)) >= set(Figures.__struct_fields__)
    rows = {number: result.turns[place] for number, place in node_rows(recording, result).items()}
    sent = {number: row.ready_s * 1000 for number, row in rows.items()}
    return sent, {number: (row.finished_s - row.ready_s) * 1000 for number, row in rows.items()}


def agree(plays: Plays, speed: float, lanes: int | None, kv_tokens: int = ENOUGH) -> int:
    """How many were served, by both at the same moments."""
    there, takes = offline(plays, speed, lanes, kv_tokens)
    here = online(plays.nodes, takes.get, speed, lanes)
    assert {number: here[number] for number in there} == pytest.approx(there, abs=1e-6)
    return len(there)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLE.parent.glob("*.jsonl*")))
@pytest.mark.parametrize(("speed", "lanes"), [(1.0, None), (5.0, None), (2.0, 2)])
def test_recorded_traces_go_the_same_way_in_both(name: str, speed: float, lanes: int | None) -> None:
    """All formats; also where some cannot be served, and what waits for them is skipped."""
    plays = read_plays([SAMPLE.parent / name])
    assert agree(plays, speed, lanes) == len(plays.nodes)
    agree(plays, speed, lanes, LITTLE)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Agents and sub-agents whose requests overlap or not, and requests of nobody."""
    parents = {"a": None, "b": None, "b1": "b", "b2": "b", "b21": "b2"}
    found = []
    for number in range(draw(st.integers(1, 14))):
        session = draw(st.sampled_from([None, *parents]))
        start = draw(st.integers(0, 60))
        end = start + draw(st.sampled_from((0, 1, 4, 30)))
        parent = None if session is None else parents[session]
        found.append(request_row(f"r{number}", start, end, session, parent, hashes=[number, 99]))
    return found


@pytest.mark.long
@given(rows(), st.sampled_from((None, 1, 2)))
def test_any_rows(found: list[Row], lanes: int | None) -> None:
    """Both go the same way; at recorded durations every request goes when it did; and the same holds of the trace as
    agentic Mooncake."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows.jsonl", found)
        plays = read_plays([path])
        exported = Path(folder) / "agentic.jsonl"
        write_lines(agentic_mooncake_lines(playable(read_trace([path]))), exported)
        again = read_plays([exported])
    assert agree(plays, 1.0, lanes) == agree(again, 1.0, lanes) == len(found)
    recorded = [node.recorded for node in plays.nodes]
    began = min(each.start_ms for each in recorded if each is not None)
    took = {number: each.end_ms - each.start_ms for number, each in enumerate(recorded) if each is not None}
    sent = online(plays.nodes, took.get, 1.0, None)
    assert sent == {number: each.start_ms - began for number, each in enumerate(recorded) if each is not None}
    place = {node.request_id: number for number, node in enumerate(plays.nodes)}
    later = online(again.nodes, lambda number: took[place[again.nodes[number].request_id]], 1.0, None)
    assert {again.nodes[number].request_id: at for number, at in later.items()} == {
        plays.nodes[number].request_id: at for number, at in sent.items()
    }
