"""Recorded requests as a graph: triggers, delays, lanes and failures against a naive clock; prefixes against tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.sim import workloads
from load.sim.clock import PS_PER_MS, to_ps
from load.sim.played import PlayedSimulation, node_rows, played
from load.sim.programs import Program, with_children
from load.sim.recorded import Node, Recording, Wait, read_recording
from load.sim.requests import SimRequest
from load.sim.run import SimConfig, simulate
from load.sim.timing import LinearRun, Work
from load.sim.traces import TraceError
from services.admission.policies.registry import make_policy
from services.admission.policies.round_robin import RoundRobin

KV_TOKENS = 4_096
TOO_MANY = 10_000


class OneMillisecond:
    """Every iteration takes 1 ms, so that a request alone on its worker takes as many as it has output tokens."""

    kv_tokens = KV_TOKENS
    kv_bytes = 1
    longest_run = 1 << 20

    def step(self, work: Work) -> int:
        del work
        return PS_PER_MS

    def decode_run(self, decodes: int, context: int, steps: int) -> LinearRun:
        del decodes, context, steps
        return LinearRun(PS_PER_MS, 0)


@dataclass(frozen=True)
class Request:
    """What a test wants of one: times in ms; ``waits``: (number, trigger, delay)."""

    play: int
    session: int
    output: int
    not_before: int
    waits: tuple[tuple[int, str, int], ...]
    is_too_large: bool = False


def recording_of(requests: Sequence[Request], speed: float = 1.0) -> Recording:
    lines: list[dict[str, Any]] = [
        {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 16, "hash_id_scope": "global"}
    ]
    for number, request in enumerate(requests):
        lines.append(
            {
                "request_id": str(number),
                "play_id": f"play-{request.play}",
                "session_id": f"{request.play}/{request.session}",
                "input_length": TOO_MANY if request.is_too_large else 16,
                "output_length": request.output,
                "hash_ids": [number],
                "not_before_ms": request.not_before,
                "dependencies": [
                    {"request_id": str(other), "trigger": trigger, "delay_ms": delay, "relation": "sequence"}
                    for other, trigger, delay in request.waits
                ],
            }
        )
    return read_recording([json.dumps(line).encode() for line in lines], speed=speed)


@st.composite
def graphs(draw: st.DrawFn) -> list[Request]:
    """Requests that wait for any before them of their play."""
    requests: list[Request] = []
    for number in range(draw(st.integers(1, 9))):
        play = draw(st.integers(0, 2))
        before = [each for each in range(number) if requests[each].play == play]
        chosen = draw(st.lists(st.sampled_from(before), max_size=3, unique=True)) if before else []
        requests.append(
            Request(
                play=play,
                session=draw(st.integers(0, 2)),
                output=draw(st.integers(1, 6)),
                not_before=draw(st.sampled_from((0, 0, 3, 20))),
                waits=tuple(
                    (each, draw(st.sampled_from(("dispatch", "completion"))), draw(st.sampled_from((0, 1, 5, 13))))
                    for each in chosen
                ),
                is_too_large=draw(st.sampled_from((False, False, False, False, True))),
            )
        )
    return requests


class Naive:
    """Looks at every request in every millisecond."""

    def __init__(self, requests: Sequence[Request], lanes: int | None) -> None:
        self.requests = requests
        self.sent: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.failed: set[int] = set()
        self.skipped: set[int] = set()
        plays = list(dict.fromkeys(request.play for request in requests))
        zero: dict[int, int] = {} if lanes is not None else dict.fromkeys(plays, 0)
        now = 0
        while len(self.sent) + len(self.skipped) < len(requests) or any(end > now for end in self.ended.values()):
            changed = True
            while changed:
                changed = False
                for play in plays if lanes is not None else ():
                    open_plays = [each for each in zero if not self._is_over(each, now)]
                    if play not in zero and len(open_plays) < (lanes or 0):
                        free = [each.not_before for each in requests if each.play == play and not each.waits]
                        zero[play] = now - min(free)
                        changed = True
                for number, request in enumerate(requests):
                    if number not in self.sent and number not in self.skipped:
                        changed |= self._look(number, request, zero.get(request.play), now)
            now += 1
            assert now < 1_000

    def _look(self, number: int, request: Request, zero: int | None, now: int) -> bool:
        if any(
            other in self.skipped or (other in self.failed and trigger == "completion")
            for other, trigger, _ in request.waits
        ):
            self.skipped.add(number)
            return True
        fired = [
            (self.sent if trigger == "dispatch" else self.ended).get(other, 1_000_000) + delay
            for other, trigger, delay in request.waits
        ]
        if zero is None or now < max([zero + request.not_before, *fired]):
            return False
        self.sent[number] = now
        if request.is_too_large:
            self.failed.add(number)
        else:
            self.ended[number] = now + request.output
        return True

    def _is_over(self, play: int, now: int) -> bool:
        own = [number for number, request in enumerate(self.requests) if request.play == play]
        return all(
            number in self.skipped or number in self.failed or self.ended.get(number, now + 1) <= now for number in own
        )


@pytest.mark.long
@given(graphs(), st.sampled_from((None, None, 1, 2)))
def test_a_graph_goes_as_a_naive_clock_says(requests: list[Request], lanes: int | None) -> None:
    """Every request is sent and ends in the same millisecond; what fails or waits for that is the same."""
    naive = Naive(requests, lanes)
    recording = recording_of(requests)
    config = SimConfig(workers=len(requests), timing=OneMillisecond(), kv_tokens=KV_TOKENS)
    result, skipped = played(recording, RoundRobin(), config, lanes)
    places = node_rows(recording, result)
    seen = {number: result.turns[place] for number, place in places.items()}
    assert {number: round(row.ready_s * 1000, 6) for number, row in seen.items()} == {
        number: naive.sent[number] for number in naive.ended
    }
    assert {number: round(row.finished_s * 1000, 6) for number, row in seen.items()} == naive.ended
    assert (result.refused, skipped, result.unfinished) == (len(naive.failed), len(naive.skipped), 0)


def test_speed_divides_delays() -> None:
    """Not the time that a request takes."""
    requests = [Request(0, 0, 4, 20, ()), Request(0, 0, 4, 0, ((0, "completion", 10),))]
    config = SimConfig(workers=2, timing=OneMillisecond(), kv_tokens=KV_TOKENS)
    result, _ = played(recording_of(requests, speed=5.0), RoundRobin(), config)
    assert [round(row.ready_s * 1000, 6) for row in result.turns] == [4, 10]


@pytest.mark.parametrize(
    "lines", [[], [b"{}"], [b'{"schema": "", "version": 2, "block_size": 16, "hash_id_scope": ""}', b"{}"]]
)
def test_a_file_that_is_not_as_it_should_be(lines: list[bytes]) -> None:
    """One error, which names the line where there is one."""
    with pytest.raises(TraceError, match=r"line|no requests"):
        read_recording(lines)


class Watched(PlayedSimulation):
    """Notes how many turns of one program ran at once."""

    most = 0

    def _finished(self, turn: Any, request: SimRequest) -> None:
        same = [each for each in self._open.values() if each.running is turn.running]
        self.most = max(self.most, len(same) + 1)
        super()._finished(turn, request)


def test_turns_of_a_session_overlap() -> None:
    """Two requests that go with the dispatch of a third run beside it, and the session ends with the last of them."""
    requests = [Request(0, 0, 6, 0, ()), Request(0, 0, 6, 0, ((0, "dispatch", 1),)), Request(0, 0, 6, 0, ())]
    recording = recording_of(requests)
    config = SimConfig(workers=3, timing=OneMillisecond(), kv_tokens=KV_TOKENS)
    watched = Watched(recording.programs, RoundRobin(), config, recording=recording)
    result = watched.run()
    assert (watched.most, len(result.turns), watched._alive) == (3, 3, {})


@dataclass(frozen=True)
class Prompt:
    """``letters``: what its blocks hold; ``content``: letters of prompt and answer, of the first ``known`` tokens."""

    letters: str
    length: int
    output: int
    content: str
    known: int


@st.composite
def prompts(draw: st.DrawFn, block: int) -> Prompt:
    content = draw(st.text("ab", min_size=1, max_size=5))
    length = draw(st.integers(1, len(content) * block))
    known = draw(st.integers(length, len(content) * block))
    blocks = -(-length // block)
    return Prompt(
        content[:blocks], length, draw(st.integers(max(1, known - length), known - length + 40)), content, known
    )


def ids_of(letters: str, length: int, block: int) -> list[str]:
    """Of whole blocks, and of a partial one at the end: chained."""
    whole = [letters[: end + 1] for end in range(length // block)]
    return whole + ([f"{letters[: length // block + 1]}+{length % block}"] if length % block else [])


@pytest.mark.long
@given(st.data(), st.sampled_from((4, 16, 24, 32)))
def test_prefixes_are_found_as_ids_say(data: st.DataObject, block: int) -> None:
    """One request after another on one worker: each finds the longest whole blocks that it has in common with any
    before it, prompt or answer, partial blocks of the trace included; never its last token."""
    chosen = data.draw(st.lists(prompts(block), min_size=2, max_size=6))
    number: dict[str, int] = {}
    lines: list[dict[str, Any]] = [{"schema": "", "version": 2, "block_size": block, "hash_id_scope": "global"}]
    streams: list[list[object]] = []
    for place, prompt in enumerate(chosen):
        answered = prompt.known > prompt.length
        ids = ids_of(prompt.content, prompt.known, block) if answered else ids_of(prompt.letters, prompt.length, block)
        lines.append(
            {
                "request_id": str(place),
                "play_id": "p",
                "session_id": "s",
                "input_length": prompt.length,
                "output_length": prompt.output,
                "hash_ids": [number.setdefault(x, len(number)) for x in ids_of(prompt.letters, prompt.length, block)],
                "content_hash_ids": [number.setdefault(each, len(number)) for each in ids],
                "content_tokens": prompt.known,
                "not_before_ms": 0,
                "dependencies": [{"request_id": str(place - 1), "trigger": "completion", "delay_ms": 1}]
                if place
                else [],
            }
        )
        known = [(ids[token // block], token % block) for token in range(prompt.known)]
        unknown = [(place, token) for token in range(prompt.known, prompt.length + prompt.output)]
        streams.append([*known, *unknown])
    recording = read_recording([json.dumps(line).encode() for line in lines])
    size = recording.block_size
    assert size == (24 if block == 24 else 16)
    config = SimConfig(timing=OneMillisecond(), kv_tokens=100_000, block_size=size)
    result, _ = played(recording, RoundRobin(), config)
    for place, row in enumerate(result.turns):
        found = 0
        for before in range(place):
            computed = streams[before][: chosen[before].length + chosen[before].output - 1]
            found = max(found, _common(computed, streams[place]))
        wanted = min(found // size, (chosen[place].length - 1) // size) * size
        assert row.cached_tokens == wanted


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Tokens of the prefix that both have; of a trace with smaller blocks than the engine's, whole engine blocks."""
    for place, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return place
    return min(len(one), len(other))


