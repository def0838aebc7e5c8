"""Bodies of the pool's ``POST /sim/*`` endpoints: what a client tells the master."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from load.pool.store import DEFAULT_TENANT

MAX_KEY_CHARS = 4096
MAX_KEYS = 65_536

Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS)]
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Labels = Annotated[list[str | None], Meta(max_length=MAX_KEYS)]


class ClientBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """``ping`` and ``unmount``."""

    client: Annotated[str, Meta(min_length=1)]


class MountBody(ClientBody, kw_only=True, forbid_unknown_fields=True):
    """``capacity_bytes`` 0: a client that reads and writes, but brings no memory."""

    segment: str | None = None
    capacity_bytes: Annotated[int, Meta(ge=0)] = 0


class KeysBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """``exist``, ``probe``, ``get``, ``offload``."""

    keys: Keys
    tenant: str = DEFAULT_TENANT


class PutBody(KeysBody, kw_only=True, forbid_unknown_fields=True):
    """``size_bytes``: of each object. ``group_ids``, ``session_ids``: one per key, or none."""

    size_bytes: Annotated[int, Meta(ge=1)] = 1
    client: str | None = None
    group_ids: Labels = []
    session_ids: Labels = []
    upsert: bool = False


class RemoveBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """``keys``, or everything that ``regex`` is found in, or ``all`` of the tenant."""

    keys: Keys = []
    regex: str | None = None
    all: bool = False
    force: bool = False
    tenant: str = DEFAULT_TENANT


class EvictBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Memory copies of ``keys``, or of the ``count`` least recently used objects."""

    keys: Keys | None = None
    count: Annotated[int, Meta(ge=0)] = 0
    tenant: str = DEFAULT_TENANT
