"""The laboratory: engines, programs and policies in virtual time. No sockets, no clock, no asyncio.

    programs = workloads.generate("swe", count=150, rate_per_s=0.07, seed=1)
    result = simulate(programs, Kv(), SimConfig(workers=1))
    result.summary()            # plain numbers; equal arguments give equal bytes

Modules, from the inside out: `content` (what a block holds), `clock` (time in picoseconds, the event queue), `timing`
(how long an iteration takes, exactly), `span_cache` (the KV cache of `load.engine`, by ranges instead of blocks),
`host_tier` (memory below it), `engine` (one rank: the scheduler of `load.engine`, decodes fast-forwarded), `workloads`
and `traces` (programs), `run` (the simulation; policies are those of admission), `perturb` and `disturbed` (what goes
wrong), `recorded` and `played` (a recorded trace as a graph of requests, in the same loop), `replays` (it under
policies), `results`, `token_seconds`, `bounds` (who knows the future), `crosscheck`. `tidegate simulate` is made of
`scenarios` (which programs, fleet, policy), `cells` (one simulation as a job), `plan` and `presets` (what is run),
`options`, `effort` (how long it takes), `experiment` (calibration, the run), `parallel`, `journal`, `summary` (paired
by seed), `sides` and `headline`, `promises`, `shapes`, `document`, `report`, `docs`, `plots` and `listing`.

Exactness: `span_cache` behaves as `load.engine.kv_cache` does, block for block, and an engine that jumps over decodes
ends where one that takes each step does. Both are shown by property tests, against the engine core of `load.engine`.
Residency is answered by that cache; a test has a real index answer, fed with the block-exact engines' events.
"""
