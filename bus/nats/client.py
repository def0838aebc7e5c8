"""nats-py's client with two holes closed, which its public interface cannot reach."""

from __future__ import annotations

from nats.aio.client import Client


class NatsClient(Client):
    """See `nats.aio.client.Client`."""

    def forget_pending(self) -> None:
        """Before `close` while disconnected: nats-py would write what is left to the closed socket, which uvloop
        refuses, and would skip the rest of its own cleaning up."""
        self._pending = []
        self._pending_data_size = 0

    def drop_failed_connection(self) -> None:
        """Before the next try: nats-py forgets the socket of a try that got as far as a refused password."""
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
