"""Reload curves that `tidegate calibrate` measured, by model and engine profile; fed from the bucket, never trusted."""

from __future__ import annotations

from dataclasses import dataclass

from bus.subjects import calibration as calibration_key
from schemas.base import BadMessageError, from_json
from schemas.calibration import MAX_SECONDS, Calibration
from schemas.worker import Engine
from services.admission.estimators.errors import BadStateError
from services.admission.estimators.reload_cost import ReloadCost

MAX_CURVES = 1024
MAX_BYTES = 1 << 18
CAPACITY_TOLERANCE = 0.10
"""Restarts of one engine differ in their KV capacity by less; two kinds of machine by more."""

PART = "calibration"


@dataclass(frozen=True, slots=True)
class Curve:
    """A stored measurement and what it says."""

    stored: Calibration
    cost: ReloadCost


def read_calibration(key: str, payload: bytes) -> Curve:
    """The curve in one value of the bucket ``TG_CALIBRATIONS``. Raises `BadStateError`.

    Refused: what does not decode, what stands under another model's or profile's key, and a curve that is no cost at
    the longest context of its own measurement (nothing, or over an hour).
    """
    if len(payload) > MAX_BYTES:
        raise BadStateError(PART, "too_large", f"{len(payload)} bytes, at most {MAX_BYTES}")
    try:
        stored = from_json(payload, Calibration)
    except BadMessageError as error:
        raise BadStateError(PART, "undecodable", str(error)) from error
    try:
        wanted = calibration_key(stored.model, stored.profile)
        cost = ReloadCost(quadratic=stored.quadratic, linear=stored.linear, constant=stored.constant)
    except (ValueError, OverflowError) as error:
        raise BadStateError(PART, "bad_value", str(error)) from error
    if wanted != key:
        raise BadStateError(PART, "bad_value", f"the value under {key} belongs under {wanted}")
    longest = max(point.tokens for point in stored.points)
    if not (cost.quadratic or cost.linear) or cost.seconds(longest) > MAX_SECONDS:
        raise BadStateError(PART, "bad_value", f"{longest} tokens in {cost.seconds(longest):g} s is no cost")
    return Curve(stored, cost)


class CalibrationTable:
    """The bucket's entries as they come, up to ``max_curves``."""

    def __init__(self, *, max_curves: int = MAX_CURVES) -> None:
        self._max_curves = max_curves
        self._curves: dict[str, Curve] = {}

    def __len__(self) -> int:
        return len(self._curves)

    def take(self, key: str, payload: bytes | None) -> None:
        """An entry as read or watched; None: it was deleted. Raises `BadStateError`; what was known under the key
        stays then."""
        if payload is None:
            self._curves.pop(key, None)
            return
        curve = read_calibration(key, payload)
        if key not in self._curves and len(self._curves) >= self._max_curves:
            raise BadStateError(PART, "too_large", f"{self._max_curves} curves are known already")
        self._curves[key] = curve

    def find(self, model: str, engine: Engine, kv_tokens: int | None) -> Curve | None:
        """The curve of an engine by what its bridge says of it; None: none was measured on its like.

        Of the same model and engine, the one with the nearest KV capacity, at most `CAPACITY_TOLERANCE` away. Where
        a capacity is not known, only a curve without rivals will do.
        """
        rivals = [
            curve for curve in self._curves.values() if curve.stored.model == model and curve.stored.engine == engine
        ]
        alike = [
            (away, curve) for curve in rivals if (away := _distance(kv_tokens, curve.stored.kv_tokens)) is not None
        ]
        if alike:
            away, nearest = min(alike, key=lambda pair: (pair[0], -pair[1].stored.at_ms))
            return nearest if away <= CAPACITY_TOLERANCE else None
        return rivals[0] if len(rivals) == 1 else None


def _distance(one: int | None, other: int | None) -> float | None:
    """How far two capacities are apart, as a share of the larger; None where one is not known."""
    return abs(one - other) / max(one, other) if one and other else None
