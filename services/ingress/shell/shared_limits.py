"""The memory that the processes of one front door share: what keys use (`services.ingress.shared_buckets`), and behind
it a secret that they have in common."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable

from bus.membership import Membership
from services.ingress.shared_buckets import SharedBuckets, memory_bytes

_SECRET_BYTES = 32


def shared_memory(count: int) -> int:
    """A descriptor of memory for so many processes: the parent makes it, and its children inherit it. It outlives each
    of them, so that who is started again goes on from what was used."""
    memory = os.memfd_create("tidegate-limits")
    os.ftruncate(memory, memory_bytes(count) + _SECRET_BYTES)
    os.pwrite(memory, secrets.token_bytes(_SECRET_BYTES), memory_bytes(count))
    return memory


def common_secret(membership: Membership) -> bytes:
    """The same in every process, another for every parent."""
    return os.pread(membership.memory, _SECRET_BYTES, memory_bytes(membership.count))


def shared_buckets(membership: Membership) -> SharedBuckets:
    """Our view of it."""
    memory = mmap.mmap(membership.memory, memory_bytes(membership.count))

    def locked(work: Callable[[], None]) -> bool:
        # Of records, not of the open file, which all processes have in common; a process that ends lets it go.
        try:
            fcntl.lockf(membership.memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            work()
        finally:
            fcntl.lockf(membership.memory, fcntl.LOCK_UN)
        return True

    return SharedBuckets(memoryview(memory), membership.number, membership.count, locked)
