"""``python -m load.engine``: run one simulated engine until SIGTERM.

Prints one JSON line on stdout when it listens: ``{"ready": true, "url": ..., "kv_events": [...], "replay": [...],
"model": ...}`` (one endpoint per rank). Exit codes: 0 stopped as asked, 1 failed, 2 a setting is wrong.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from bus.errors import cannot_listen
from bus.log import EventLog
from bus.service import imports_of
from bus.tasks import Tasks

with imports_of("engine"):
    from load.command import run_command
    from load.engine.config import EngineSettings
    from load.engine.engine import Engine
    from load.engine.server import EngineServer
    from load.sockets import reachable

log = EventLog(__name__)


async def run_engine(settings: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `SettingsError` when a socket cannot be had."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = Tasks()
    engine = Engine(settings)
    server = EngineServer(engine)
    try:
        engine.start(tasks)
        try:
            await server.http.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise cannot_listen("http_port", settings.http_host, settings.http_port, error) from error
        print(json.dumps(ready_line(settings, engine, server.http.port)), flush=True)
        stopping = tasks.start("stop", stop.wait())
        await asyncio.wait({stopping, tasks.failed}, return_when=asyncio.FIRST_COMPLETED)
        code = 1 if tasks.failed.done() else 0
        engine.stopping.set()
        await server.http.close(drain_s=settings.stop_timeout_s if code == 0 else 0.0)
        log.info("engine_stopped", **engine.ledger.counts)
        return code
    finally:
        await tasks.stop()
        engine.stop()


def ready_line(settings: EngineSettings, engine: Engine, port: int) -> dict[str, Any]:
    """Where it can be reached from this machine."""
    host = "127.0.0.1" if settings.http_host in ("", "0.0.0.0", "::") else settings.http_host  # noqa: S104
    return {
        "ready": True,
        "url": f"http://{host}:{port}",
        "kv_events": [reachable(rank.publisher.endpoint) for rank in engine.ranks],
        "replay": [reachable(rank.publisher.replay_endpoint) for rank in engine.ranks],
        "model": settings.model,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. ``argv``: arguments without the program."""
    return run_command("engine", EngineSettings, run_engine, argv)


if __name__ == "__main__":
    sys.exit(main())
