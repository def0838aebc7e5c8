"""The simulated shared pool: a process that speaks what a Mooncake master 0.3.14 speaks, without storing a byte.

    python -m load.pool --http-port 9003 --kv-events-endpoint tcp://127.0.0.1:5557
    curl -s localhost:9003/kv_events/status

It prints one JSON line when it listens, with its URL and its event endpoint.

What is real: the bytes on ZeroMQ (three frames, numbers from 1, at most 64 events a message), the admin endpoints that
a router reads, and what tells of nothing: eviction, lost clients and a restart publish no event (spec: pool-events §3).
What is simulated: objects have sizes and no bytes; clients speak HTTP (``POST /sim/*``) in place of the RPC.

Modules: `store`, `events`, `misbehave`, `config` are pure; `publisher`, `server`, `client`, `__main__` have sockets.

For tests:

- ``POST /sim/mount``, ``ping``, ``unmount``, ``put``, ``exist``, ``get``, ``probe``, ``remove``, ``offload``,
  ``evict``: what a client would do, see `store.PoolStore`; `client.PoolClient` speaks them.
- ``GET`` and ``POST /sim/misbehave``: the flags of `misbehave.PoolMisbehaviour`, and the acts ``{"behave": true}``,
  ``{"restart": true}`` (all metadata lost, numbers from 1), ``{"kill_client": name}`` (its pings count no more).

Left out: tenants' quotas, several replicas of one object in memory, high availability, leases on writes.
"""
