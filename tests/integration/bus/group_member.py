"""A member of a process group that behaves as the file beside its argument says, line by line, one for each start.

``serve``: tells that it has started and ends when told to (a file ``end-<number>`` that vanishes); ``refuse``: exit
code 2; ``hang``: says nothing, for ever.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from bus.health import HealthServer
from bus.membership import ParentLine


def begin(file: Path) -> None:
    file.touch()


def told_to_end(file: Path) -> bool:
    return not file.exists()


async def serve(end: Path) -> None:
    line, health = ParentLine(), HealthServer(lambda: None)
    await health.start("127.0.0.1", 0)
    await line.open()
    gone = asyncio.Event()
    watching = asyncio.create_task(line.watch(gone.set))
    line.tell(f"http://127.0.0.1:{health.port}", started=True)
    begin(end)
    while not told_to_end(end) and not gone.is_set():  # noqa: ASYNC110 - a file
        await asyncio.sleep(0.05)
    watching.cancel()


def main(directory: Path, number: str) -> int:
    starts = directory / f"starts-{number}"
    done = int(starts.read_text()) if starts.exists() else 0
    starts.write_text(str(done + 1))
    plan = (directory / f"plan-{number}").read_text().split()
    doing = plan[min(done, len(plan) - 1)]
    if doing == "serve":
        asyncio.run(serve(directory / f"end-{number}"))
    elif doing == "hang":
        time.sleep(3600)
    return 2 if doing == "refuse" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
