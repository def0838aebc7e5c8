"""Who leads: a lease in the bucket ``TG_LEADERS``, renewed by its holder, taken over when it grows old.

`Lease` is the rule, without I/O; `Leadership` keeps it against a bus. Rules:

- The epoch of a leadership is the revision of the key at its take-over: it grows with every leader.
- A holder renews every ``renew_s``. It stops leading by itself when its last renewal was sent 0.75 ``lease_s`` ago,
  unless it is in doubt. An answer counts from when its renewal was sent, however late it comes (a server that is slow):
  it is waited for as long as ``lease_s``.
- One that stopped so leads again as soon as a renewal is taken: nobody has written the key since.
- Others take over when they have seen the same revision for 0.85 ``lease_s`` in a bucket that could be written all the
  time: later than the holder stops (it sent the renewal before anybody saw it), and, with the time to notice, not
  later than ``lease_s`` after the holder's end. No clock is compared with another machine's.
- In doubt is a holder whose server says that nobody takes what is written to the bucket: the servers that keep it elect
  (4 to 9 s by NATS's own times), and nobody else can take over either. It leads on for `DOUBT_S`. If its server is cut
  off from the others instead, somebody leads there besides: who hears both goes by the higher epoch.
- A process that starts takes over at once from a holder of the same name: its supervisor restarted it.
- A holder that stops cleanly gives the lease back, and is followed at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from bus.errors import BusError, NoRespondersError, WrongRevisionError
from bus.interface import Bus, KeyEntry, KeyValue
from bus.log import EventLog
from bus.subjects import BUCKET_LEADERS
from schemas.base import UNDECODABLE

log = EventLog(__name__)

HOLDS = 0.75
"""Share of the lease for which a holder trusts its last renewal."""
TAKEN_OVER = 0.85
"""Share of the lease for which others leave an unchanged key alone."""
DOUBT_S = 15.0
"""How long after its last renewal a holder leads that cannot renew, in seconds: longer than a lost election and a won
one."""
UNSEEN = 0.6
"""Share of the lease after which a standby that could not look begins to count anew."""
LOOK_S = 0.1
"""How often a standby looks at the key, in seconds."""
Taker = Literal["somebody", "nobody", "unknown"]
"""Whether somebody takes what is written to the bucket."""


class LeaseValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the key says (JSON). ``incarnation`` tells two processes of one name apart; no ``holder``: given back."""

    holder: str = ""
    incarnation: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """Write ``value`` to the key if its revision is still ``revision`` (0: if the key does not exist)."""

    value: LeaseValue
    revision: int


