"""What came of a replay, beside what was recorded. Pure.

Tokens, cache and times of the two sides are of the same requests: those that were answered now. The names are those of
``tidegate simulate --trace``, so that both can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.base import Message
from tidegate.replay.player import PlayQuiet
from tidegate.replay.told import Told
from tidegate.trace.figures import Figures, Spread, figures_of, recorded_figures, spread
from tidegate.trace.play_nodes import PlayNode


class Settings(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for."""

    url: str
    model: str
    api: str
    headers: str
    speed: float
    lanes: int | None = None
    seed: int
    files: tuple[str, ...] = ()
    block_size: int


class ReplayReport(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The whole report.

    ``requests``: of the trace (as far as ``--limit`` goes); ``answered``, ``failed`` (``failures`` by reason, an
    example of each in ``examples``), ``skipped`` (of plays that had failed) and ``unsent`` (interrupted) add up to it
    with ``cut`` (under way when interrupted). ``left_out``: rows that cannot be played, by reason. ``lateness_ms``: how
    long after its time the player itself sent a request: large values mean that its figures are the player's, not the
    endpoint's; ``player_cpu``: seconds of its processor for each second. ``answers_sent_back``: answers of
    this run that are in later prompts; ``answers_not_told``: those that should be, but their token ids were not told.
    """

    settings: Settings
    requests: int
    answered: int
    failed: int
    failures: dict[str, int]
    examples: dict[str, str]
    skipped: int
    unsent: int
    cut: int
    left_out: dict[str, int]
    plays: int
    plays_completed: int
    plays_failed: int
    interrupted: bool
    replayed: Figures
    recorded: Figures
    lateness_ms: Spread | None = None
    player_cpu: float
    answers_sent_back: int
    answers_not_told: int


@dataclass(slots=True)
class Results:
    """What is known so far, by number of the node."""

    told: dict[int, Told]
    due_ms: dict[int, float]
    quiet: list[PlayQuiet]
    wall_s: float = 0.0
    cpu_s: float = 0.0
    sent_back: int = 0
    not_told: int = 0


def report(
    nodes: Sequence[PlayNode], results: Results, settings: Settings, left_out: Counter[str], *, interrupted: bool
) -> ReplayReport:
    """Of ``nodes`` as far as they were played."""
    good = {number: told for number, told in results.told.items() if told.reason is None}
    bad = {number: told for number, told in results.told.items() if told.reason is not None}
    failures = Counter(str(told.reason) for told in bad.values())
    skipped = sum(quiet.skipped for quiet in results.quiet)
    completed = [quiet for quiet in results.quiet if quiet.outcome == "completed"]
    return ReplayReport(
        settings=settings,
        requests=len(nodes),
        answered=len(good),
        failed=len(bad),
        failures=dict(failures.most_common()),
        examples={str(told.reason): told.detail for told in reversed(bad.values())},
        skipped=skipped,
        unsent=len(nodes) - len(results.due_ms) - skipped,
        cut=len(results.due_ms) - len(results.told),
        left_out=dict(left_out.most_common()),
        plays=len({node.play for node in nodes}),
        plays_completed=len(completed),
        plays_failed=len(results.quiet) - len(completed),
        interrupted=interrupted,
        replayed=_replayed(good, completed, results.wall_s),
        recorded=recorded_figures([nodes[number] for number in sorted(good)], {quiet.play for quiet in completed}),
        lateness_ms=spread(told.sent_ms - results.due_ms[number] for number, told in results.told.items()),
        player_cpu=_round(results.cpu_s / results.wall_s if results.wall_s else 0.0),
        answers_sent_back=results.sent_back,
        answers_not_told=results.not_told,
    )


def _replayed(good: dict[int, Told], completed: Sequence[PlayQuiet], wall_s: float) -> Figures:
    answers = list(good.values())
    return figures_of(
        [(told.input_tokens, told.output_tokens, told.cached_tokens) for told in answers],
        plays=len(completed),
        wall_s=wall_s,
        ttft_ms=spread(None if told.first_ms is None else told.first_ms - told.sent_ms for told in answers),
        itl_ms=spread(map(_itl, answers)),
        latency_ms=spread(told.ended_ms - told.sent_ms for told in answers),
        jct_ms=spread(quiet.ended_ms - quiet.began_ms for quiet in completed),
    )


def _itl(told: Told) -> float | None:
    if told.first_ms is None or told.last_ms is None or (told.output_tokens or 0) < 2:
        return None
    return (told.last_ms - told.first_ms) / ((told.output_tokens or 0) - 1)


def _round(value: float) -> float:
    return round(value, 3)
