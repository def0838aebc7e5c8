"""What is measured, and what the measurements say: contexts of the sweep, unique prompts, the fitted curve. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schemas.calibration import MAX_POINTS, Calibration, CalibrationPoint
from schemas.worker import WorkerProfile
from services.admission.estimators.errors import BadSweepError
from services.admission.estimators.reload_cost import MIN_CONTEXTS, fit
from tidegate.errors import CalibrationError, WrongUseError

FIRST_CONTEXT = 1000
OVERHEAD_TOKENS = 16
"""A prompt that costs next to nothing to compute: its time to first token is what every turn takes anyway."""

LEAST_LIMIT = 8 * OVERHEAD_TOKENS
_DOUBLES = 4
_APART = 1.1
"""Two contexts that are closer than this tell the same."""

PLAIN_TOKENS = tuple(range(1000, 9000))
"""Ids that are ordinary words in all but toy vocabularies."""

LEAST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """The engine that is measured: its profile as a bridge tells it, the model asked for, the worker's name if any."""

    profile: WorkerProfile
    model: str
    worker: str | None = None

    @property
    def longest_prompt(self) -> int | None:
        """The longest prompt that leaves room for one token of answer, in the window and in the KV cache."""
        profile = self.profile
        window = profile.max_model_len - 1 if profile.max_model_len else None
        cache = profile.kv_tokens - 2 * (profile.block_size or 16) if profile.kv_tokens else None
        known = [limit for limit in (window, cache) if limit is not None]
        return min(known) if known else None


def choose_contexts(subject: Subject, wanted: Sequence[int], most: int | None) -> tuple[int, ...]:
    """Prompt lengths in tokens, ascending: ``wanted``, or 1000, 2000, 4000, ... up to ``most`` or what the model takes.

    A model that takes under 4000 tokens is measured at an eighth, a quarter, a half of that. Raises `WrongUseError`.
    Source: spec scheduling §1.3.
    """
    limit = subject.longest_prompt
    asked = max(wanted, default=most)
    if asked is not None and limit is not None and asked > limit:
        window, cache = subject.profile.max_model_len or "unknown", subject.profile.kv_tokens or "unknown"
        raise WrongUseError(
            f"{subject.model} takes prompts of up to {limit} tokens here (window {window}, KV cache {cache} tokens), "
            f"not {asked}; give less with {'--contexts' if wanted else '--max-context'}"
        )
    if wanted:
        contexts = tuple(sorted(set(wanted)))
        if len(contexts) < MIN_CONTEXTS or len(contexts) > MAX_POINTS or contexts[0] <= OVERHEAD_TOKENS:
            raise WrongUseError(
                f"--contexts: a curve needs {MIN_CONTEXTS} to {MAX_POINTS} different contexts of over "
                f"{OVERHEAD_TOKENS} tokens"
            )
        return contexts
    top = most if most is not None else limit
    if top is None:
        raise WrongUseError(f"{subject.profile.url} does not tell its longest context; give --max-context TOKENS")
    if top < LEAST_LIMIT:
        raise WrongUseError(f"contexts of up to {top} tokens are too short to be measured; {LEAST_LIMIT} is the least")
    first = FIRST_CONTEXT if top >= _DOUBLES * FIRST_CONTEXT else top // (2 ** (_DOUBLES - 1))
    found: list[int] = []
    while first * _APART < top:
        found.append(first)
        first *= 2
    return (*found, top)


class Prompts:
    """Prompts of token ids that no cache holds: each is drawn anew. ``vocabulary``: ids of ordinary words."""

    def __init__(self, seed: int, vocabulary: Sequence[int] = ()) -> None:
        self._random = random.Random(seed)  # noqa: S311 - unlike others, not secret
        usable = tuple(sorted(set(vocabulary)))
        self._vocabulary = usable if len(usable) >= LEAST_TOKENS else PLAIN_TOKENS

    def draw(self, tokens: int) -> list[int]:
        """The next prompt, of so many tokens."""
        return self._random.choices(self._vocabulary, k=tokens)


@dataclass(frozen=True, slots=True)
class Run:
    """One request: prompt tokens as the engine counted them, seconds from asking to the first token."""

    tokens: int
    ttft_s: float


def to_calibration(
    subject: Subject, overhead: Sequence[Run], runs: Mapping[int, Sequence[Run]], *, forced: bool, at_ms: int
) -> Calibration:
    """The curve through the medians of ``runs`` (by context as asked), of which every turn pays the ``overhead``.

    The median of the overhead is taken off the fitted constant: a turn pays it with a full cache too, and what stays
    is what a lost cache costs. It is not taken off the measurements: one iteration of a short prompt waits for memory,
    of a long one for arithmetic, and less of it than the overhead shows is in there. Raises `CalibrationError`.
    """
    base = median(run.ttft_s for run in overhead)
    points = sorted((_point(several) for several in runs.values()), key=lambda point: point.tokens)
    sweep = [(point.tokens, point.seconds) for point in points]
    try:
        found = fit(sweep, relative=True)
    except BadSweepError as error:
        raise CalibrationError(
            f"the measurements give no curve: {error}; use longer contexts (--max-context) and more runs (--runs), "
            "and see that nothing else answers in the engine's place"
        ) from error
    worst = max(sweep, key=lambda point: abs(found.cost.seconds(point[0]) - point[1]) / point[1])
    return Calibration(
        model=subject.model,
        engine=subject.profile.engine,
        kv_tokens=subject.profile.kv_tokens,
        engine_version=subject.profile.engine_version,
        max_model_len=subject.profile.max_model_len,
        worker=subject.worker,
        url=subject.profile.url,
        at_ms=at_ms,
        quadratic=found.cost.quadratic,
        linear=found.cost.linear,
        constant=max(0.0, found.cost.constant - base),
        fitted_constant=found.cost.constant,
        overhead_s=base,
        error_s=found.error_s,
        worst=found.worst,
        worst_tokens=worst[0],
        dropped=found.dropped,
        forced=forced,
        points=tuple(points),
    )


def _point(several: Sequence[Run]) -> CalibrationPoint:
    return CalibrationPoint(
        tokens=round(median(run.tokens for run in several)),
        runs_s=tuple(run.ttft_s for run in several),
        seconds=median(run.ttft_s for run in several),
    )
