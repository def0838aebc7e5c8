"""An experiment as one JSON document: the plan, the calibration, every row, summaries, the headline. No clock in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from bus.service import package_version
from load.sim.cells import Row
from load.sim.experiment import Calibration, CalibrationKey, Calibrations, Outcome
from load.sim.headline import headline
from load.sim.journal import code_digest
from load.sim.plan import Plan, seed_set
from load.sim.promises import Kept, broken, promises
from load.sim.scenarios import TRACE, EngineName, FleetSize, Load, Scenario
from load.sim.shapes import Shape, shapes
from load.sim.summary import ScenarioSummary, summarize

FORMAT = 3


@dataclass(frozen=True, slots=True)
class Findings:
    """An outcome and all that is made of it."""

    outcome: Outcome
    summaries: list[ScenarioSummary]
    headline: dict[str, object]
    kept: list[Kept]
    shapes: list[Shape]
    version: str

    @classmethod
    def of(cls, outcome: Outcome, version: str | None = None) -> Findings:
        summaries = summarize(outcome)
        figures = headline(outcome.plan, summaries)
        workloads = figures["workloads"]
        kept = promises(workloads) if isinstance(workloads, dict) and outcome.plan.device_alone else []
        seen = shapes(outcome.plan, summaries)
        figures["promises"] = {"held": sum(each.holds for each in kept), "broken": list(broken(kept))}
        figures["shapes"] = {each.name: each.verdict for each in seen}
        figures["failed"] = outcome.failed
        figures["missing"] = outcome.missing
        return cls(outcome, summaries, figures, kept, seen, version or package_version())


def to_document(findings: Findings) -> dict[str, object]:
    """Plain data; equal plans give equal documents."""
    outcome = findings.outcome
    return {
        "format": FORMAT,
        "version": findings.version,
        "code": code_digest(),
        "plan": msgspec.to_builtins(outcome.plan),
        "missing": outcome.missing,
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


def _scenario(scenario: Scenario) -> dict[str, object]:
    return {
        "workload": scenario.workload,
        "load": None if scenario.load is None else str(scenario.load),
        "concurrency": scenario.concurrency,
        "turn_multiplier": scenario.turn_multiplier,
        "perturbation": scenario.perturbation,
        "programs": scenario.programs,
        **asdict(scenario.fleet),
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


# Read back


class StoredScenario(msgspec.Struct, frozen=True, kw_only=True):
    """Of a row, as it stands in a document."""

    workload: str
    load: str | None
    concurrency: int | None
    turn_multiplier: int
    perturbation: str
    programs: int
    workers: int
    kv_tokens: int
    engine: EngineName
    chunk: int
    max_seqs: int
    host_tokens: int
    host_gbps: float
    disk_tokens: int = 0
    disk_gbps: float = 6.0
    pool_tokens: int = 0
    pool_gbps: float = 25.0
    pool_through: bool = True
    policy: str
    cap: int | None
    seed: int
    rate_per_s: float
    error: str | None
    figures: dict[str, int | float]

    def row(self) -> Row:
        fleet = FleetSize(
            self.workers,
            self.kv_tokens,
            self.engine,
            self.chunk,
            self.max_seqs,
            self.host_tokens,
            self.host_gbps,
            self.disk_tokens,
            self.disk_gbps,
            self.pool_tokens,
            self.pool_gbps,
            self.pool_through,
        )
        scenario = Scenario(
            workload=self.workload,
            fleet=fleet,
            programs=self.programs,
            load=None if self.load is None else Load.parse(self.load),
            concurrency=self.concurrency,
            turn_multiplier=self.turn_multiplier,
            perturbation=self.perturbation,
        )
        return Row(scenario, self.policy, self.seed, self.rate_per_s, self.cap, self.figures, self.error or "")


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    version: str
    plan: Plan
    missing: int
    calibrations: list[StoredCalibration]
    rows: list[StoredScenario]


class DocumentError(ValueError):
    """The file is no document of this format (the user's mistake)."""

    reason = "bad_document"


def read_findings(path: Path) -> Findings:
    """What a document says, made anew from its rows. Raises `DocumentError`, `OSError`."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Document)
        if stored.format != FORMAT:
            raise DocumentError(f"{path} has format {stored.format}, not {FORMAT}")
        calibrations = dict(_restored(each) for each in stored.calibrations)
        rows = [each.row() for each in stored.rows]
    except (msgspec.DecodeError, ValueError) as error:
        raise DocumentError(f"{path} is no document of tidegate simulate: {error}") from error
    return Findings.of(Outcome(stored.plan, calibrations, rows, stored.missing), stored.version)


# The calibration in an earlier document is taken again, where it is of the same thing


class StoredCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """As it stands in a document."""

    workload: str
    fleet: FleetSize
    programs: int
    work_sample: int
    work_s: float
    j50: float | None
    knees: dict[str, float | None]


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    code: str
    calibrations: list[StoredCalibration]


def _store(key: CalibrationKey, value: Calibration) -> StoredCalibration:
    return StoredCalibration(
        workload=key.workload,
        fleet=key.fleet,
        programs=key.programs,
        work_sample=key.work_sample,
        work_s=value.work_s,
        j50=value.j50,
        knees={str(seed): knee for seed, knee in value.knees.items()},
    )


def read_calibrations(path: Path) -> Calibrations:
    """Of a document that this very code wrote, but for those of traces (the file may be another by now); nothing where
    there is none, or it cannot be read."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=_Stored)
        if (stored.format, stored.code) != (FORMAT, code_digest()):
            return {}
        return dict(_restored(each) for each in stored.calibrations if not each.workload.startswith(TRACE))
    except (OSError, msgspec.DecodeError, ValueError):
        return {}


def _restored(stored: StoredCalibration) -> tuple[CalibrationKey, Calibration]:
    knees: Mapping[int, float | None] = {int(seed): knee for seed, knee in stored.knees.items()}
    key = CalibrationKey(stored.workload, stored.fleet, stored.programs, tuple(knees), stored.work_sample)
    return key, Calibration(stored.work_s, knees)
