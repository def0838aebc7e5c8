"""What an ingress says of its requests once a second, in messages that are small enough."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.base import to_json
from schemas.ingress import HedgePlace, InFlight
from services.ingress.requests import Race, Record

STATE_PART_BYTES = 4 * 1024 * 1024
"""Requests in one `IngressState` weigh at most so much: half of what a message may (DESIGN.md §3)."""


def parts(records: Iterable[Record], most: int) -> list[tuple[InFlight, ...]]:
    """At least one part, each of at most ``most`` requests and, as long as ids may be, `STATE_PART_BYTES`."""
    whole: list[tuple[InFlight, ...]] = []
    part: list[InFlight] = []
    room = STATE_PART_BYTES
    for one, size in map(_sized, records):
        if part and (len(part) >= most or size > room):
            whole.append(tuple(part))
            part, room = [], STATE_PART_BYTES
        part.append(one)
        room -= size + 1
    return [*whole, tuple(part)] if part or not whole else whole


def _sized(record: Record) -> tuple[InFlight, int]:
    """With its size in bytes. Of a stream it is made once, for nothing of it changes until its end."""
    if record.in_flight is not None:
        return record.in_flight
    one = _in_flight(record)
    sized = one, len(to_json(one))
    if record.state == "streaming":
        record.in_flight = sized
    return sized


def _hedge(race: Race | None) -> HedgePlace | None:
    if race is None or race.granted is None:
        return None
    grant = race.granted.grant
    return HedgePlace(worker=grant.worker, rank=grant.rank, grant_id=grant.grant_id, grant_epoch=grant.epoch)


def _in_flight(record: Record) -> InFlight:
    granted = record.granted
    return InFlight(
        request_id=record.request_id,
        model=record.model,
        identity=record.identity,
        received_ms=record.received_ms,
        kind=record.kind,
        endpoint=record.request.endpoint,
        # Who names a worker is booked there, and what only counts takes no place.
        worker=None if record.counts_only else record.worker,
        rank=record.rank,
        grant_id=record.grant_id,
        grant_epoch=granted.grant.epoch if granted else None,
        mode=record.mode,
        input_tokens=record.input_tokens,
        attempt=record.attempt,
        predicted_cached_tokens=granted.predicted_cached_tokens if granted else 0,
        hold_reason=record.hold_reason if record.state == "held" else None,
        digest=record.digest.hex(),
        hedge=_hedge(record.race),
        held_since_ms=int(record.held_at * 1000) if record.state == "held" and record.held_at is not None else None,
    )
