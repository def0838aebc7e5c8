"""Settings of the simulated engine (section ``engine``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from bus.settings import CommonSettings
from load.engine.core import CoreConfig
from load.engine.kv_publisher import PublisherConfig, rank_endpoint
from load.engine.kv_wire import EventForm, HashForm, KvEncoder
from load.engine.misbehave import Misbehaviour
from load.engine.pool_pages import Attention, PoolLayoutConfig, PoolScheme
from load.engine.scheduler import SchedulingPolicy
from load.engine.tiers import TierConfig, WritePolicy
from load.engine.timing import PROFILES, Profile

LONGEST_MODEL_LEN = 131_072
HASH_ALGORITHM = "sha256"


class EngineSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated engine: what vLLM speaks, over HTTP and ZeroMQ, without a GPU.

    ``http_port`` is the engine's own API (0 picks one). ``num_blocks`` and ``max_model_len`` follow from the profile
    when not set. ``speed`` divides every iteration's time. ``kv_events`` off: as an engine without them, it tells
    nobody of its event sockets. Ports of ``kv_events_endpoint`` and ``replay_endpoint``
    count up with the rank; 0 picks one each. ``kv_events_connect``: PUB connects instead of binding.
    ``host_blocks``, ``disk_blocks``: of memory below the device (0: none), over links of ``host_gbps`` and
    ``disk_gbps`` (GB/s for each GPU); ``host_write``: everything that was computed goes there, or only what the device
    evicts. ``describe_tiers``: events of vLLM's lower tiers carry tokens (``self_describing_kv_events``).
    ``pool_url``: of a shared pool (`load.pool`; empty: none); ``pool_name``: of this client of it (default: the
    instance), with ``pool_capacity_bytes`` of memory for it. ``pool_scheme``, ``pool_attention``, ``pool_tp``,
    ``pool_pp``, ``pool_tag``, ``pool_page_size`` (default: the block size): how pages lie there. It is asked for what
    is missing here from ``pool_threshold_tokens`` on, and read over ``pool_gbps``.
    ``kv_hints``: take hints; at most ``max_pinned_ratio`` of the device's blocks can be pinned. ``tool_pin_s``: pin
    between a job's turns for so long, as the Continuum plug-in does (0: not).
    ``messages_api``, ``responses_api`` off: as an engine without them, it knows no such path.
    ``mean_output_tokens``: of answers that end by themselves. ``chunk_tokens``: tokens of one stream event.
    ``misbehave``: see `load.engine.misbehave`.
    """

    model: str = "sim-8b"
    adapters: tuple[str, ...] = ()
    engine_version: str = "0.32.0"
    profile: Literal["h100-8b", "h100x4-70b", "instant"] = "h100-8b"
    speed: float = 1.0
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduling_policy: SchedulingPolicy = "fcfs"
    prefix_caching: bool = True
    ranks: int = 1
    kv_events: bool = True
    kv_events_endpoint: str = "tcp://127.0.0.1:0"
    replay_endpoint: str = "tcp://127.0.0.1:0"
    kv_events_connect: bool = False
    topic: str = ""
    buffer_steps: int = 10_000
    event_form: EventForm = "vllm-map"
    hash_form: HashForm = "int"
    hash_seed: str = ""
    replay_form: Literal["auto", "topic", "plain"] = "auto"
    seed: int = 0
    host_blocks: int = 0
    host_gbps: float = 50.0
    host_write: WritePolicy = "through"
    disk_blocks: int = 0
    disk_gbps: float = 6.0
    describe_tiers: bool = False
    pool_url: str = ""
    pool_name: str = ""
    pool_capacity_bytes: int = 0
    pool_scheme: PoolScheme = "sglang_hicache"
    pool_attention: Attention = "mha"
    pool_tp: int = 1
    pool_pp: int = 1
    pool_tag: str = ""
    pool_page_size: int | None = None
    pool_threshold_tokens: int = 256
    pool_gbps: float = 25.0
    kv_hints: bool = True
    max_pinned_ratio: float = 0.5
    tool_pin_s: float = 0.0
    messages_api: bool = True
    responses_api: bool = True
    mean_output_tokens: int = 64
    chunk_tokens: int = 1
    misbehave: Misbehaviour = msgspec.field(default_factory=Misbehaviour)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "ranks", "buffer_steps", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("speed", "host_gbps", "disk_gbps", "pool_gbps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("host_blocks", "disk_blocks", "pool_capacity_bytes", "pool_threshold_tokens", "tool_pin_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if not 0 <= self.max_pinned_ratio <= 1:
            raise ValueError("max_pinned_ratio must be 0..1")
        if self.pool_tp < 1 or self.pool_pp < 1:
            raise ValueError("pool_tp and pool_pp must be at least 1")
        if self.pool_page_size is not None and (self.pool_page_size < 1 or self.pool_page_size % self.block_size):
            raise ValueError("pool_page_size must be a multiple of block_size")
        if self.http_port < 0:
            raise ValueError("http_port must not be negative: the engine's API is what it is for")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ValueError("num_blocks must be at least 2 (one of them is the null block)")
        if self.mean_output_tokens < 4:
            raise ValueError("mean_output_tokens must be at least 4")
        capacity = (self.sizes.num_blocks - 1) * self.block_size
        if self.max_model_len is not None and not 2 <= self.max_model_len <= capacity:
            raise ValueError(f"max_model_len must be 2..{capacity}, the tokens that fit in one rank's KV cache")
        if self.kv_events_connect and self.ranks > 1 and self.kv_events_endpoint.endswith(":0"):
            raise ValueError("kv_events_connect needs a port in kv_events_endpoint")

    @property
    def sizes(self) -> Sizes:
        """Blocks per rank and the longest request, with what follows from the profile filled in."""
        blocks = self.num_blocks or PROFILES[self.profile].kv_tokens // self.block_size
        capacity = (blocks - 1) * self.block_size
        return Sizes(blocks, self.max_model_len or min(LONGEST_MODEL_LEN, capacity))

    @property
    def timing(self) -> Profile:
        return PROFILES[self.profile]

    def core_config(self) -> CoreConfig:
        return CoreConfig(
            num_blocks=self.sizes.num_blocks,
            block_size=self.block_size,
            token_budget=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            policy=self.scheduling_policy,
            prefix_caching=self.prefix_caching,
            hash_seed=self.hash_seed,
            tiers=self.tier_config(),
            max_pinned_ratio=self.max_pinned_ratio,
            tool_pin_s=self.tool_pin_s,
        )

    def tier_config(self) -> TierConfig:
        block_bytes = self.timing.kv_bytes * self.block_size
        instant = self.timing.name == "instant"

        def block_s(gbps: float) -> float:
            return 0.0 if instant else block_bytes / (gbps * 1e9)

        return TierConfig(
            host_blocks=self.host_blocks,
            host_block_s=block_s(self.host_gbps),
            host_write=self.host_write,
            disk_blocks=self.disk_blocks,
            disk_block_s=block_s(self.disk_gbps),
            pool=bool(self.pool_url),
            pool_block_s=block_s(self.pool_gbps),
            cleared_with_device=self.event_form == "sglang",
        )

    def pool_layout(self) -> PoolLayoutConfig:
        """How its pages lie in the shared pool."""
        page_size = self.pool_page_size or self.block_size
        return PoolLayoutConfig(
            scheme=self.pool_scheme,
            model=self.model,
            block_size=self.block_size,
            page_size=page_size,
            attention=self.pool_attention,
            tp=self.pool_tp,
            pp=self.pool_pp,
            tag=self.pool_tag,
            page_bytes=self.timing.kv_bytes * page_size,
        )

    def publisher_config(self, rank: int) -> PublisherConfig:
        return PublisherConfig(
            endpoint=rank_endpoint(self.kv_events_endpoint, rank),
            replay_endpoint=rank_endpoint(self.replay_endpoint, rank),
            topic=self.topic,
            buffer_steps=self.buffer_steps,
            replay_topic=self.replay_form == "topic"
            or (self.replay_form == "auto" and self.event_form != "vllm-array"),
            connect=self.kv_events_connect,
        )

    def encoder(self, rank: int) -> KvEncoder:
        return KvEncoder(
            self.event_form,
            self.hash_form,
            self.block_size,
            rank,
            self.adapters,
            describe_tiers=self.describe_tiers,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """``num_blocks`` of a rank (null block included) and ``max_model_len`` in tokens."""

    num_blocks: int
    max_model_len: int
