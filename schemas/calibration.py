"""A measured prefill-reload curve, as `tidegate calibrate` stores it (JSON) in the KV bucket ``TG_CALIBRATIONS``.

The key is `bus.subjects.calibration` of the model and of `Calibration.profile`; the last measurement wins.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.base import Count, Message
from schemas.worker import Engine

MAX_POINTS = 64
MAX_RUNS = 101
MAX_LABEL = 1024
MAX_SECONDS = 3600.0
"""No prompt takes longer, at any context that was measured."""

PromptTokens = Annotated[int, Meta(ge=1, lt=1 << 40)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Coefficient = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Share = Annotated[float, Meta(ge=0.0)]
Label = Annotated[str, Meta(max_length=MAX_LABEL)]
ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)]
Runs = Annotated[tuple[Seconds, ...], Meta(min_length=1, max_length=MAX_RUNS)]


class CalibrationPoint(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One context of the sweep. ``tokens`` of the prompt as the engine counted them; ``runs_s``: time to first token
    of each run; ``seconds``: their median, which the curve is fitted to."""

    tokens: PromptTokens
    runs_s: Runs
    seconds: Seconds


class Calibration(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds to compute n tokens anew: ``quadratic``*n^2 + ``linear``*n + ``constant``.

    ``engine``, ``kv_tokens`` (of one rank) make the engine profile; the rest of the first block is for people.
    ``fitted_constant``: of the curve through the times to first token, which hold what a turn takes even with
    everything cached (HTTP, scheduling, one iteration); that was measured as ``overhead_s``, and ``constant`` is what
    the fitted one has above it. ``error_s``: root mean square of what the fitted curve misses; ``worst``: the largest
    miss as a share of its measurement, at ``worst_tokens``; ``dropped``: coefficients that came out negative and are 0.
    ``forced``: measured although other requests ran, or nobody could tell. ``worker``: by whose name the engine was
    found. ``at_ms``: Unix ms.
    """

    model: ModelName
    engine: Engine = "unknown"
    kv_tokens: Count | None = None
    engine_version: Label | None = None
    max_model_len: Count | None = None
    worker: Label | None = None
    url: Label = ""
    at_ms: Count = 0

    quadratic: Coefficient
    linear: Coefficient
    constant: Coefficient = 0.0
    fitted_constant: Coefficient = 0.0
    overhead_s: Seconds = 0.0
    error_s: Seconds = 0.0
    worst: Share = 0.0
    worst_tokens: Count = 0
    dropped: Annotated[tuple[Label, ...], Meta(max_length=3)] = ()
    forced: bool = False
    points: Annotated[tuple[CalibrationPoint, ...], Meta(min_length=1, max_length=MAX_POINTS)]

    @property
    def profile(self) -> str:
        """The engine profile as text: engine and KV capacity in two significant digits, such as ``vllm-410000``.

        Nothing else that an engine says over HTTP tells one kind of machine from another. Restarts differ in the
        capacity by a little; readers compare ``kv_tokens`` rather than this text.
        """
        return engine_profile(self.engine, self.kv_tokens)


def engine_profile(engine: Engine, kv_tokens: int | None) -> str:
    """`Calibration.profile` of an engine with ``kv_tokens`` of KV cache a rank (None: not told)."""
    return f"{engine}-{int(float(f'{kv_tokens:.2g}'))}" if kv_tokens else engine