def as_graph(programs: Sequence[Program]) -> Recording:
    """Programs of turns with gaps and sub-agents as requests that wait for each other."""
    every = list(with_children(programs))
    numbers = {(program.name, index): 0 for program in every for index in range(len(program.turns))}
    numbers = {key: number for number, key in enumerate(numbers)}
    begins = {
        child.name: Wait(numbers[program.name, index], "completion", 0)
        for program in every
        for index, turn in enumerate(program.turns)
        for child in turn.children
    }
    roots = {program.name: place for place, program in enumerate(programs)}
    nodes = []
    for place, program in enumerate(every):
        for index in range(len(program.turns)):
            waits = [begins[program.name]] if not index and program.name in begins else []
            if index:
                before = program.turns[index - 1]
                waits.append(Wait(numbers[program.name, index - 1], "completion", to_ps(before.gap_s)))
                lasts = ((child.name, len(child.turns) - 1) for child in before.children)
                waits += [Wait(numbers[last], "completion", 0) for last in lasts]
            play = roots[program.name.partition(".")[0]]
            begin_ps = to_ps(program.arrival_s) if not waits else 0
            nodes.append(Node(f"{program.name}/{index}", place, index, play, begin_ps, tuple(waits)))
    plays = tuple(
        tuple(number for number, node in enumerate(nodes) if node.play == play) for play in range(len(programs))
    )
    return Recording(tuple(every), tuple(nodes), plays, 16)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["kv", "commit", "continuum", "thunderagent"])
def test_programs_of_turns_are_a_graph(policy: str) -> None:
    """Sub-agents under memory pressure on two workers: every turn is the same, time for time, as where the loop itself
    knows of turns and children."""
    programs = workloads.generate("tree", count=8, rate_per_s=0.6, seed=4)
    config = SimConfig(workers=2, kv_tokens=130_000)
    usual = simulate(programs, make_policy(policy), config)
    result, skipped = played(as_graph(programs), make_policy(policy), config)
    assert result.turns == usual.turns
    assert (result.leases, result.unfinished, skipped) == (usual.leases, 0, 0)
    assert any(row.preemptions or row.hold_s > 0 for row in usual.turns)
