"""One complete replica of the index, fed by the bus: what every process that answers from it has inside.

Imports `schemas`, `bus` and `kvcore`. Everything but `replica.shell` and `replica.config` is pure.

- `replica.core`: `Replica`, ``handle(event, now) -> effects`` and ``match(question, now) -> answer``.
- `replica.shell`: `ReplicaFeed`, its subscriptions, snapshot fetches and clock.
- `replica.config`: `ReplicaSettings`; `replica.metrics`: its counters as Prometheus families.
"""
