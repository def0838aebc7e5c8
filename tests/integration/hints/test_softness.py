"""Hints change timing and nothing else: the same turns with hints carried out, lost, and not supported."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.nats import NatsBus
from schemas.hint import ActionResult, HintCommand
from schemas.session import SessionKey
from tests.integration.engine.engines import RunningEngine, running_engine
from tests.integration.hints.scripted import Results, Scripted, answers, leads, metrics
from tests.support.processes import eventually, python_process, settings_arguments

SESSIONS, TURNS, GROWTH = 5, 4, 160
BLOCKS = 64
"""Of the engine's device, 16 tokens each: less than the sessions want together."""

Lower = Callable[[HintCommand], Awaitable[Results | None]]


def lower_to(engine: RunningEngine) -> Lower:
    """What a bridge does: the envelope to the engine, its answer back."""

    async def lower(command: HintCommand) -> Results:
        status, answer = await engine.post("/kv_hints", msgspec.to_builtins(command.envelope))
        assert status == 200, answer
        return msgspec.convert(answer["results"], tuple[ActionResult, ...])

    return lower


async def lose(command: HintCommand) -> None:
    """The bridge is away."""
    del command


async def play(engine: RunningEngine, scripted: Scripted) -> list[Any]:
    """Sessions by turns, each with its lease; every other lease is revoked, one prompt is compacted, all close."""
    said = []
    prompts = {number: [number * 1000 + place for place in range(GROWTH)] for number in range(SESSIONS)}
    for turn in range(TURNS):
        for number, prompt in prompts.items():
            key = SessionKey(family="dynamo", root=f"s{number}")
            answer = await engine.complete(prompt, session_id=key.root, max_tokens=16)
            said.append((answer["choices"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]))
            scripted.session("acting", key, tokens=len(prompt) + 16)
            scripted.session("leased", key, tokens=len(prompt) + 16, leased_s=30.0)
            if (number + turn) % 2:
                scripted.session("revoked", key, tokens=len(prompt) + 16)
            prompt += [number * 1000 + turn * 200 + place for place in range(200, 200 + GROWTH)]
            await eventually(lambda: scripted.answered == len(scripted.commands))
    for number in prompts:
        scripted.session("closed", SessionKey(family="dynamo", root=f"s{number}"))
    return said


async def run(url: str, bus: NatsBus, directory: Path, lower: Lower | None) -> tuple[list[Any], dict[str, float]]:
    """What the engine said, and the outcomes by name; ``lower`` ``None``: the engine does what it is told."""
    options = ("--num-blocks", str(BLOCKS), "--block-size", "16", "--host-blocks", "256")
    async with running_engine(directory, *options) as engine:
        scripted = Scripted(bus, lower or lower_to(engine))
        await scripted.start()
        arguments = settings_arguments({"nats_url": url, "instance": "hints-1", "result_deadline_s": 1.0})
        async with python_process("services.hints", *arguments, directory=directory, name="hints") as process:
            await leads(process)
            scripted.worker(BLOCKS * 16)
            said = await play(engine, scripted)
            name = "tidegate_queue_depth", "hints_under_way"
            page: dict[tuple[str, ...], float] = {}

            def none_is_under_way() -> bool:
                """By one look at the page: more may be sent after it."""
                page.update(metrics(process))
                return bool(scripted.commands) and page[name] == 0

            await eventually(none_is_under_way)
        await scripted.stop()
    outcomes: dict[str, float] = {}
    for (family, *labels), value in page.items():
        if family == "tidegate_hint_results_total":
            outcomes[labels[2]] = outcomes.get(labels[2], 0.0) + value
    sent = sum(value for (family, *_), value in page.items() if family == "tidegate_hint_actions_total")
    assert sum(outcomes.values()) == sent, "every action is answered or given up, once"
    return said, outcomes


@pytest.mark.timeout(120)
async def test_hints_that_are_carried_out_lost_or_unsupported_change_no_answer(
    url: str, bus: NatsBus, tmp_path: Path
) -> None:
    """Under pressure, with pins, demotions and drops: the engine says word for word the same. Lost ones are given up at
    their deadline, what is unsupported is asked once a kind and no more."""
    results = {}
    for name, lower in (("carried out", None), ("lost", lose), ("unsupported", answers("unsupported"))):
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        results[name] = await run(url, bus, directory, lower)
    said, outcomes = results["carried out"]
    assert results["lost"][0] == said
    assert results["unsupported"][0] == said
    assert outcomes.get("accepted", 0) > 10, json.dumps(outcomes)
    assert set(results["lost"][1]) == {"unanswered"}
    assert set(results["unsupported"][1]) == {"unsupported"}
    assert sum(results["unsupported"][1].values()) <= 8
