"""What a worker's profile says of hints: planner and front door go by it."""

from __future__ import annotations

import json
from typing import Literal

import pytest

from schemas.worker import runs_high_first
from services.bridge.adapters.actions import EngineFacts
from services.bridge.engine import EngineView, Sight
from services.bridge.hint_page import HintPage
from services.bridge.profile import ModelsReport, parse_server_info
from tests.unit.bridge.hints.commands import PAGE


def view(page: HintPage | None, *carried: str, pin_prefix: bool = False) -> EngineView:
    engine = EngineView(
        url="http://e", engine=None, block_size=16, unhealthy_after=3, ready_after=2, request_hints=frozenset(carried)
    )
    engine.scrape_worked(None, Sight(ModelsReport("m", ("m",)), hints=page, has_pin_prefix=pin_prefix))
    return engine


def test_an_engine_is_what_its_page_and_its_operator_say() -> None:
    """Its tiers; what requests carry, but envelopes only where they cannot go at once."""
    assert view(PAGE, "continuum", "kv_hints").features() == ("kv_hints", "tier:host", "tier:pool", "request:continuum")
    assert view(None, "kv_hints").features() == ("request:kv_hints",)
    assert view(None).features() == ()


@pytest.mark.parametrize(
    ("engine", "told", "high_first"),
    [
        ("sglang", {}, True),
        ("sglang", {"schedule_low_priority_values_first": False}, True),
        ("sglang", {"schedule_low_priority_values_first": True}, False),
        ("vllm", {"schedule_low_priority_values_first": True}, False),
    ],
)
def test_sglang_says_which_priorities_it_runs_first(
    engine: Literal["vllm", "sglang"], told: dict[str, bool], high_first: bool
) -> None:
    """The higher ones, unless it was started with ``--schedule-low-priority-values-first``."""
    seen = EngineView(url="http://e", engine=engine, block_size=16, unhealthy_after=3, ready_after=2)
    info = parse_server_info(json.dumps({"page_size": 16, **told}).encode())
    seen.scrape_worked(None, Sight(ModelsReport("m", ("m",)), info=info))
    assert runs_high_first(seen.profile()) is high_first


def test_adapters_get_the_same() -> None:
    """And whether SGLang's endpoint is there; before the engine was seen, nothing is."""
    assert view(PAGE, "continuum", pin_prefix=True).hint_facts() == EngineFacts(
        page=PAGE, has_pin_prefix=True, by_request=frozenset({"continuum"})
    )
    unseen = EngineView(url="http://e", engine="vllm", block_size=16, unhealthy_after=3, ready_after=2)
    assert unseen.hint_facts() == EngineFacts(kind="vllm")
