"""All learned quantities of one model pool, fed by what happens to its programs.

A program is known by a key of its owner's choice from its first turn to its end; until then its attained work and
context are censored samples of its class, and of the pool (the class ``*``). Its context counts by the largest it had,
which is its final one unless the harness compacted: capacity is needed for the largest.

Most harnesses never say that a program is over. So one that answered its user counts as complete until it runs again,
and a program is one sample at most: its latest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from services.admission.estimators.class_key import ClassKey
from services.admission.estimators.errors import BadSampleError, sample
from services.admission.estimators.growth import ContextGrowth, OutputLength
from services.admission.estimators.least_recent import LeastRecentlyUsed
from services.admission.estimators.order_correlation import OrderCorrelation
from services.admission.estimators.queueing import QueueingDelay
from services.admission.estimators.reload_cost import H100_8B as RELOAD_H100_8B
from services.admission.estimators.reload_cost import ReloadCost
from services.admission.estimators.residual import (
    MIN_COMPLETIONS_CONTEXT,
    MIN_COMPLETIONS_WORK,
    ProductLimit,
    ResidualEstimator,
    predicted_final_context,
)
from services.admission.estimators.tool_times import ToolTimes, lease_index, return_rate_at
from services.admission.estimators.work import H100_8B as WORK_H100_8B
from services.admission.estimators.work import WorkCost

MAX_CLASSES = 64
MAX_PROGRAMS = 100_000


class Prediction(NamedTuple):
    """A mean residual, and whose past it is taken from: the program's class, or all of the pool."""

    value: float
    source: Literal["class", "pooled"]


class Attained(NamedTuple):
    """What a program has had: GPU seconds of work, tokens of context after its last turn, turns."""

    work_s: float
    context_tokens: int
    turns: int


class LeaseStanding(msgspec.Struct, frozen=True, gc=False):
    """Whether an idle program's KV is worth its lease.

    ``index``: I_q, per token; ``worth_keeping``: it is no less than the floor; ``until``: the elapsed time of the tool,
    in seconds, at which that changes next if the tool does not return (infinite: never).
    """

    index: float
    worth_keeping: bool
    until: float


class Residuals(NamedTuple):
    """The estimates that answer for a class until `LearnedPool.revision` changes: its own, or those of all of the pool.
    None: nobody knows enough."""

    work: ProductLimit | None
    context: ProductLimit | None


class ClassEstimators:
    """What is learned of one class. ``evicted``: the class was forgotten; programs that run are to join it anew."""

    __slots__ = ("context", "evicted", "growth", "output", "work")

    def __init__(self) -> None:
        self.work = ResidualEstimator(min_completions=MIN_COMPLETIONS_WORK, quantity="work")
        self.context = ResidualEstimator(min_completions=MIN_COMPLETIONS_CONTEXT, quantity="context")
        self.growth = ContextGrowth()
        self.output = OutputLength()
        self.evicted = False

    def enter(self, work_s: float, peak_tokens: int) -> None:
        self.work.enter(work_s)
        self.context.enter(peak_tokens)

    def leave(self, work_s: float, peak_tokens: int) -> None:
        self.work.leave(work_s)
        self.context.leave(peak_tokens)

    def complete(self, work_s: float, peak_tokens: int, instead_of: int | None) -> int:
        """Returns the number of this completion, of either estimator: they count the same. ``instead_of``: the number
        of one that was none."""
        if instead_of is None:
            self.work.complete(work_s)
            return self.context.complete(peak_tokens)
        self.work.replace(instead_of, work_s)
        return self.context.replace(instead_of, peak_tokens)

    def withdraw(self, number: int) -> None:
        self.work.withdraw(number)
        self.context.withdraw(number)


@dataclass(slots=True)
class _Program:
    """A program that runs. ``whole``: seen from its first turn, so that its totals are totals. ``answered``: it counts
    as complete, and not as in flight. ``completed``: where it was a sample last, and its numbers there."""

    key: ClassKey
    own: ClassEstimators
    whole: bool
    work_s: float = 0.0
    context: int = 0
    peak: int = 0
    turns: int = 0
    answered: bool = False
    completed: tuple[tuple[ClassEstimators, int], ...] = ()


