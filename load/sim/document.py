"""An experiment as one JSON document: the plan, the calibration, every row, summaries, the headline. No clock in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bus.service import package_version
from load.sim.cells import EngineName, FleetSize, Row, Scenario
from load.sim.experiment import Calibration, CalibrationKey, Calibrations, Outcome, seed_set
from load.sim.promises import Kept, Shape, broken, promises, shapes
from load.sim.summary import ScenarioSummary, headline, summarize

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Findings:
    """An outcome and all that is made of it."""

    outcome: Outcome
    summaries: list[ScenarioSummary]
    headline: dict[str, object]
    kept: list[Kept]
    shapes: list[Shape]

    @classmethod
    def of(cls, outcome: Outcome) -> Findings:
        summaries = summarize(outcome)
        figures = headline(outcome.plan, summaries)
        workloads = figures["workloads"]
        kept = promises(workloads) if isinstance(workloads, dict) else []
        seen = shapes(summaries)
        figures["promises"] = {"held": sum(each.holds for each in kept), "broken": list(broken(kept))}
        figures["shapes"] = {each.name: each.verdict for each in seen}
        figures["failed"] = outcome.failed
        return cls(outcome, summaries, figures, kept, seen)


def to_document(findings: Findings) -> dict[str, object]:
    """Plain data; equal plans give equal documents."""
    outcome = findings.outcome
    plan = {name: _plain(value) for name, value in _fields(outcome.plan).items()}
    return {
        "format": FORMAT,
        "version": package_version(),
        "plan": plan,
        "calibrations": [msgspec.to_builtins(_store(key, value)) for key, value in outcome.calibrations.items()],
        "headline": findings.headline,
        "promises": [
            {
                "workload": each.workload,
                "figure": each.promise.figure,
                "value": each.value,
                "at_least" if each.promise.at_least else "at_most": round(each.promise.bound, 6),
                "holds": each.holds,
            }
            for each in findings.kept
        ],
        "shapes": [asdict(each) for each in findings.shapes],
        "scenarios": [_scenario_summary(each) for each in findings.summaries],
        "rows": [_row(row) for row in outcome.rows],
    }


def to_bytes(findings: Findings) -> bytes:
    """The document, indented."""
    return msgspec.json.format(msgspec.json.encode(to_document(findings)), indent=1) + b"\n"


def _fields(value: object) -> dict[str, object]:
    return {name: getattr(value, name) for name in getattr(value, "__dataclass_fields__", {})}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def _scenario(scenario: Scenario) -> dict[str, object]:
    return {
        "workload": scenario.workload,
        "load": None if scenario.load is None else str(scenario.load),
        "concurrency": scenario.concurrency,
        "turn_multiplier": scenario.turn_multiplier,
        "workers": scenario.fleet.workers,
        "kv_tokens": scenario.fleet.kv_tokens,
        "engine": scenario.fleet.engine,
    }


def _row(row: Row) -> dict[str, object]:
    return {
        **_scenario(row.scenario),
        "policy": row.policy,
        "cap": row.cap,
        "seed": row.seed,
        "seed_set": seed_set(row.seed),
        "rate_per_s": row.rate_per_s,
        "error": row.error or None,
        "figures": dict(row.figures),
    }


def _scenario_summary(summary: ScenarioSummary) -> dict[str, object]:
    return {
        **_scenario(summary.scenario),
        "seed_set": summary.kind,
        "seeds": list(summary.seeds),
        "rate_per_s": summary.rate_per_s,
        "j_over_j50": summary.j_over_j50,
        "policies": {
            name: {"cap": standing.cap, **{figure: asdict(spread) for figure, spread in standing.figures.items()}}
            for name, standing in summary.standings.items()
        },
        "ratios": {
            name: {
                "over": ratio.over,
                "under": ratio.under,
                "figure": ratio.figure,
                **asdict(ratio.spread),
                "by_seed": {str(seed): value for seed, value in ratio.by_seed.items()},
            }
            for name, ratio in summary.ratios.items()
        },
    }


# The calibration in an earlier document is taken again, where it is of the same thing


class StoredCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """As it stands in a document."""

    workload: str
    workers: int
    kv_tokens: int
    engine: EngineName
    programs: int
    work_sample: int
    work_s: float
    j50: float | None
    knees: dict[str, float | None]


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    version: str
    calibrations: list[StoredCalibration]


def _store(key: CalibrationKey, value: Calibration) -> StoredCalibration:
    return StoredCalibration(
        workload=key.workload,
        workers=key.fleet.workers,
        kv_tokens=key.fleet.kv_tokens,
        engine=key.fleet.engine,
        programs=key.programs,
        work_sample=key.work_sample,
        work_s=value.work_s,
        j50=value.j50,
        knees={str(seed): knee for seed, knee in value.knees.items()},
    )


def read_calibrations(path: Path) -> Calibrations:
    """Of a document that this version wrote; nothing where there is none, or it cannot be read."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        if (stored.format, stored.version) != (FORMAT, package_version()):
            return {}
        return dict(_restored(each) for each in stored.calibrations)
    except (OSError, msgspec.DecodeError, ValueError):
        return {}


def _restored(stored: StoredCalibration) -> tuple[CalibrationKey, Calibration]:
    knees: Mapping[int, float | None] = {int(seed): knee for seed, knee in stored.knees.items()}
    fleet = FleetSize(stored.workers, stored.kv_tokens, stored.engine)
    key = CalibrationKey(stored.workload, fleet, stored.programs, tuple(knees), stored.work_sample)
    return key, Calibration(stored.work_s, knees)
