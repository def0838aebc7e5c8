"""Rows that leave a stream before a durable consumer was given them: seen by the numbers of those that it is given."""

from __future__ import annotations

from bus.nats.pull import RowPlace


class Gaps:
    """Of a consumer of the whole stream, whose limits may remove what it has not seen. The stream numbers rows, the
    consumer numbers deliveries: where rows are missing between two and no delivery is, nobody was given them."""

    def __init__(self) -> None:
        self.lost = 0
        self._stream_seq = 0
        self._consumer_seq = 0
        self._again = 0

    def begin(self, stream_seq: int, consumer_seq: int) -> None:
        """The consumer as the server has it now: what it gave last."""
        self._stream_seq, self._consumer_seq, self._again = stream_seq, consumer_seq, 0

    def see(self, place: RowPlace) -> None:
        """A row was given, for the first time or again."""
        if place.consumer_seq <= self._consumer_seq:
            if place.delivered == 1 and place.stream_seq > self._stream_seq:
                self.begin(place.stream_seq, place.consumer_seq)  # the server has made it anew
            return
        if place.delivered > 1:
            self._again += 1
            return
        missing = place.stream_seq - self._stream_seq - 1
        others = place.consumer_seq - self._consumer_seq - 1 - self._again
        self.lost += max(0, missing - max(0, others))
        self.begin(place.stream_seq, place.consumer_seq)