class LearnedPool:
    """The estimators of one pool, bounded in memory. A sample that makes no sense changes nothing, raises nothing, and
    is counted in ``refused`` by its reason: what a peer reports must not end a decision."""

    def __init__(
        self,
        *,
        work_cost: WorkCost = WORK_H100_8B,
        reload_cost: ReloadCost = RELOAD_H100_8B,
        tools: ToolTimes | None = None,
        max_classes: int = MAX_CLASSES,
        max_programs: int = MAX_PROGRAMS,
    ) -> None:
        self.work_cost = work_cost
        self.reload_cost = reload_cost
        self.tools = ToolTimes() if tools is None else tools
        self.order_correlation = OrderCorrelation()
        self.queueing_delay = QueueingDelay()
        self.pooled = ClassEstimators()
        self.classes: LeastRecentlyUsed[ClassKey, ClassEstimators] = LeastRecentlyUsed(
            max_classes, ClassEstimators, _mark_evicted
        )
        self.refused: dict[str, int] = {}
        self.programs_dropped = 0
        self.samples = 0
        """Counts what was learned: while it stays, so does what there is to store."""
        self._refreshes = 0
        self._max_programs = max_programs
        self._programs: dict[Hashable, _Program] = {}

    def __len__(self) -> int:
        """Programs that run."""
        return len(self._programs)

    @property
    def revision(self) -> int:
        """While it stays, so do the mean residuals: predictions made with another one are to be made anew."""
        return self._refreshes + self.classes.evictions

    # What happens.

    def program_started(self, program: Hashable, key: ClassKey, *, from_start: bool = True) -> None:
        """A program runs. ``from_start``: this is its first turn; of another one the totals will not be learned.

        Idempotent. A full table drops its oldest program as abandoned.
        """
        if program in self._programs:
            return
        if len(self._programs) >= self._max_programs:
            self.program_abandoned(next(iter(self._programs)))
            self.programs_dropped += 1
        own = self.classes.use(key)
        self._programs[program] = _Program(key, own, from_start)
        if from_start:
            own.enter(0.0, 0)
            self.pooled.enter(0.0, 0)

    def turn_finished(
        self, program: Hashable, key: ClassKey, *, prompt_tokens: int, output_tokens: int
    ) -> Attained | None:
        """A turn of the program ended, with its usage; a program not known yet is taken to have started with it.

        ``key`` may differ from turn to turn: the latest is the program's class. None: the usage was refused.
        """
        context = prompt_tokens + output_tokens
        before = self.attained(program) or Attained(0.0, 0, 0)
        try:
            done = self.work_cost.seconds(prompt_tokens, output_tokens, before.context_tokens)
            work = sample("work", before.work_s + done)
            sample("context", context)
        except BadSampleError as error:
            self._refuse(error)
            return None
        self.program_started(program, key)
        self.program_returned(program)
        known = self._programs[program]
        self._join(known, key)
        peak = max(known.peak, context)
        both = (known.own, self.pooled)
        if known.whole:
            for estimators in both:
                estimators.work.advance(known.work_s, work)
                estimators.context.advance(known.peak, peak)
        for estimators in both:
            if known.turns and context >= known.context:
                estimators.growth.record(context - known.context)
            estimators.output.record(output_tokens)
        known.work_s, known.context, known.peak = work, context, peak
        known.turns += 1
        self.samples += 1
        return Attained(work, context, known.turns)

    def program_answered(self, program: Hashable) -> None:
        """Its last turn called no tool, and it waits for nobody: a task is done, and it may be over. Its totals are
        samples at once, in place of those of its earlier answers. One whose beginning is not known is none."""
        known = self._programs.get(program)
        if known is not None and known.whole and known.turns and not known.answered:
            self._complete(known)
            known.answered = True

    def program_returned(self, program: Hashable) -> None:
        """A turn of it runs: if it had answered, it is in flight again. Its sample stays until there is a newer one."""
        known = self._programs.get(program)
        if known is not None and known.answered:
            known.answered = False
            known.own = self.classes.use(known.key)
            for estimators in (known.own, self.pooled):
                estimators.enter(known.work_s, known.peak)

    def program_finished(self, program: Hashable) -> None:
        """The program completed: its totals are samples. A program that is not known, or had no turn, is none."""
        known = self._ended(program)
        if known is not None:
            if not known.answered:
                self._complete(known)
            self.order_correlation.record(known.turns)
            self.samples += 1

    def program_abandoned(self, program: Hashable) -> None:
        """The program was aborted or fell idle: its totals are only known to be no less (spec policy §4, Fallbacks),
        unless it had answered: then it has finished."""
        known = self._ended(program)
        if known is None:
            return
        if known.answered:
            self.order_correlation.record(known.turns)
        else:
            for estimators, number in known.completed:
                estimators.withdraw(number)
            for estimators in (known.own, self.pooled):
                estimators.work.abandon(known.work_s)
                estimators.context.abandon(known.peak)
        self.samples += 1

    def tool_returned(self, tool: str, seconds: float) -> None:
        """A turn arrived so long after the end of its program's last one, which had called ``tool``."""
        try:
            self.tools.record(tool, seconds)
            self.samples += 1
        except BadSampleError as error:
            self._refuse(error)

    def unleased_return(self, seconds: float) -> None:
        """A returning turn without a lease waited so long, held and in the engine's queue."""
        try:
            self.queueing_delay.record(seconds)
            self.samples += 1
        except BadSampleError as error:
            self._refuse(error)

    # What is known.

    def attained(self, program: Hashable) -> Attained | None:
        """What the program has had; None where it does not run."""
        known = self._programs.get(program)
        return None if known is None else Attained(known.work_s, known.context, known.turns)

    def residual_work(self, key: ClassKey, attained_s: float = 0.0) -> Prediction | None:
        """MR_work: GPU seconds still to come of a program that attained so many (V_p; none counts as 0)."""
        return self._residual(key, attained_s, lambda estimators: estimators.work)

    def residual_context(self, key: ClassKey, context_tokens: float = 0.0) -> Prediction | None:
        """MR_ctx: tokens by which a program with such a context will still grow."""
        return self._residual(key, context_tokens, lambda estimators: estimators.context)

    def residuals(self, key: ClassKey) -> Residuals:
        """What `residual_work` and `residual_context` answer from."""
        own, pooled = self.classes.peek(key), self.pooled
        if own is None:
            return Residuals(pooled.work.estimate, pooled.context.estimate)
        return Residuals(own.work.estimate or pooled.work.estimate, own.context.estimate or pooled.context.estimate)

    def final_context(self, key: ClassKey, context_tokens: float, capacity_tokens: float) -> float:
        """Pk_p: the context that the program is charged for, in tokens (spec policy §4)."""
        residual = self.residual_context(key, context_tokens)
        left = None if residual is None else residual.value
        return predicted_final_context(context_tokens, left, growth=self.growth(key), capacity=capacity_tokens)

    def growth(self, key: ClassKey) -> float:
        """g: tokens that a turn adds to the context."""
        own = self.classes.peek(key)
        return own.growth.mean if own is not None and own.growth.is_ready else self.pooled.growth.mean

    def output_p90(self, key: ClassKey) -> float:
        """out_P90: tokens that nine of ten answers do not exceed."""
        own = self.classes.peek(key)
        return own.output.p90 if own is not None and own.output.is_ready else self.pooled.output.p90

    def lease_benefit(self, context_tokens: float, surviving_tokens: float = 0.0) -> float:
        """B: seconds that a returning program loses without its lease, R + eta*T (spec scheduling §1.2, §5.2)."""
        reload = self.reload_cost.seconds(context_tokens, surviving_tokens)
        return reload + self.order_correlation.value * self.queueing_delay.mean

    def lease_standing(
        self, tool: str, elapsed_s: float, context_tokens: float, floor: float, surviving_tokens: float = 0.0
    ) -> LeaseStanding:
        """How an idle program stands whose ``tool`` has run for so long; ``floor``: phi/C, per token.

        Source: spec policy §4 (``I_q``, ``revocable``). O(log n). Raises `BadSampleError`. Ask anew when the time is
        come, and when the program's tool returns; a new sample of the tool moves the answer a little.
        """
        durations = self.tools.durations(tool).durations
        reload = self.reload_cost.seconds(context_tokens, surviving_tokens)
        least = return_rate_at(floor, reload, context_tokens)
        now, is_enough, until = durations.standing(least, elapsed_s)
        return LeaseStanding(lease_index(now, reload, context_tokens), is_enough, until)

    def lease_index(self, tool: str, elapsed_s: float, context_tokens: float) -> float:
        """I_q alone, per token, as `lease_standing` has it. Raises `BadSampleError`."""
        rate = self.tools.durations(tool).durations.return_rate(elapsed_s)
        return lease_index(rate, self.reload_cost.seconds(context_tokens), context_tokens)

    # How.

    def _residual(
        self, key: ClassKey, attained: float, quantity: Callable[[ClassEstimators], ResidualEstimator]
    ) -> Prediction | None:
        own = self.classes.peek(key)
        if own is not None:
            value = quantity(own).mean_residual(attained)
            if value is not None:
                return Prediction(value, "class")
        value = quantity(self.pooled).mean_residual(attained)
        return None if value is None else Prediction(value, "pooled")

    def _join(self, known: _Program, key: ClassKey) -> None:
        """The program counts in this class now: labels may change, and a forgotten class may come back."""
        own = self.classes.use(key)
        if own is known.own:
            return
        if known.whole:
            known.own.leave(known.work_s, known.peak)
            own.enter(known.work_s, known.peak)
        known.key, known.own = key, own

    def _complete(self, known: _Program) -> None:
        """What it attained are its totals, in place of what it had attained before."""
        now = []
        for at, estimators in enumerate((known.own, self.pooled)):
            instead_of = None
            if known.completed:
                earlier, instead_of = known.completed[at]
                if earlier is not estimators:  # another class now
                    earlier.withdraw(instead_of)
                    instead_of = None
            before = estimators.work.refreshes, estimators.context.refreshes
            now.append((estimators, estimators.complete(known.work_s, known.peak, instead_of)))
            self._refreshes += before != (estimators.work.refreshes, estimators.context.refreshes)
        known.completed = tuple(now)
        self.samples += 1

    def _ended(self, program: Hashable) -> _Program | None:
        """Takes the program out; None: nothing is to be learned of it."""
        known = self._programs.pop(program, None)
        if known is None or not known.whole:
            return None
        if known.answered:
            return known
        if known.own.evicted:
            self._join(known, known.key)
        if known.turns:
            return known
        for estimators in (known.own, self.pooled):
            estimators.leave(known.work_s, known.peak)
        return None

    def _refuse(self, error: BadSampleError) -> None:
        self.refused[error.reason] = self.refused.get(error.reason, 0) + 1


def _mark_evicted(key: ClassKey, estimators: ClassEstimators) -> None:
    estimators.evicted = True
