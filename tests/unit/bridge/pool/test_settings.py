"""Settings of a bridge that stands for a pool, or whose engine reads one: wrong ones are said at start."""

from __future__ import annotations

from typing import Any

import pytest

from bus.errors import SettingsError
from schemas.pool import SharedLayout
from services.bridge.config import BridgeSettings
from tests.unit.bridge.pool.house import settings_of


def test_a_pools_bridge_needs_no_engine() -> None:
    """Its source is the master's one socket, seen from here."""
    settings = settings_of(pool_url="http://10.0.0.7:9003", pool_events="tcp://*:5557")
    assert settings.pool_source().events == "tcp://10.0.0.7:5557"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"engine_url": "http://127.0.0.1:8000"}, "engine_url"),
        ({"pool_url": "127.0.0.1:9003"}, "pool_url"),
        ({"pool_url": ""}, "pool_url"),
        ({"pool_events": ""}, "pool_events"),
        ({"pool_events": "127.0.0.1:5557"}, "pool_events"),
        ({"pool": "snapshot"}, "pool"),
        ({"pool_poll_s": 0}, "pool_poll_s"),
        ({"pool_max_pages": 0}, "pool_max_pages"),
    ],
)
def test_wrong_settings_of_a_pool_are_named(changes: dict[str, Any], key: str) -> None:
    """By the key that is wrong."""
    with pytest.raises(SettingsError) as raised:
        settings_of(**changes)
    assert raised.value.key == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"shared_tp": -1}, "shared_tp"),
        ({"shared_pool": "pool-b"}, "shared_layout"),
        ({"shared_pool": ""}, "shared_layout"),
    ],
)
def test_wrong_settings_of_an_engine_that_reads_a_pool_are_named(changes: dict[str, Any], key: str) -> None:
    """A layout is one of the pool that is read."""
    layout = SharedLayout(pool="pool-a", scheme="lmcache", page_size=256)
    values: dict[str, Any] = {"shared_pool": "pool-a", "shared_layout": layout, **changes}
    with pytest.raises(SettingsError) as raised:
        BridgeSettings(engine_url="http://127.0.0.1:8000", **values)
    assert raised.value.key == key
