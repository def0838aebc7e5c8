"""``python -m load.pool``: run one simulated shared pool until SIGTERM.

Prints one JSON line on stdout when it listens: ``{"ready": true, "url": ..., "kv_events": ..., "backend_id": ...}``.
Exit codes: 0 stopped as asked, 1 failed, 2 a setting is wrong.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence

from bus.errors import cannot_listen
from bus.log import EventLog
from bus.service import imports_of
from bus.tasks import Tasks

with imports_of("pool"):
    from load.command import run_command
    from load.pool.config import PoolSettings
    from load.pool.server import PoolServer
    from load.sockets import reachable

log = EventLog(__name__)


async def run_pool(settings: PoolSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `SettingsError` when a socket cannot be had."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = Tasks()
    pool = PoolServer(settings)
    try:
        pool.start()
        try:
            await pool.http.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise cannot_listen("http_port", settings.http_host, settings.http_port, error) from error
        print(json.dumps(ready_line(settings, pool)), flush=True)
        tasks.start("clients", pool.run())
        stopping = tasks.start("stop", stop.wait())
        await asyncio.wait({stopping, tasks.failed}, return_when=asyncio.FIRST_COMPLETED)
        code = 1 if tasks.failed.done() else 0
        pool.stopping.set()
        await pool.http.close(drain_s=settings.stop_timeout_s if code == 0 else 0.0)
        log.info("pool_stopped", objects=len(pool.store), batches=pool.publisher.published_batches)
        return code
    finally:
        await tasks.stop()
        pool.stop()


def ready_line(settings: PoolSettings, pool: PoolServer) -> dict[str, object]:
    """Where it can be reached from this machine."""
    host = "127.0.0.1" if settings.http_host in ("", "0.0.0.0", "::") else settings.http_host  # noqa: S104
    return {
        "ready": True,
        "url": f"http://{host}:{pool.http.port}",
        "kv_events": reachable(pool.publisher.endpoint),
        "backend_id": settings.backend_id,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. ``argv``: arguments without the program."""
    return run_command("pool", PoolSettings, run_pool, argv)


if __name__ == "__main__":
    sys.exit(main())
