"""What one decision of a scheduling policy costs, and whether that depends on how many programs there are.

The policy object of admission alone, driven in virtual time (`load.bench.admission_clients`): no bus, no index, no
service around it. All times are CPU time of one call, Python's cyclic collector on, as in the service.

``<policy>_<room>_<programs>x<seats>_<event>_p50_ms``, ``_p99_ms``: of one decision. ``room``: ``roomy`` fleets hold all
programs to their end, ``tight`` ones half of them, so that the other half waits; ``h100`` ones have the KV tokens of
one H100 a seat, however many programs come. ``_ratio``: of 10,000 programs over
1,000, of the p50; ``_p99_ratio`` of the p99. ``worst_p99_ms``, ``worst_ratio``: the largest of all, and ``worst_p99``,
``worst`` which they are. ``waiting``, ``running``: turns, on average of the decisions measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from load.bench.admission_clients import FINAL_CONTEXT, Clients, EventKind, experienced
from load.bench.measure import percentile
from load.bench.options import Options
from load.sim.timing import TIMINGS
from services.admission.policies.registry import Given, make_policy
from services.admission.scheduling.interface import Action

POLICIES = ("commit", "kv")
EVENTS: tuple[EventKind, ...] = ("turn_ready", "turn_finished", "tick")
ROOMS = {"roomy": 1.5, "tight": 0.5, "h100": None}
"""Of what all programs end with, how much the seats hold together."""
PROGRAMS = (1_000, 10_000)
SEATS = (16, 64)

TICKS = 25
"""Seconds of virtual time that are measured, and as many before them."""

_QUICK_PROGRAMS, _QUICK_SEATS, _QUICK_TICKS = (20, 40), (4,), 20

Samples = dict[EventKind, list[float]]


def run(options: Options) -> dict[str, object]:
    """All policies, rooms and sizes in turns; medians over the runs."""
    programs = _QUICK_PROGRAMS if options.quick else PROGRAMS
    seats = _QUICK_SEATS if options.quick else SEATS
    ticks = _QUICK_TICKS if options.quick else TICKS
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(options.runs):
        for policy in POLICIES:
            for room in ROOMS:
                for count in seats:
                    for known in programs:
                        name = f"{policy}_{room}_{known}x{count}"
                        options.progress(f"{name}, run {number + 1}")
                        for key, value in measure(policy, room, known, count, ticks).items():
                            figures[f"{name}_{key}"].append(value)
    result: dict[str, object] = {"bench": "admission", "programs": list(programs), "seats": list(seats)}
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {name: value for each in ("p50", "p99") for name, value in _ratios(medians, programs, seats, each).items()}
    p99 = {name: value for name, value in medians.items() if name.endswith("_p99_ms")}
    worst, worst_p99 = max(ratios, key=ratios.__getitem__), max(p99, key=p99.__getitem__)
    result.update({name: round(value, 4) for name, value in {**medians, **ratios}.items()})
    return {
        **result,
        "worst_p99": worst_p99,
        "worst_p99_ms": round(p99[worst_p99], 4),
        "worst": worst,
        "worst_ratio": round(ratios[worst], 4),
    }


def _ratios(
    medians: dict[str, float], programs: Sequence[int], seats: Sequence[int], percentile_name: str
) -> dict[str, float]:
    few, many = programs[0], programs[-1]
    found = {}
    for policy in POLICIES:
        for room in ROOMS:
            for count in seats:
                for event in EVENTS:
                    below, above = (
                        medians[f"{policy}_{room}_{known}x{count}_{event}_{percentile_name}_ms"]
                        for known in (few, many)
                    )
                    found[f"{policy}_{room}_{count}_{event}_{percentile_name}_ratio"] = above / below
    return found


def measure(policy: str, room: str, programs: int, seats: int, ticks: int) -> dict[str, float]:
    """p50 and p99 of each kind of event over ``ticks`` seconds, after as many that were not measured."""
    samples: Samples = {event: [] for event in EVENTS}
    clock = time.thread_time_ns

    def decide(kind: EventKind, call: Callable[[], Sequence[Action]]) -> Sequence[Action]:
        started = clock()
        actions = call()
        spent = clock() - started
        if kind in samples:
            samples[kind].append(spent / 1e6)
        return actions

    share = ROOMS[room]
    kv_tokens = TIMINGS["h100-8b"].kv_tokens if share is None else round(share * programs * FINAL_CONTEXT / seats)
    made = make_policy(policy, given=Given(learned=experienced()))
    clients = Clients(made, programs=programs, seats=seats, kv_tokens=kv_tokens, decide=decide)
    _seconds(clients, ticks)
    gc.collect()
    for values in samples.values():
        values.clear()
    waiting, running = _seconds(clients, ticks)
    figures = {"waiting": waiting, "running": running}
    for event, values in samples.items():
        figures[f"{event}_p50_ms"] = percentile(values, 50)
        figures[f"{event}_p99_ms"] = percentile(values, 99)
    return figures


def _seconds(clients: Clients, ticks: int) -> tuple[float, float]:
    """So many seconds of virtual time; how many turns waited and ran meanwhile, on average."""
    waiting: list[int] = []
    running: list[int] = []
    while len(waiting) < ticks:
        if clients.step() == "tick":
            waiting.append(len(clients.held))
            running.append(len(clients.running))
    return statistics.fmean(waiting), statistics.fmean(running)