class Lease:
    """One process's view of the lease. Times are seconds of one monotonic clock, given to every call."""

    def __init__(self, holder: str, incarnation: str, lease_s: float) -> None:
        self._holder = holder
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._revision = 0
        self._seen: float | None = None
        self._renewed = 0.0
        self._doubted: float | None = None
        self._looked = 0.0
        self._starting = True
        self._epoch: int | None = None
        self.mine = False
        """Whether we wrote the key's last revision that we know: we lead, or would if a renewal were taken."""

    def epoch(self, now: float) -> int | None:
        """Epoch of our leadership while it holds, else ``None``."""
        if self._epoch is not None and not self._holds(now):
            self._epoch = None
        return self._epoch

    def unrenewed(self, now: float) -> None:
        """There was nobody just now who could have taken a renewal, or a claim of others."""
        self._doubted = now

    def in_doubt(self, now: float) -> bool:
        """Whether we lead without a renewal: nobody may hear us but those on our side of a bus that is cut in two."""
        return self.epoch(now) is not None and now - self._renewed >= HOLDS * self._lease_s

    def _holds(self, now: float) -> bool:
        holds_s = HOLDS * self._lease_s
        if now - self._renewed < holds_s:
            return True
        # Who slept has not tried: it does not know what happened meanwhile.
        tried = self._doubted is not None and now - self._doubted < holds_s
        return tried and now - self._renewed < DOUBT_S

    def lose(self) -> None:
        """We do not lead any more, and wait like everybody else."""
        self._epoch = None
        self._seen = None
        self.mine = False

    def arrived(self, revision: int) -> None:
        """The key is as we wrote it: a renewal came there whose answer did not come here."""
        self._revision = revision

    def renewal(self) -> Claim:
        """What a holder writes, and one that was: it is refused if anybody else wrote since."""
        return Claim(self._value(self._epoch or 0), self._revision)

    def given_back(self) -> Claim:
        """What a holder writes when it stops."""
        return Claim(LeaseValue(), self._revision)

    def look(self, revision: int, value: LeaseValue | None, now: float) -> Claim | None:
        """The key as it is (``revision`` 0 and no ``value``: there is none): what to write in order to lead."""
        starting, self._starting = self._starting, False
        blind = now - self._looked >= UNSEEN * self._lease_s
        self._looked = now
        if self._seen is None or blind or revision != self._revision:
            self._revision, self._seen = revision, now
        free = value is None or not value.holder
        restarted = value is not None and value.holder == self._holder and (starting or self.ours(value))
        if free or restarted or now - self._seen >= TAKEN_OVER * self._lease_s:
            return Claim(self._value(0), revision)
        return None

    def written(self, revision: int, sent: float) -> None:
        """Our claim, sent at ``sent``, was accepted as ``revision``."""
        self._revision, self._renewed, self._doubted, self.mine = revision, sent, None, True
        if self._epoch is None:
            self._epoch = revision

    def ours(self, value: LeaseValue | None) -> bool:
        """Whether the key's value was written by this very process."""
        return value is not None and value.incarnation == self._incarnation and value.holder == self._holder

    def _value(self, epoch: int) -> LeaseValue:
        return LeaseValue(holder=self._holder, incarnation=self._incarnation, epoch=epoch)


