"""Figures of a run, by the names that both replays report: what became of a trace, and what was recorded.

Pure. `load.sim.replays.figures` has these names too, and more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from load.nearest_rank import nearest_rank
from schemas.base import Message
from tidegate.trace.play_nodes import PlayNode, Recorded


class Spread(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Of ``count`` values in ms; percentiles by the nearest rank."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Figures(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One run; what is not known is absent. ``cached_tokens`` of prompts were found in a cache, ``computed_tokens`` the
    rest, ``prefix_hit_ratio`` (0..1) their share, all three of requests of which both counts are known. Times of
    requests: to the first token, between tokens, all of it, and how long they were held; ``jct_ms`` of plays, from the
    first request's beginning to the last end."""

    requests: int
    plays: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    prefix_hit_ratio: float | None = None
    computed_tokens: int | None = None
    wall_s: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    latency_ms: Spread | None = None
    jct_ms: Spread | None = None
    hold_ms: Spread | None = None


Tokens = tuple[int | None, int | None, int | None]
"""Of a request: input, output, and cached ones."""


def recorded_figures(nodes: Sequence[PlayNode], plays: Collection[str] | None = None) -> Figures:
    """What a trace says of its own run, of these requests. ``plays``: those that count (default: all); ``jct_ms`` is of
    those whose requests all tell when they ended."""
    known = [node.recorded for node in nodes if node.recorded is not None]
    by_play: dict[str, list[Recorded | None]] = {}
    for node in nodes:
        by_play.setdefault(node.play, []).append(node.recorded)
    counted = by_play.keys() if plays is None else plays
    return figures_of(
        [
            (node.input_tokens, node.output_tokens, None if node.recorded is None else node.recorded.cached_tokens)
            for node in nodes
        ],
        plays=len(counted),
        wall_s=_span(known) / 1000 if known else 0.0,
        ttft_ms=spread(each.ttft_ms for each in known),
        itl_ms=spread(each.avg_itl_ms for each in known),
        latency_ms=spread(each.end_ms - each.start_ms for each in known),
        jct_ms=spread(_spans(recorded for play, recorded in by_play.items() if play in counted)),
        hold_ms=spread(each.hold_ms for each in known),
    )


def figures_of(
    tokens: Sequence[Tokens],
    *,
    plays: int,
    wall_s: float,
    ttft_ms: Spread | None,
    itl_ms: Spread | None,
    latency_ms: Spread | None,
    jct_ms: Spread | None,
    hold_ms: Spread | None = None,
) -> Figures:
    """Of requests with these ``tokens``. ``wall_s`` of 0: not known."""
    output = sum(each for _, each, _ in tokens if each is not None)
    both = [(given, cached) for given, _, cached in tokens if given is not None and cached is not None]
    given, cached = sum(each for each, _ in both), sum(each for _, each in both)
    return Figures(
        requests=len(tokens),
        plays=plays,
        input_tokens=sum(each for each, _, _ in tokens if each is not None),
        output_tokens=output,
        cached_tokens=cached if both else None,
        prefix_hit_ratio=round(cached / given, 6) if given else None,
        computed_tokens=given - cached if both else None,
        wall_s=_round(wall_s) if wall_s else None,
        requests_per_s=_round(len(tokens) / wall_s) if wall_s else None,
        output_tokens_per_s=_round(output / wall_s) if wall_s else None,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        latency_ms=latency_ms,
        jct_ms=jct_ms,
        hold_ms=hold_ms,
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of those that are known; ``None`` where none is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None

    def rank(percent: int) -> float:
        return _round(nearest_rank(known, percent))

    return Spread(
        count=len(known),
        mean=_round(math.fsum(known) / len(known)),
        p50=rank(50),
        p90=rank(90),
        p95=rank(95),
        p99=rank(99),
        max=_round(known[-1]),
    )


def _spans(plays: Iterable[Sequence[Recorded | None]]) -> Iterator[float]:
    for play in plays:
        known = [each for each in play if each is not None]
        if len(known) == len(play):
            yield _span(known)


def _span(requests: Sequence[Recorded]) -> float:
    return max(each.end_ms for each in requests) - min(each.start_ms for each in requests)


def _round(value: float) -> float:
    return round(value, 3)
