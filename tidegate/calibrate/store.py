"""The bus's side: where a worker's engine is, and the bucket that curves are stored in."""

from __future__ import annotations

import asyncio

from bus.errors import BusError
from bus.interface import Bus, BusMessage
from bus.subjects import BUCKET_CALIBRATIONS, ROOT, calibration
from schemas.base import BadMessageError, from_json, to_json
from schemas.calibration import Calibration
from schemas.worker import WorkerState
from tidegate.errors import CalibrationError

LISTEN_S = 2.5
"""Bridges speak once a second."""


def key_of(stored: Calibration) -> str:
    """Where a curve is stored in `BUCKET_CALIBRATIONS`."""
    return calibration(stored.model, stored.profile)


async def store(bus: Bus, measured: Calibration) -> None:
    """Replaces what was measured before of the same model and profile. Raises `BusError`."""
    bucket = await bus.key_value(BUCKET_CALIBRATIONS)
    await bucket.put(key_of(measured), to_json(measured))


async def find_worker(bus: Bus, name: str, timeout_s: float = LISTEN_S) -> WorkerState:
    """What the bridge of a worker says of it. Raises `CalibrationError`, which names those that were heard."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[WorkerState] = loop.create_future()
    heard: set[str] = set()

    def on_state(message: BusMessage) -> None:
        try:
            state = from_json(message.payload, WorkerState)
        except BadMessageError:
            return
        if state.health == "left":
            return
        heard.add(state.worker)
        if state.worker == name and state.profile.model and not found.done():
            found.set_result(state)

    subscription = None
    try:
        subscription = await bus.subscribe(f"{ROOT}.worker.state.>", on_state)
        async with asyncio.timeout(timeout_s):
            return await found
    except TimeoutError:
        others = f"heard: {', '.join(sorted(heard)[:20])}" if heard else "none was heard; is this the right bus?"
        known = "its engine is not known yet" if name in heard else f"no worker {name!r} is there"
        raise CalibrationError(f"{known} ({others}); name another with --worker, or give the engine's URL") from None
    except BusError as error:
        raise CalibrationError(f"the bus does not answer ({error.reason}); give the engine's URL") from error
    finally:
        if subscription is not None:
            await subscription.unsubscribe()
