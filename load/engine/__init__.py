"""The simulated engine: a process that speaks what vLLM speaks, without a GPU.

    python -m load.engine --http-port 8000 --kv-events-endpoint tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5657
    curl -s localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "hello"}]}'

It prints one JSON line when it listens, with its URL and its event and replay endpoints (one per rank).

What is real: the scheduler, the paged prefix cache and its KV events (event for event what vLLM 0.32 was seen to do),
the bytes on ZeroMQ, the HTTP answers and metrics names, the tokenizer and chat template. What is simulated: time
(an iteration-time model of an H100, divided by ``--speed``) and text (words drawn from the prompt and a seed).
What a client sends back re-tokenises to what was generated, so that turn after turn hits the cache as in life.

Modules, from the inside out. Pure, without a clock: `requests`, `block_hash`, `free_queue`, `blocks`, `kv_cache`,
`kv_events`, `scheduler`, `timing`, `core`; below the device `tiers`, `tier_scheduler`, `pool_pages`; hints `sessions`,
`hints`, `hint_actions`, `tool_pins`; `tokens`, `outputs`, `api`, `responses`, `kv_wire`, `misbehave`, `config`. With
sockets and time: `kv_publisher`, `rank`, `engine`, `shared_pool`, `metrics`, `completions`, `server`, `__main__`.

Memory below the device, the shared pool and hints: docs/simulated-engine.md.

Beyond vLLM, for tests:

- body ``sim_tool`` (a name, or ``{"name", "arguments"}``) or header ``X-Sim-Tool``: call that tool; so do
  ``tool_choice`` ``required`` and a named one. Without them tools are listed in the prompt and not called.
- ``GET /sim/served``: request ids begun and served to the end, with counts.
- ``GET /sim/resident``: per rank, the chain hash (ours) and the hash (its own) of every resident block, those of the
  tiers below (ours), and the next seq.
- ``GET`` and ``POST /sim/misbehave``: the flags of `misbehave.Misbehaviour`, changed one by one; and the acts
  ``{"behave": true}``, ``{"lose_history": true}``, ``{"restart": true}`` (cache, requests, counters and sequence lost).

Left out: sampling (``temperature``, ``stop``, ``logprobs``), images, transfers between engines.
"""
