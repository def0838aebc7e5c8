"""The bus inside one process: a `MemoryBroker` and its connections, for tests and for the simulation."""

from bus.memory.broker import MemoryBroker
from bus.memory.connection import MemoryBus

__all__ = ["MemoryBroker", "MemoryBus"]