class Leadership:
    """Keeps a lease on ``key``. ``changed`` is called with the epoch when we lead, with ``None`` when we do not.

    ``run`` is a loop for `bus.tasks.Tasks`; call ``give_back`` at the end of a clean stop. ``epoch`` may be asked at
    any time: it does not trust a lease that the process slept through.
    """

    def __init__(
        self,
        bus: Bus,
        key: str,
        *,
        instance: str,
        incarnation: str,
        lease_s: float,
        renew_s: float,
        changed: Callable[[int | None], None],
    ) -> None:
        self._bus = bus
        self._key = key
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._changed = changed
        self._lease = Lease(instance, incarnation, lease_s)
        self._told: int | None = None
        self._stopped = False
        self._doubt_told = False
        self._bucket: KeyValue | None = None
        self.settled = False
        """Whether the key has been read: we lead, or know that somebody may."""

    @property
    def epoch(self) -> int | None:
        """Epoch of our leadership at this moment."""
        return self._lease.epoch(time.monotonic())

    @property
    def in_doubt(self) -> bool:
        """Whether we lead at this moment without a renewal (`Lease.in_doubt`)."""
        return self._lease.in_doubt(time.monotonic())

    async def run(self) -> None:
        """Lead whenever nobody else does, until cancelled or given back."""
        while not self._stopped:
            began, pause_s = time.monotonic(), LOOK_S
            try:
                await self._attempt()
                if self.epoch is not None:
                    pause_s = max(0.0, began + self._renew_s - time.monotonic())
            except BusError as error:
                await self._taken_by(error.reason)
            self._tell()
            await asyncio.sleep(pause_s)
            self._tell()

    async def give_back(self, timeout_s: float = 1.0) -> None:
        """Stop leading, so that a standby follows at once. What goes wrong here costs only time."""
        self._stopped = True
        if self.epoch is None or self._bucket is None:
            return
        claim = self._lease.given_back()
        self._lease.lose()
        self._tell()
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_back(self._bucket, claim)
        except (BusError, TimeoutError) as error:
            log.warning("lease_not_given_back", key=self._key, error=error)

    async def _write_back(self, bucket: KeyValue, claim: Claim) -> None:
        payload = msgspec.json.encode(claim.value)
        try:
            await bucket.update(self._key, payload, claim.revision)
        except WrongRevisionError:
            # Either somebody took over, or a renewal that was under way came first.
            entry = await bucket.get(self._key)
            if entry is not None and self._lease.ours(_value(entry)):
                await bucket.update(self._key, payload, entry.revision)

    async def _attempt(self) -> None:
        """One step, with patience: a server that is slow answers in the end. Not where nobody is there to answer."""
        step = asyncio.ensure_future(self._step())
        doubt: asyncio.Future[Taker] | None = None
        pause_s = self._renew_s
        try:
            async with asyncio.timeout(self._lease_s):
                while not step.done():
                    await asyncio.wait({step}, timeout=pause_s)
                    self._tell()
                    if step.done():
                        break
                    asked = time.monotonic()
                    doubt = asyncio.ensure_future(self._taken_by("late"))
                    await asyncio.wait({step, doubt}, return_when=asyncio.FIRST_COMPLETED)
                    if step.done():
                        break
                    took_s = time.monotonic() - asked
                    if doubt.result() == "somebody":
                        # It was asked later and is answered: what was sent before has gone to a server that is gone.
                        await asyncio.wait({step}, timeout=max(LOOK_S, took_s))
                    if not step.done() and doubt.result() != "unknown":
                        return
                    pause_s = max(0.0, self._renew_s - took_s)
            step.result()
        except TimeoutError:
            log.debug("lease_failed", key=self._key, reason="silence")
        finally:
            await _ended(step)
            if doubt is not None:
                await _ended(doubt)

    async def _taken_by(self, reason: str) -> Taker:
        """A renewal failed or is late: is there anybody who could take it?"""
        log.debug("lease_failed", key=self._key, reason=reason)
        if self._bucket is None or self.epoch is None:
            return "unknown"
        try:
            async with asyncio.timeout(self._renew_s):
                await self._bucket.check_writable(self._key)
        except NoRespondersError:
            self._lease.unrenewed(time.monotonic())
            if not self._doubt_told:
                self._doubt_told = True
                log.warning("leadership_in_doubt", key=self._key, epoch=self.epoch)
            return "nobody"
        except (BusError, TimeoutError):
            return "unknown"
        return "somebody"

    async def _step(self) -> None:
        if self._bucket is None:
            self._bucket = await self._bus.key_value(BUCKET_LEADERS)
        if not self._lease.mine:
            await self._look(self._bucket)
            return
        try:
            await self._write(self._bucket, self._lease.renewal())
        except WrongRevisionError:
            # Either somebody took over, or an earlier renewal arrived whose answer did not.
            entry = await self._bucket.get(self._key)
            if entry is None or not self._lease.ours(_value(entry)):
                self._lease.lose()
            else:
                self._lease.arrived(entry.revision)
                await self._write(self._bucket, self._lease.renewal())

    async def _look(self, bucket: KeyValue) -> None:
        # Both at once: behind a slow server one after the other takes longer than a standby may not look. The second
        # makes a bucket that was lost.
        refused, entry = await asyncio.gather(
            bucket.check_writable(self._key), bucket.get(self._key), return_exceptions=True
        )
        if isinstance(refused, BaseException):
            raise refused
        if isinstance(entry, BaseException):
            raise entry
        self.settled = True
        claim = self._lease.look(entry.revision if entry else 0, _value(entry) if entry else None, time.monotonic())
        if claim is None or self._stopped:
            return
        try:
            await self._write(bucket, claim)
        except WrongRevisionError:
            self._lease.lose()

    async def _write(self, bucket: KeyValue, claim: Claim) -> None:
        payload, sent = msgspec.json.encode(claim.value), time.monotonic()
        if claim.revision:
            revision = await bucket.update(self._key, payload, claim.revision)
        else:
            revision = await bucket.create(self._key, payload)
        if not self._stopped:
            self._lease.written(revision, sent)
            self._doubt_told = False

    def _tell(self) -> None:
        epoch = self.epoch
        if epoch != self._told:
            self._told = epoch
            log.info("leadership", key=self._key, epoch=epoch)
            self._changed(epoch)


def _value(entry: KeyEntry) -> LeaseValue:
    """Of a value that nobody can read, nobody is the holder."""
    try:
        return msgspec.json.decode(entry.value or b"{}", type=LeaseValue)
    except UNDECODABLE:
        return LeaseValue()


async def _ended(work: asyncio.Future[Any]) -> None:
    """Stop what is still under way."""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
