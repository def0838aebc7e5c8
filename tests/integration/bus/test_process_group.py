"""Members of a process group that come to nothing: real processes that do what a plan says."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bus.held_address import HeldAddress
from bus.membership import Membership
from bus.process_group import REFUSALS, ProcessGroup
from bus.settings import CommonSettings
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(120)


def group(directory: Path, *plans: str, start_s: float = 60.0) -> ProcessGroup:
    """A member for each plan."""
    for number, plan in enumerate(plans, 1):
        (directory / f"plan-{number}").write_text(plan)

    def command(member: Membership) -> list[str]:
        return [sys.executable, "-m", "tests.integration.bus.group_member", str(directory), str(member.number)]

    held = HeldAddress("port", "127.0.0.1", 0)
    settings = CommonSettings(http_port=-1, stop_timeout_s=5.0)
    return ProcessGroup("ingress", settings, len(plans), command, held, start_s=start_s)


def starts(directory: Path, number: int) -> int:
    file = directory / f"starts-{number}"
    return int(file.read_text() or 0) if file.exists() else 0


async def served(directory: Path, number: int) -> Path:
    """The file that keeps it alive."""
    file = directory / f"end-{number}"
    await eventually(file.exists, timeout_s=60)
    return file


async def test_settings_that_became_wrong_end_the_group_when_nobody_is_left_who_took_them(tmp_path: Path) -> None:
    """One that is started again refuses them: the other serves on, however often that happens. When that one ends too,
    the group says so and ends as a process does whose setting is wrong."""
    running = asyncio.ensure_future(group(tmp_path, "serve refuse", "serve refuse").run())
    first, second = await served(tmp_path, 1), await served(tmp_path, 2)
    first.unlink()
    await eventually(lambda: starts(tmp_path, 1) > REFUSALS + 1, timeout_s=60)
    assert not running.done()
    second.unlink()
    assert await running == 2
    assert starts(tmp_path, 2) >= REFUSALS + 1


async def test_a_process_that_hangs_before_it_has_pages_is_killed(tmp_path: Path) -> None:
    """Its deadline is that of a start; the next one of its place serves."""
    running = asyncio.ensure_future(group(tmp_path, "hang serve", start_s=6.0).run())
    await served(tmp_path, 1)
    assert starts(tmp_path, 1) == 2
    (tmp_path / "end-1").unlink()
    await eventually(lambda: starts(tmp_path, 1) == 3, timeout_s=60)
    await served(tmp_path, 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_processes_that_never_start_are_given_up(tmp_path: Path) -> None:
    """After a few tries, with exit code 1: whoever supervises the group hears of it."""
    assert await group(tmp_path, "hang", start_s=5.0).run() == 1
    assert starts(tmp_path, 1) == 3
