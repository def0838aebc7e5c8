"""How the engine misbehaves on purpose: flags that can be set at start and changed while it runs.

Counts say for how many batches or requests a flag holds: n, or -1 for all until it is changed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Stage = Literal["none", "accept", "head", "first_token", "stream"]
UsageMode = Literal["normal", "omit", "null"]
ReplayMode = Literal["normal", "end_only", "silent"]


class Misbehaviour(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The flags. The defaults are good behaviour.

    Events: ``drop_batches``, ``duplicate_batches``, ``reorder_batches`` (each swapped with the one after it),
    ``junk_batches`` (malformed events between good ones): the next n. Dropped ones stay in the replay buffer.
    ``replay``: ``end_only`` answers every replay with the end mark, ``silent`` not at all.

    Requests: ``die_after_chunks`` closes the connection after k events of a stream (0: before the first byte) for
    the next ``die_requests``. ``stall`` hangs the next ``stall_requests`` at a stage, for ``stall_s`` seconds (0: until
    the client goes): ``accept`` (no request is even read), ``head`` (nothing is sent), ``first_token`` (headers
    only), ``stream`` (after ``stall_after_chunks`` events). ``error_status`` answers the next ``error_requests``.

    Reports: ``usage`` ``omit`` (never sent) or ``null`` (``"usage": null`` in every chunk but the usage chunk);
    ``cached_zero`` reports no cached tokens; ``announced_block_size`` replaces the block size in ``/metrics``.
    """

    drop_batches: int = 0
    duplicate_batches: int = 0
    reorder_batches: int = 0
    junk_batches: int = 0
    replay: ReplayMode = "normal"
    die_after_chunks: int | None = None
    die_requests: int = -1
    stall: Stage = "none"
    stall_s: float = 0.0
    stall_requests: int = -1
    stall_after_chunks: int = 1
    error_status: int = 503
    error_requests: int = 0
    usage: UsageMode = "normal"
    cached_zero: bool = False
    announced_block_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("drop_batches", "duplicate_batches", "reorder_batches", "junk_batches", "error_requests"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} must be a count, or -1 for all")
        if not 400 <= self.error_status <= 599:
            raise ValueError(f"error_status must be 400..599, not {self.error_status}")
        if self.die_after_chunks is not None and self.die_after_chunks < 0:
            raise ValueError("die_after_chunks must not be negative")

    def take(self, name: str) -> bool:
        """Whether the counted flag ``name`` holds once more; counts it down."""
        left = int(getattr(self, name))
        if left > 0:
            setattr(self, name, left - 1)
        return left != 0

    def take_stall(self, stage: Stage) -> bool:
        """Whether this request hangs at ``stage``."""
        return self.stall == stage and self.take("stall_requests")

    def take_death(self) -> int | None:
        """After how many chunks this request dies, ``None`` if it lives."""
        if self.die_after_chunks is None or not self.take("die_requests"):
            return None
        return self.die_after_chunks

    def change(self, changes: dict[str, Any]) -> None:
        """Set some flags, or none if one of them is wrong. Raises `ValueError` with a sentence."""
        try:
            wanted = msgspec.convert({**msgspec.structs.asdict(self), **changes}, Misbehaviour)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        for name in self.__struct_fields__:
            setattr(self, name, getattr(wanted, name))
