"""How the pool misbehaves on purpose: flags that can be set at start and changed while it runs."""

from __future__ import annotations

from typing import Any

import msgspec


class PoolMisbehaviour(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The flags. The defaults are good behaviour (of a master that keeps evictions to itself, as 0.3.14 does).

    Events: ``drop_batches`` loses the next n messages, their numbers with them (-1: all until changed);
    ``silent_removals``: removals publish nothing; ``events_off``: nothing is published and the status says so.

    Answers of the admin endpoints: the next ``hang_requests`` hang for ``hang_s`` seconds (0: until the client goes),
    the next ``error_requests`` are answered with ``error_status``; both only for paths that begin with ``only_path``.
    """

    drop_batches: int = 0
    silent_removals: bool = False
    events_off: bool = False
    hang_requests: int = 0
    hang_s: float = 0.0
    error_requests: int = 0
    error_status: int = 503
    only_path: str = "/"

    def __post_init__(self) -> None:
        for name in ("drop_batches", "hang_requests", "error_requests"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} must be a count, or -1 for all")
        if not 400 <= self.error_status <= 599:
            raise ValueError(f"error_status must be 400..599, not {self.error_status}")

    def take(self, name: str, path: str | None = None) -> bool:
        """Whether the counted flag ``name`` holds once more (for ``path``); counts it down."""
        left = int(getattr(self, name))
        if left == 0 or (path is not None and not path.startswith(self.only_path)):
            return False
        if left > 0:
            setattr(self, name, left - 1)
        return True

    def change(self, changes: dict[str, Any]) -> None:
        """Set some flags, or none if one of them is wrong. Raises `ValueError` with a sentence."""
        try:
            wanted = msgspec.convert({**msgspec.structs.asdict(self), **changes}, PoolMisbehaviour)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error
        for name in self.__struct_fields__:
            setattr(self, name, getattr(wanted, name))
