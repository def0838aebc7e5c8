"""What an engine says about itself over HTTP: ``/v1/models``, ``/metrics``, ``/version``, ``/server_info``.

Names of metrics: spec engine-events §3 (vLLM, label ``engine`` is the rank) and §5 (SGLang, label ``dp_rank``; series
are split by ``priority``, of which the empty one is the whole).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from schemas.base import UNDECODABLE
from schemas.kv import MAX_RANKS
from schemas.worker import MAX_MODELS, Engine, RankLoad
from services.bridge.errors import ScrapeError
from services.bridge.layout import Parallelism, parse_parallelism

_CACHE_CONFIG = "vllm:cache_config_info"
_START_TIME = "process_start_time_seconds"
_LOAD_FIELDS: dict[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}
_SGLANG_BLOCK_SIZE = "sglang:page_size"
_SGLANG_KV_TOKENS = "sglang:max_total_num_tokens"
MAX_NAME_CHARACTERS = 1024
"""Names travel in a fact every second: a longer one is none."""

_LARGEST = (1 << 53) - 1
_WANTED = frozenset({_CACHE_CONFIG, _START_TIME, _SGLANG_BLOCK_SIZE, _SGLANG_KV_TOKENS, *_LOAD_FIELDS})


@dataclass(frozen=True, slots=True)
class MetricsReport:
    """What ``/metrics`` said. ``started_at``: Unix seconds of the engine's process, as the engine prints it."""

    engine: Engine = "unknown"
    started_at: float | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    loads: tuple[RankLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelsReport:
    """What ``/v1/models`` said; ``model`` is the first one, ``adapters`` those with a parent, ``engine`` a guess from
    its owner, ``root`` the path or name that it was loaded from (empty: not told)."""

    model: str
    models: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    max_model_len: int | None = None
    engine: Engine = "unknown"
    root: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What SGLang's ``/server_info`` said, as far as it matters here. ``parallelism``: ``None`` if it is not said.
    ``low_first``: it runs lower priorities first."""

    version: str | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    ranks: int | None = None
    parallelism: Parallelism | None = None
    low_first: bool = False


@dataclass(slots=True)
class _Ranks:
    """Load per rank while it is being collected."""

    values: dict[int, dict[str, float]] = field(default_factory=dict)

    def add(self, rank: int, name: str, value: float) -> None:
        if rank < MAX_RANKS:
            self.values.setdefault(rank, {})[name] = value

    def loads(self) -> tuple[RankLoad, ...]:
        return tuple(
            RankLoad(
                rank=rank,
                running=_count(values.get("running", 0.0)),
                waiting=_count(values.get("waiting", 0.0)),
                kv_usage=min(1.0, max(0.0, _finite(values.get("kv_usage", 0.0)))),
            )
            for rank, values in sorted(self.values.items())
        )


def parse_metrics(text: str) -> MetricsReport:
    """Read the few series we want out of a page of Prometheus text. Raises `ScrapeError` where it is not one."""
    engine: Engine = "unknown"
    started_at: float | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    ranks = _Ranks()
    try:
        for family in text_string_to_metric_families("\n".join(_wanted_lines(text)) + "\n"):
            for sample in family.samples:
                name, labels, value = sample.name, sample.labels, float(sample.value)
                if name.startswith("vllm:"):
                    engine = "vllm"
                elif name.startswith("sglang:"):
                    engine = "sglang"
                if name == _START_TIME:
                    started_at = value if 0 < value < _LARGEST else None
                elif name == _CACHE_CONFIG:
                    block_size = _whole(labels.get("block_size")) or None
                    blocks = _whole(labels.get("num_gpu_blocks"))
                    told = _whole(labels.get("kv_cache_size_tokens"))
                    kv_tokens = told or (min(_LARGEST, blocks * block_size) if blocks and block_size else None)
                elif name == _SGLANG_BLOCK_SIZE:
                    block_size = _count(value) or None
                elif name == _SGLANG_KV_TOKENS and _is_whole_series(labels):
                    kv_tokens = _count(value) or None
                elif name in _LOAD_FIELDS and _is_whole_series(labels):
                    ranks.add(_rank(labels), _LOAD_FIELDS[name], value)
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise ScrapeError("bad_answer", f"/metrics is not Prometheus text: {error}") from error
    return MetricsReport(engine, started_at, block_size, kv_tokens, ranks.loads())


def _wanted_lines(text: str) -> Iterable[str]:
    """Only the lines we read: an engine prints hundreds of histogram buckets, and parsing them costs milliseconds."""
    for line in text.splitlines():
        if line[:1] == "#":
            continue
        end = min((at for at in (line.find("{"), line.find(" ")) if at >= 0), default=-1)
        if end > 0 and line[:end] in _WANTED:
            yield line


def _is_whole_series(labels: Mapping[str, str]) -> bool:
    return not labels.get("priority") and labels.get("tp_rank", "0") in ("0", "")


def _rank(labels: Mapping[str, str]) -> int:
    return _whole(labels.get("engine") or labels.get("dp_rank") or "0") or 0


def _whole(text: str | None) -> int | None:
    """Decimal digits as a number within what JSON's readers can hold, else ``None``."""
    if not text or not text.isdecimal() or len(text) > 16:
        return None
    return min(_LARGEST, int(text))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _count(value: float) -> int:
    """A gauge that counts: never negative, infinite or not a number."""
    return int(min(_LARGEST, max(0.0, _finite(value))))


def parse_models(body: bytes) -> ModelsReport:
    """Read ``/v1/models``. Raises `ScrapeError` where it names no model."""
    entries = _json_object(body, "/v1/models").get("data")
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    entries = [(entry.get("id"), entry.get("parent")) for entry in found[:MAX_MODELS]]
    usable = [(name, of) for name, of in entries if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS]
    names = tuple(name for name, _ in usable)
    if not names:
        raise ScrapeError("bad_answer", "/v1/models names no model")
    longest = found[0].get("max_model_len")
    owner = found[0].get("owned_by")
    return ModelsReport(
        model=names[0],
        models=names,
        adapters=tuple(name for name, of in usable if isinstance(of, str) and of),
        max_model_len=_positive(longest),
        engine=_OWNERS.get(owner, "unknown") if isinstance(owner, str) else "unknown",
        root=_name(found[0].get("root")) or "",
    )


_OWNERS: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "tidegate": "simulated"}


def parse_version(body: bytes) -> str | None:
    """Read ``/version`` (vLLM): ``{"version": "0.32.0"}``. Raises `ScrapeError`."""
    version = _json_object(body, "/version").get("version")
    return _name(version)


def parse_server_info(body: bytes) -> ServerInfo:
    """Read ``/server_info`` (SGLang). Raises `ScrapeError`."""
    told = _json_object(body, "/server_info")
    events = told.get("kv_events")
    block_size = events.get("block_size") if isinstance(events, dict) else None
    version = told.get("version")
    return ServerInfo(
        version=_name(version),
        block_size=_positive(block_size) or _positive(told.get("page_size")),
        kv_tokens=_positive(told.get("max_total_num_tokens")),
        ranks=_positive(told.get("dp_size")),
        parallelism=parse_parallelism(told),
        low_first=told.get("schedule_low_priority_values_first") is True,
    )


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST else None


def _name(value: object) -> str | None:
    return value[:MAX_NAME_CHARACTERS] if isinstance(value, str) else None


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise ScrapeError("bad_answer", f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ScrapeError("bad_answer", f"{what} is not a JSON object")
    return value
