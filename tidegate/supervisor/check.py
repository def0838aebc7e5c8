"""All settings of all parts, read before anything is started: a mistake anywhere is one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bus.settings import CommonSettings, load_settings
from load.engine.config import EngineSettings
from services.admission.config import AdmissionSettings
from services.bridge.config import BridgeSettings
from services.hints.config import HintsSettings
from services.indexer.config import IndexerSettings
from services.ingress.config import IngressSettings
from services.recorder.config import RecorderSettings
from tidegate.supervisor.layout import ChildSpec

SETTINGS: dict[str, type[CommonSettings]] = {
    "admission": AdmissionSettings,
    "bridge": BridgeSettings,
    "engine": EngineSettings,
    "hints": HintsSettings,
    "indexer": IndexerSettings,
    "ingress": IngressSettings,
    "recorder": RecorderSettings,
}
"""Section to its settings."""


def check_settings(specs: Iterable[ChildSpec], config: Path | None) -> None:
    """As each child will read them, from ``config``, the environment and what we set. Raises `SettingsError`."""
    for spec in specs:
        if spec.section is not None:
            load_settings(spec.section, SETTINGS[spec.section], file=config, overrides=spec.settings)
