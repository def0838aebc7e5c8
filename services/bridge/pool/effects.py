"""What the core of a pool's bridge asks of its shell."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import PoolIndex
from services.bridge.effects import Publish, Say


@dataclass(frozen=True, slots=True)
class ListKeys:
    """Fetch the master's key list: `KeysListed` as it comes, then `ListEnded`; after that `GoOn` until the core has no
    more to do (`PoolCore.reconciling`)."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Compute what must change in ``here`` to be as ``there``, aside: neither changes meanwhile. Answered by
    `Compared`."""

    ticket: int
    here: PoolIndex
    there: PoolIndex


PoolEffect = Publish | Say | ListKeys | Compare
