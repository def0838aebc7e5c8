"""The bridge's index of its own engine, which can be dumped while the engine goes on.

A dump of millions of blocks takes seconds and goes in steps. So that it stands for one place in every rank's stream,
what changes meanwhile waits (it is forwarded at once all the same) and is applied afterwards, in order. If more changes
come than may wait, the dump is given up: whoever wanted it asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvcore import ApplyResult, Batch, IndexLimits, PrefixIndex, PreparedRanks
from kvcore.dump import Steps

APPLIED_AT_ONCE = 32
"""Changes applied in one step, once they need not wait any longer."""

M = TypeVar("M")


class OwnIndex:
    """``applied`` is told what each batch did, when it is applied. ``waiting_limit``: batches that may wait."""

    def __init__(
        self, worker: str, limits: IndexLimits, waiting_limit: int, applied: Callable[[int, ApplyResult], None]
    ) -> None:
        self.index = PrefixIndex(limits)
        self.given_up = 0
        """Dumps given up since the start."""
        self._worker = worker
        self._waiting_limit = waiting_limit
        self._applied = applied
        self._dumping = False
        self._waiting: deque[tuple[int, Batch | None]] = deque()  # without a batch: clear the rank

    @property
    def waiting(self) -> int:
        """Changes that wait."""
        return len(self._waiting)

    def apply(self, rank: int, batch: Batch) -> None:
        """A batch of ``rank``, now or after the dump that is under way."""
        self._change(rank, batch)

    def clear(self, rank: int) -> None:
        """Forget the rank. What waits of it need not be applied any more."""
        self._waiting = deque(change for change in self._waiting if change[0] != rank)
        self._change(rank, None)

    def forget(self) -> None:
        """Forget all ranks: the engine has others now. A dump that is under way is given up."""
        self._give_up()
        self._waiting.clear()
        self.index.remove_worker(self._worker)

    def restore(self, rank: int, prepared: PreparedRanks) -> None:
        """The rank as it was ``prepared``; empty where nothing was. A dump that is under way is given up."""
        self._give_up()
        self.clear(rank)
        while self._waiting:
            self._carry_out()
        self.index.adopt(prepared, [(self._worker, rank)])

    def dump(self, marks: Callable[[], M]) -> Steps[tuple[bytes, M] | None]:
        """The index with the ``marks`` that it stands for, in steps of milliseconds; ``None`` when it was given up."""
        yield from self._catch_up()
        at, dump = marks(), None
        self._dumping = True
        steps = self.index.dump_steps(self._worker)
        try:
            while self._dumping:
                next(steps)
                yield
        except StopIteration as end:
            dump = end.value
        finally:
            steps.close()
            self._dumping = False
        yield from self._catch_up()
        return None if dump is None else (dump, at)

    def _change(self, rank: int, batch: Batch | None) -> None:
        self._waiting.append((rank, batch))
        if not self._dumping and len(self._waiting) == 1:
            self._carry_out()
        elif len(self._waiting) > self._waiting_limit:
            self._give_up()
            self._carry_out()

    def _give_up(self) -> None:
        self.given_up += self._dumping
        self._dumping = False

    def _catch_up(self) -> Steps[None]:
        """Until nothing waits."""
        while self._waiting:
            for _ in range(min(APPLIED_AT_ONCE, len(self._waiting))):
                self._carry_out()
            yield

    def _carry_out(self) -> None:
        rank, batch = self._waiting.popleft()
        if batch is None:
            self.index.clear_rank(self._worker, rank)
        else:
            self._applied(rank, self.index.apply(self._worker, rank, batch))
