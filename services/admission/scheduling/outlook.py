"""What is predicted of the programs of one class, until the estimates are made anew."""

from __future__ import annotations

from services.admission.estimators.class_key import ClassKey
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.residual import ProductLimit

MAX_CLASSES = 256
"""More are forgotten, and made anew: labels are strangers' words."""


class Outlook:
    """``work``, ``context``: the estimates that answer (``None``: no prediction). ``first_work``, ``first_context``:
    what they say of a program that has had nothing: GPU seconds, and tokens (``None``: no prediction). ``revision``: of
    what is learned, with which it was found to hold last."""

    __slots__ = ("context", "first_context", "first_work", "revision", "work")

    def __init__(self, work: ProductLimit | None, context: ProductLimit | None, revision: int) -> None:
        self.revision = revision
        self.work = work
        self.context = context
        self.first_work = work.mean_residual(0.0) if work is not None else 0.0
        self.first_context = context.mean_residual(0.0) if context is not None else None


class Outlooks:
    """Of every class that is asked for. ``with_work``: where nobody wants to know of the work, there is none."""

    def __init__(self, learned: LearnedPool, *, with_work: bool) -> None:
        self._learned = learned
        self._with_work = with_work
        self._known: dict[ClassKey, Outlook] = {}

    def of(self, key: ClassKey) -> Outlook:
        """The same object while its estimates stay."""
        revision = self._learned.revision
        before = self._known.get(key)
        if before is not None and before.revision == revision:
            return before
        work, context = self._learned.residuals(key)
        if not self._with_work:
            work = None
        if before is not None and before.work is work and before.context is context:
            before.revision = revision
            return before
        if len(self._known) >= MAX_CLASSES:
            self._known.clear()
        outlook = self._known[key] = Outlook(work, context, revision)
        return outlook
