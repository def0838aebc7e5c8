"""The laboratory: engines, programs and policies in virtual time. No sockets, no clock, no asyncio.

    programs = workloads.generate("swe", count=150, rate_per_s=0.07, seed=1)
    result = simulate(programs, Kv(), SimConfig(workers=1))
    result.summary()            # plain numbers; equal arguments give equal bytes

Modules, from the inside out: `content` (what a block holds), `clock` (time in picoseconds, the event queue), `timing`
(how long an iteration takes, exactly), `span_cache` (the KV cache of `load.engine`, by ranges instead of blocks),
`engine` (one rank: the scheduler of `load.engine`, decodes fast-forwarded), `workloads` and `traces` (programs),
`policies` (the policies of admission, which it drives), `run` (the simulation), `results`, `token_seconds`, `bounds`
(who knows the future), `crosscheck`. `tidegate simulate` is made of `cells` (one simulation as a job), `experiment`
(plans, presets, calibration, the run), `parallel`, `summary` (paired by seed), `promises`, `document`, `report` and
`plots`.

Exactness: `span_cache` behaves as `load.engine.kv_cache` does, block for block, and an engine that jumps over decodes
ends where one that takes each step does. Both are shown by property tests, against the engine core of `load.engine`.
"""
