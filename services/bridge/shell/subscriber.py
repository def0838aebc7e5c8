"""The thread that polls an engine's PUB sockets.

It polls all the time, because a SUB whose owner sleeps through an engine's restart re-sends its subscription only at
its next poll and loses what was published before (spec: engine-events §2.5). It hands over what it drained (at most
`DRAIN_LIMIT` messages a turn) with one call into the event loop, through a bounded queue. What the queue cannot take
is dropped and counted; the hole in the sequence is noticed and replayed like any other.

Data is drained before the sockets' monitors are read, and a monitor's notes wait until the socket was read empty: what
was read before the note of a disconnect is then of the old process. Where the thread was held up for so long that a
reconnection stands behind that note, what it read may be of either process: it is dropped and counted, and replayed.

A peer whose host vanishes says nothing; TCP's keep-alives notice it within 15 s, whatever ZeroMQ it speaks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from bus.log import EventLog
from services.bridge.endpoints import RankSource
from services.bridge.errors import BadEndpointError
from services.bridge.events import EngineBatch, EngineConnected, EngineDisconnected, SubscriberEvent

log = EventLog(__name__)

DRAIN_LIMIT = 256
_POLL_MS = 500
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_RECEIVE_HIGH_WATER = 100_000
_KEEPALIVE_S = 5
_KEEPALIVES_LOST = 2
_DATA_FRAMES = 3
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(slots=True)
class SubscriberCounters:
    """Messages since the start. ``dropped``: the hand-over queue was full. ``malformed``: not topic, seq, payload, or
    no number of a stream."""

    received: int = 0
    dropped: int = 0
    malformed: int = 0


class EventSubscriber:
    """One thread, one SUB socket per rank; ``deliver`` is called on the event loop with what came, in order."""

    def __init__(
        self,
        sources: Sequence[RankSource],
        deliver: Callable[[EventSubscriber, list[SubscriberEvent]], None],
        handover_limit: int,
    ) -> None:
        self.counters = SubscriberCounters()
        self.fell_back = False
        """Whether an endpoint that looked as if we were to bind it was connected to instead."""
        self._sources = tuple(sources)
        self._deliver = deliver
        self._limit = handover_limit
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._queue: deque[SubscriberEvent] = deque()
        self._context = zmq.Context()
        self._wake_address = f"inproc://stop-{id(self)}"
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind(self._wake_address)
        self._thread = threading.Thread(target=self._run, name="kv-subscriber", daemon=True)
        self._sockets: list[tuple[RankSource, zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._notes: dict[int, list[SubscriberEvent]] = {}

    @property
    def depth(self) -> int:
        """Messages handed over and not yet taken by the loop."""
        return len(self._queue)

    def start(self) -> None:
        """Open the sockets and start polling. Raises `BadEndpointError` when ZeroMQ refuses an endpoint."""
        try:
            for source in self._sources:
                self._sockets.append(self._open(source))
        except BadEndpointError:
            self._close_sockets()
            raise
        self._thread.start()

    async def watch(self) -> None:
        """Until the thread ends; raises what ended it, unless `stop` did."""
        error = await asyncio.shield(self._ended)
        if error is not None:
            raise error

    async def stop(self) -> None:
        """Stop the thread and close everything; nothing is delivered after it returns."""
        if self._thread.is_alive():
            self._wake.send(b"")
            await self._loop.run_in_executor(None, self._thread.join)
        else:
            self._close_sockets()
        self._wake.close(linger=0)
        self._context.term()
        self._queue.clear()

    def _open(self, source: RankSource) -> tuple[RankSource, zmq.Socket[bytes], zmq.Socket[bytes]]:
        subscriber = self._context.socket(zmq.SUB)
        subscriber.set(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        # No MAXMSGSIZE: ZeroMQ breaks off with the sender of a message beyond it, and never connects again.
        subscriber.set(zmq.LINGER, 0)
        subscriber.set(zmq.IPV6, 1)
        subscriber.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        subscriber.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        subscriber.set(zmq.TCP_KEEPALIVE, 1)
        subscriber.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
        subscriber.set(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
        subscriber.set(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVES_LOST)
        subscriber.set(zmq.SUBSCRIBE, source.topic.encode())
        monitor: zmq.Socket[bytes] = subscriber.get_monitor_socket(_MONITORED)
        try:
            if not source.bind:
                subscriber.connect(source.events)
            elif not source.guessed:
                subscriber.bind(source.events)
            else:
                self._bind_or_connect(subscriber, source.events)
        except zmq.ZMQError as error:
            _close(subscriber, monitor)
            raise BadEndpointError(source.events, str(error)) from error
        return source, subscriber, monitor

    def _bind_or_connect(self, subscriber: zmq.Socket[bytes], endpoint: str) -> None:
        try:
            subscriber.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
                raise
            subscriber.connect(endpoint)
            self.fell_back = True

    def _close_sockets(self) -> None:
        for _, subscriber, monitor in self._sockets:
            _close(subscriber, monitor)
        self._sockets.clear()

    # Everything below runs in the thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._poll()
        except BaseException as raised:  # noqa: BLE001 - raised again by `watch`, where the service's owner sees it
            error = raised
        self._call(self._end, error)

    def _poll(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect(self._wake_address)
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        for _, subscriber, monitor in self._sockets:
            poller.register(subscriber, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(_POLL_MS))
                if wake in ready:
                    return
                drained: list[SubscriberEvent] = []
                for source, subscriber, monitor in self._sockets:
                    drained += self._read(source, subscriber, monitor, ready)
                if drained:
                    self._hand_over(drained)
        finally:
            wake.close(linger=0)
            self._close_sockets()

    def _read(
        self,
        source: RankSource,
        subscriber: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        ready: Mapping[object, int],
    ) -> list[SubscriberEvent]:
        """What one rank's sockets have to say, in the order in which it can be trusted."""
        read: list[SubscriberEvent] = []
        more = subscriber in ready and self._drain(source, subscriber, read)
        notes = self._notes.setdefault(source.rank, [])
        if read or monitor in ready:
            self._read_monitor(source, monitor, notes)
        if _reconnected(notes):
            self.counters.dropped += len(read)
            read = []
        if not more:
            read += notes
            notes.clear()
        return read

    def _drain(self, source: RankSource, subscriber: zmq.Socket[bytes], drained: list[SubscriberEvent]) -> bool:
        """Read what waits, within the turn's bound; whether the bound was reached."""
        for _ in range(DRAIN_LIMIT):
            try:
                frames = subscriber.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self.counters.received += 1
            if len(frames) != _DATA_FRAMES or len(frames[1]) != 8 or frames[1][0] & 0x80:
                self.counters.malformed += 1
                continue
            drained.append(EngineBatch(source.rank, int.from_bytes(frames[1], "big"), frames[2]))
        return True

    def _read_monitor(self, source: RankSource, monitor: zmq.Socket[bytes], drained: list[SubscriberEvent]) -> None:
        while True:
            try:
                frames = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                drained.append(EngineDisconnected(source.rank))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                drained.append(EngineConnected(source.rank))

    def _hand_over(self, drained: list[SubscriberEvent]) -> None:
        room = self._limit - len(self._queue)
        if len(drained) > room:
            # Notes about the connection are few and must not be lost; batches can be replayed.
            kept = [event for event in drained if not isinstance(event, EngineBatch)]
            batches = [event for event in drained if isinstance(event, EngineBatch)]
            self.counters.dropped += len(batches) - max(0, room)
            drained = batches[: max(0, room)] + kept
        self._queue.extend(drained)
        self._call(self._take)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: the process is on its way out and nobody will read the queue.
            log.debug("kv_events_after_close", waiting=len(self._queue))

    # On the loop.

    def _end(self, error: BaseException | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def _take(self) -> None:
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        if taken:
            self._deliver(self, taken)


def _reconnected(notes: Sequence[SubscriberEvent]) -> bool:
    """Whether a connection was lost and stands again."""
    lost = False
    for note in notes:
        if lost and isinstance(note, EngineConnected):
            return True
        lost = lost or isinstance(note, EngineDisconnected)
    return False


def _close(subscriber: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Both ends of the monitor too: the context waits for every socket."""
    subscriber.disable_monitor()
    monitor.close(linger=0)
    subscriber.close(linger=0)
