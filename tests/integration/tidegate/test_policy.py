"""``tidegate policy`` against real processes: the examples as their users run them, and policies that misbehave."""

from __future__ import annotations

import ast
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.interface import BusMessage, Endpoint
from bus.nats import NatsBus
from schemas.policy import POLICY_ASKS
from tests.support.processes import HelperProcess, eventually, start_process
from tidegate import AdmitAnswer, Policy
from tidegate.services import find_services, subjects_of

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))
TEXTS = {path.stem: path.read_text() for path in EXAMPLES}
ASK = {"tenant_home": "route", "prefer_big_worker": "route", "keep_main_agents": "hint"}
"""What an example answers, where it is not ``admit``."""


@asynccontextmanager
async def running(command: list[str], directory: Path, name: str) -> AsyncIterator[HelperProcess]:
    process = await start_process([sys.executable, *command], directory, name=name)
    try:
        yield process
    finally:
        await process.close()


async def report(url: str, directory: Path, *arguments: str, code: int | None = 0) -> dict[str, Any]:
    """The object that `tidegate policy ... --json` prints."""
    command = ["-m", "tidegate", "policy", *arguments, "--json", "--nats", url]
    async with running(command, directory, f"policy-{arguments[0]}") as process:
        assert await process.wait() == code, process.output
        return dict(json.loads(process.stdout.splitlines()[-1]))


async def is_served(bus: NatsBus, subject: str) -> None:
    """Until a micro service names the subject."""
    while not any(subject in subjects_of(service) for service in await find_services(bus, "INFO")):
        pass


def not_ok(found: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in found["checks"] if check["verdict"] != "ok"}


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
async def test_an_example_has_thirty_lines_runs_and_conforms(
    example: Path, url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Beside its docstring; as ``python examples/NAME.py --nats URL``; the kit finds nothing that failed."""
    text = TEXTS[example.stem]
    docstring = ast.parse(text).body[0]
    assert isinstance(docstring, ast.Expr)
    lines = text.splitlines()[docstring.end_lineno :]
    assert len([line for line in lines if line.strip()]) <= 30
    name, ask = example.stem.replace("_", "-"), ASK.get(example.stem, "admit")
    async with running([str(example), "--nats", url], tmp_path, example.stem) as process:
        await is_served(bus, subjects.policy(ask, name))
        found = await report(url, tmp_path, "check", name, "--deadline-ms", "1000", "--questions", "20")
        assert {check["name"].split(":")[0] for check in found["checks"]} == {ask}
        assert "failed" not in not_ok(found).values(), found
        assert found["latency"][ask]["asked"] == 20
        if ask == "route":
            listed = await report(url, tmp_path, "list")
            assert listed["policies"] == [
                {"name": name, "answers": {ask: 1}, "asked": [], "deadline_ms": None, "missing": []}
            ]
        if "tidegate" in text:
            process.signal(signal.SIGTERM)
            assert await process.wait() == 0
    assert ("Policy(" in text) == (example.stem != "prefer_big_worker")


async def test_a_wrong_address_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    async with running([str(EXAMPLES[0]), "--nats", "nonsense"], tmp_path, "wrong") as process:
        assert await process.wait() == 2
        assert "Traceback" not in process.stderr
        assert "nonsense" in process.stderr


def answering(bus: NatsBus, make: Callable[[dict[str, Any]], bytes | None]) -> Callable[[BusMessage], None]:
    def answer(message: BusMessage) -> None:
        made = make(json.loads(message.payload))
        if made is not None:
            bus.publish(message.reply, made)

    return answer


@pytest.mark.parametrize(
    ("make", "failing"),
    [
        (lambda question: b'{"worker":"worker-1"}', "route: no candidate usable"),
        (lambda question: b'{"worker":"somebody"}', "route: small question"),
        (lambda question: b"worker-0", "route: unknown fields"),
        (lambda question: b"{}" if question["request_id"] else None, "route: wrong types"),
        (lambda question: None, "route: small question"),
    ],
    ids=["excluded", "no candidate", "no JSON", "raises on garbage", "silent"],
)  # fmt: skip
async def test_a_policy_that_misbehaves_is_told_what_to_do(
    make: Callable[[dict[str, Any]], bytes | None], failing: str, url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Each way to be wrong fails its own check, which says what to do; the others are judged all the same."""
    await bus.serve(
        "policy-bad", "1.0.0", "", [Endpoint("route", subjects.policy("route", "bad"), answering(bus, make))], {}
    )
    arguments = ("check", "bad", "--deadline-ms", "300", "--questions", "5")
    if failing == "route: wrong types":  # an error for each is how a micro service survives
        assert "failed" not in not_ok(await report(url, tmp_path, *arguments)).values()
        return
    found = await report(url, tmp_path, *arguments, code=1)
    assert not_ok(found)[failing] == "failed"
    assert all(check["fix"] for check in found["checks"] if check["verdict"] != "ok")


async def test_one_that_dies_of_garbage_is_found_out(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """The question after it has no answer."""
    policy = tmp_path / "fragile.py"
    policy.write_text(
        "import asyncio, json, sys, nats\n"
        "async def main():\n"
        "    bus = await nats.connect(sys.argv[1])\n"
        "    questions = await bus.subscribe('tg.v1.policy.admit.fragile')\n"
        "    print('ready', flush=True)\n"
        "    async for message in questions.messages:\n"
        "        json.loads(message.data)['request_id']\n"
        "        await message.respond(b'{}')\n"
        "asyncio.run(main())\n"
    )
    async with running([str(policy), url], tmp_path, "fragile") as process:
        await process.wait_line()
        found = await report(url, tmp_path, "check", "fragile", "--deadline-ms", "300", "--questions", "5", code=1)
        assert not_ok(found)["admit: nothing"] == "failed"
        assert not_ok(found)["admit: in $SRV"] == "warning"
        assert await process.wait() == 1


async def test_nobody_there_is_said_with_the_subject(url: str, tmp_path: Path) -> None:
    found = await report(url, tmp_path, "check", "ghost", "--ask", "lease", code=1)
    (check,) = found["checks"]
    assert check["verdict"] == "failed"
    assert "tg.v1.policy.lease.ghost" in check["fix"]
    assert found["ok"] is False
    async with running(["-m", "tidegate", "policy", "check", "x", "--ask", "hold"], tmp_path, "wrong") as process:
        assert await process.wait() == 2
        assert "route, admit, lease, hint" in process.stderr


async def test_a_policy_of_the_kit_answers_all_four(url: str, bus: NatsBus, tmp_path: Path) -> None:
    """Without --ask everything that it answers is checked; for people a line a check, with a verdict at the end."""
    policy = Policy("all: four")
    policy.route(lambda question: None)
    policy.admit(lambda question: AdmitAnswer(action="hold", hold_ms=100, reason="later"))
    policy.lease(lambda question: True)
    policy.hint(lambda question: [])
    await policy.start(bus)
    command = ["-m", "tidegate", "policy", "check", "all: four", "--nats", url, "--questions", "10"]
    async with running([*command, "--deadline-ms", "1000"], tmp_path, "people") as process:
        assert await process.wait() == 0, process.output
        lines = process.stdout.splitlines()
        assert {line.split(":")[0] for line in lines[:-1]} == set(POLICY_ASKS)
        assert "\x1b" not in process.stdout
    await eventually(lambda: policy.counts.rejected >= 4)
    assert policy.counts.failed == 0
    await policy.stop()
