"""What computing a lost context costs on a pool's engines: as `tidegate calibrate` measured it, else the default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from schemas.worker import WorkerProfile
from services.admission.estimators.calibrations import CalibrationTable
from services.admission.estimators.errors import BadStateError
from services.admission.estimators.reload_cost import H100_8B as RELOAD_H100_8B
from services.admission.estimators.work import H100_8B as WORK_H100_8B
from services.admission.estimators.work import work_cost_of
from services.admission.outcomes import Noticed
from services.admission.pools import Pool


class EngineCosts:
    """Measured curves, for pools to decide by. ``refused``: stored curves that are none, by reason."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._curves = CalibrationTable()

    def take(self, key: str, payload: bytes | None) -> list[Noticed]:
        """A stored curve, or none any more (``None``); what is to be said of it."""
        try:
            self._curves.take(key, payload)
        except BadStateError as error:
            self.refused[error.reason] += 1
            return [Noticed("calibration_refused", {"key": key, "reason": error.reason, "detail": str(error)})]
        return []

    def apply(self, pool: Pool, engines: Iterable[WorkerProfile]) -> list[Noticed]:
        """Gives the pool the costs of the first of its engines that was measured; what is to be said where they
        changed. What nobody measured stays the default."""
        found = (self._curves.find(each.model, each.engine, each.kv_tokens) for each in engines)
        curve = next((each for each in found if each is not None), None)
        cost = pool.learned.reload_cost = RELOAD_H100_8B if curve is None else curve.cost
        pool.learned.work_cost = WORK_H100_8B if curve is None else work_cost_of(curve.cost)
        if curve == pool.curve:
            return []
        pool.curve = curve
        fields = {"quadratic": cost.quadratic, "linear": cost.linear, "constant": cost.constant}
        source = "default" if curve is None else "calibration"
        return [Noticed("engine_costs", {"pool": pool.name, "source": source, **fields}, is_fault=False)]
