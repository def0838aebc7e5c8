"""The bus over NATS (nats-py): `connect` gives a `bus.interface.Bus`."""

from bus.nats.connection import NatsBus, NatsOptions, connect, options_from_environment, options_of

__all__ = ["NatsBus", "NatsOptions", "connect", "options_from_environment", "options_of"]
