"""The in-memory server: routes messages, keeps what is stored, and can go away and come back like a real one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bus.answers import NO_RESPONDERS, STATUS
from bus.interface import BusMessage
from bus.memory.storage import MemoryBucket, MemoryObjects, MemoryStream
from bus.subjects import TRACE_SUBJECTS
from bus.validation import subject_matches

if TYPE_CHECKING:
    from bus.memory.connection import MemoryBus, MemorySubscription

_ROUTES = 4_096


class MemoryBroker:
    """One server. ``max_payload`` in bytes; ``duplicate_window_s`` of the trace stream."""

    def __init__(self, *, max_payload: int = 8 * 1024 * 1024, duplicate_window_s: float = 600.0) -> None:
        self.max_payload = max_payload
        self.running = True
        self.duplicate_window_s = duplicate_window_s
        self.buckets: dict[str, MemoryBucket] = {}
        self.objects: dict[str, MemoryObjects] = {}
        self.trace_stream: MemoryStream | None = None
        self._connections: list[MemoryBus] = []
        self._subscriptions: list[MemorySubscription] = []
        self._inboxes: dict[str, Callable[[BusMessage], None]] = {}
        self._routes: dict[str, tuple[list[MemorySubscription], list[list[MemorySubscription]]]] = {}
        self._turn = itertools.count()
        self._numbers = itertools.count(1)

    async def connect(self, *, name: str = "memory") -> MemoryBus:
        """A connection, as `bus.nats.connect` gives one."""
        from bus.memory.connection import MemoryBus

        connection = MemoryBus(self, name, next(self._numbers))
        self._connections.append(connection)
        return connection

    def disconnect(self, connection: MemoryBus) -> None:
        self._connections.remove(connection)

    def stop(self) -> None:
        """The server is away until `start`; what it stored is kept."""
        if self.running:
            self.running = False
            for connection in list(self._connections):
                connection.server_went()

    def start(self, *, fresh: bool = False) -> None:
        """The server is back; ``fresh``: on another, empty store."""
        if fresh:
            if self.trace_stream is not None:
                self.trace_stream.clear()
            for bucket in self.buckets.values():
                bucket.clear()
            for objects in self.objects.values():
                objects.clear()
        if not self.running:
            self.running = True
            for connection in list(self._connections):
                connection.server_came()

    def traces(self) -> MemoryStream:
        """The trace stream, made when first wanted."""
        if self.trace_stream is None:
            self.trace_stream = MemoryStream(self.duplicate_window_s)
        return self.trace_stream

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def remove(self, subscription: MemorySubscription) -> None:
        self._subscriptions = [other for other in self._subscriptions if other is not subscription]
        self._routes.clear()

    def open_inbox(self, inbox: str, receiver: Callable[[BusMessage], None]) -> None:
        self._inboxes[inbox] = receiver

    def close_inbox(self, inbox: str) -> None:
        self._inboxes.pop(inbox, None)

    def route(self, message: BusMessage) -> None:
        """To every plain subscriber and to one member of each queue group; tells an asker when there is nobody."""
        plain, groups = self._route(message.subject)
        for subscription in plain:
            subscription.receive(message)
        for group in groups:
            group[next(self._turn) % len(group)].receive(message)
        receiver = self._inboxes.get(message.subject)
        if receiver is not None:
            receiver(message)
        elif message.reply and not plain and not groups:
            asker = self._inboxes.get(message.reply)
            if asker is not None:
                asker(BusMessage(message.reply, b"", {STATUS: NO_RESPONDERS}))

    def store(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> bool:
        """Into the trace stream, if it exists and takes ``subject``; ``False`` for a duplicate."""
        if self.trace_stream is None or not subject_matches(TRACE_SUBJECTS, subject):
            return True
        return self.trace_stream.add(subject, payload, headers)

    def _route(self, subject: str) -> tuple[list[MemorySubscription], list[list[MemorySubscription]]]:
        found = self._routes.get(subject)
        if found is None:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            plain: list[MemorySubscription] = []
            groups: dict[str, list[MemorySubscription]] = {}
            for subscription in self._subscriptions:
                if subject_matches(subscription.subject, subject):
                    (groups.setdefault(subscription.queue, []) if subscription.queue else plain).append(subscription)
            found = self._routes[subject] = (plain, list(groups.values()))
        return found
