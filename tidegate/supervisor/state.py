"""``<workdir>/up.json``: where a running system is reached, so that `tidegate tail` and `doctor` find it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

FILE_NAME = "up.json"
DEFAULT_WORKDIR = ".tidegate"


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """``worker``: its id on the bus, where we gave it one."""

    url: str
    worker: str | None = None
    simulated: bool = False


class SystemState(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of one system. ``health``: child to the URL of its readiness page. Paths are absolute.

    ``bus_note``: why the bus is not where others look for it, else empty. ``nats_user``: who commands are on a bus
    with users, and the file with its password. ``door_cert``: the front door's certificate, where it has one;
    ``door_keys``: it wants API keys.
    """

    pid: int
    url: str
    nats_url: str
    model: str | None
    workdir: str
    traces: str
    logs: str
    engines: tuple[EngineState, ...]
    health: dict[str, str]
    bus_note: str = ""
    nats_user: str = ""
    nats_password_file: str = ""
    door_cert: str = ""
    door_keys: bool = False


def write_state(workdir: Path, state: SystemState) -> Path:
    """Whole or not at all."""
    path = workdir / FILE_NAME
    fresh = path.with_suffix(".json.new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    os.replace(fresh, path)
    return path


def read_state(workdir: Path) -> SystemState | None:
    """The state that a running system left there, or ``None``."""
    try:
        return msgspec.json.decode((workdir / FILE_NAME).read_bytes(), type=SystemState)
    except (OSError, msgspec.DecodeError):
        return None


def remove_state(workdir: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (workdir / FILE_NAME).unlink()
