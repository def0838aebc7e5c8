"""Counters of a timeline: what each worker's bridge said of its load, and how many turns admission held.

Of a worker whose load was not recorded (another's trace, `[recorder] load_samples_s = 0`) they are estimated from its
requests' rows, and their names say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tidegate.trace.perfetto_events import Event, counter, name_process, us
from tidegate.trace.reading import Trace
from tidegate.trace.rows import LoadSample, Request

Stages = Callable[[Request], list[tuple[str, float, float]]]


def counters(trace: Trace, *, first_pid: int, stages_of: Stages) -> Iterator[Event]:
    """A process for each worker, and one for admission where anything waited there; numbered from ``first_pid``."""
    served: dict[str, list[Request]] = {}
    for request in trace.requests:
        if request.metrics.worker is not None:
            served.setdefault(request.metrics.worker.worker, []).append(request)
    sampled: dict[str, list[LoadSample]] = {}
    for sample in trace.loads:
        sampled.setdefault(sample.load.worker, []).append(sample)
    pid = first_pid
    for pid, worker in enumerate(sorted({*served, *sampled}), first_pid):
        yield from name_process(pid, f"Worker {worker}", pid)
        if worker in sampled:
            yield from _loads(pid, sampled[worker])
        else:
            yield from _estimates(pid, served[worker])
    yield from _admission(pid + 1, trace.requests, stages_of)


def _loads(pid: int, samples: Sequence[LoadSample]) -> Iterator[Event]:
    """Requests of all ranks; KV use of each. A sample without loads ends them: nobody knows more."""
    shown: dict[str, dict[str, float]] = {}
    for sample in samples:
        loads, capacity = sample.load.loads, sample.load.kv_tokens
        now: dict[str, dict[str, float]] = {name: dict.fromkeys(series, 0) for name, series in shown.items()}
        if loads:
            names = {load.rank: "value" if len(loads) == 1 else f"rank {load.rank}" for load in loads}
            now["requests running"] = {"value": sum(load.running for load in loads)}
            now["requests waiting"] = {"value": sum(load.waiting for load in loads)}
            now["KV use (%)"] = {names[load.rank]: round(100 * load.kv_usage, 2) for load in loads}
            if capacity:
                now["KV tokens"] = {names[load.rank]: round(load.kv_usage * capacity) for load in loads}
        for name, values in now.items():
            yield counter(pid, name, us(sample.time_ms), dict.fromkeys(shown.get(name, ()), 0) | values)
        shown = now


def _estimates(pid: int, requests: Iterable[Request]) -> Iterator[Event]:
    """What the worker was doing, as far as its requests' rows tell: changes at their grants and ends."""
    changes: list[tuple[int, int, int]] = []
    for request in requests:
        metrics = request.metrics
        tokens = (metrics.input_tokens or 0) + (metrics.output_tokens or 0)
        end_us = max(us(request.start_ms) + 1, us(request.end_ms))
        begun_us = min(end_us, us(request.start_ms + (metrics.admission_wait_ms or 0.0)))
        changes += [(begun_us, 1, tokens), (end_us, -1, -tokens)]
    for at_us, running, tokens in _running_sums(changes):
        yield counter(pid, "requests running (estimate)", at_us, {"value": running})
        yield counter(pid, "KV tokens of running requests (estimate)", at_us, {"value": tokens})


def _admission(pid: int, requests: Sequence[Request], stages_of: Stages) -> Iterator[Event]:
    """Turns held, as their rows tell; and the queue that they met."""
    changes: list[tuple[int, int, int]] = []
    for request in requests:
        for name, start, end in stages_of(request):
            if name == "held":
                changes += [(us(request.start_ms + start), 1, 0), (us(request.start_ms + end), -1, 0)]
    depths = [request for request in requests if request.metrics.queue_depth is not None]
    if not changes and not depths:
        return
    yield from name_process(pid, "Admission", pid)
    for at_us, held, _ in _running_sums(changes):
        yield counter(pid, "turns held", at_us, {"value": held})
    for request in depths:
        yield counter(pid, "queue met by turns", us(request.start_ms), {"value": request.metrics.queue_depth or 0})


def _running_sums(changes: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(time, sum of the first, sum of the second) after all changes of each time."""
    by_time: dict[int, tuple[int, int]] = {}
    for at_us, first, second in changes:
        before = by_time.get(at_us, (0, 0))
        by_time[at_us] = (before[0] + first, before[1] + second)
    one = two = 0
    for at_us, (first, second) in sorted(by_time.items()):
        one, two = one + first, two + second
        yield at_us, one, two
