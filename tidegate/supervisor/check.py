"""All settings of all parts, and the front door's certificate, read before anything is started: a mistake anywhere is
one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from bus.process_group import STOP_GRACE_S
from bus.settings import CommonSettings, load_settings, load_with_origins
from load.engine.config import EngineSettings
from load.pool.config import PoolSettings
from services.admission.config import AdmissionSettings
from services.bridge.config import BridgeSettings
from services.hints.config import HintsSettings
from services.indexer.config import IndexerSettings
from services.ingress.config import IngressSettings
from services.ingress.shell.tls import check_files
from services.recorder.config import RecorderSettings
from tidegate.supervisor.layout import ChildSpec

SETTINGS: dict[str, type[CommonSettings]] = {
    "admission": AdmissionSettings,
    "bridge": BridgeSettings,
    "engine": EngineSettings,
    "hints": HintsSettings,
    "indexer": IndexerSettings,
    "ingress": IngressSettings,
    "pool": PoolSettings,
    "recorder": RecorderSettings,
}
"""Section to its settings."""


S = TypeVar("S", bound=CommonSettings)

_STOP_GRACE_S = 1.0
_PARENT_GRACE_S = STOP_GRACE_S + 1.0
"""More, for a service that is several processes."""


def user_settings(
    section: str, kind: type[S], key: str, config: Path | None, overrides: Mapping[str, str] | None = None
) -> S | None:
    """Settings of ``section`` where the user has set ``key`` in the file or the environment; else ``None``.
    ``overrides``: what we set ourselves, without which they would not be whole."""
    loaded = load_with_origins(section, kind, file=config, overrides=overrides)
    return loaded.settings if key in loaded.origins else None


def check_settings(specs: Iterable[ChildSpec], config: Path | None) -> list[ChildSpec]:
    """As each child will read them, from ``config``, the environment and what we set; the specs again, each with the
    time that its settings give it to stop. Raises `SettingsError`."""
    return [_checked(spec, config) for spec in specs]


def _checked(spec: ChildSpec, config: Path | None) -> ChildSpec:
    if spec.section is None:
        return spec
    settings = load_settings(spec.section, SETTINGS[spec.section], file=config, overrides=spec.settings)
    several = False
    if isinstance(settings, IngressSettings):
        check_files(settings)
        several = settings.workers > 1
    return replace(spec, stop_s=settings.stop_timeout_s + _STOP_GRACE_S + several * _PARENT_GRACE_S)
