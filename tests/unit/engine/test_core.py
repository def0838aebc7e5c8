"""The engine core under random load: blocks are conserved, events tell the truth, everything ends."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.engine.block_hash import ExtraKeys
from load.engine.core import CoreConfig, EngineCore, StepResult
from load.engine.errors import DuplicateRequestError, TooLargeError
from load.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from load.engine.requests import EngineRequest
from load.engine.scheduler import SchedulingPolicy
from load.engine.timing import H100_8B, H100_70B, INSTANT

BLOCK = 4


def request(
    name: str,
    prompt: list[int],
    output: int = 1,
    *,
    priority: int = 0,
    salt: str | None = None,
    lora: str | None = None,
) -> EngineRequest:
    tokens = array("I", range(5000, 5000 + output))
    return EngineRequest(
        name, array("I", prompt), tokens, priority=priority, extra=ExtraKeys(lora_name=lora, cache_salt=salt)
    )


def core_of(
    blocks: int = 64, *, budget: int = 2048, seats: int = 256, policy: SchedulingPolicy = "fcfs", block: int = BLOCK
) -> EngineCore:
    config = CoreConfig(num_blocks=blocks, block_size=block, token_budget=budget, max_num_seqs=seats, policy=policy)
    return EngineCore(config, INSTANT)


def finish(core: EngineCore) -> list[StepResult]:
    results = []
    while core.unfinished:
        result = core.step()
        assert result is not None
        results.append(result)
    return results


class Replayed:
    """The resident set as a consumer of the events knows it: stores and removals counted, cleared on clear."""

    def __init__(self) -> None:
        self.copies: Counter[bytes] = Counter()

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) % len(event.digests) == 0
                self.copies.update(event.digests)
            elif isinstance(event, BlockRemoved):
                assert self.copies[event.digest] > 0, "removed what was not stored"
                self.copies[event.digest] -= 1
            else:
                assert isinstance(event, AllBlocksCleared)
                self.copies.clear()

    @property
    def resident(self) -> dict[bytes, int]:
        return {digest: copies for digest, copies in self.copies.items() if copies}


@dataclass(frozen=True)
class Add:
    prefix: int
    length: int
    output: int
    priority: int
    salt: str | None


@dataclass(frozen=True)
class Abort:
    which: int


adds = st.builds(
    Add,
    prefix=st.integers(0, 3),
    length=st.integers(1, 40),
    output=st.integers(1, 12),
    priority=st.integers(-2, 2),
    salt=st.sampled_from([None, None, "a"]),
)
commands = st.lists(
    st.one_of(adds, adds, st.just("step"), st.just("step"), st.builds(Abort, st.integers(0, 5)), st.just("reset")),
    max_size=60,
)


def prompt_of(add: Add) -> list[int]:
    """Prompts of one prefix share their beginning, as turns of a session do."""
    return [1000 * add.prefix + position for position in range(add.length)]


def check_blocks(core: EngineCore, live: list[EngineRequest]) -> None:
    """Reference counts equal what requests hold; nothing is both free and held; nothing is lost."""
    held = Counter(block for item in live for block in item.blocks)
    pool = core.cache.pool
    for block in range(pool.num_blocks):
        assert pool.references(block) == held[block]
    assert 0 not in held
    assert pool.used_blocks == len(held)
    assert pool.used_blocks + pool.free_blocks == pool.num_blocks - 1
    for item in live:
        assert len(set(item.blocks)) == len(item.blocks)


@pytest.mark.long
@given(commands=commands, policy=st.sampled_from(["fcfs", "priority"]), budget=st.sampled_from([7, 16, 2048]))
def test_invariants_under_any_load(commands: list[object], policy: SchedulingPolicy, budget: int) -> None:
    """Blocks conserved, replayed events = resident set, outputs whole, everything finishes; on a small pool."""
    core = core_of(16, budget=budget, seats=4, policy=policy)
    replayed = Replayed()
    live: dict[str, EngineRequest] = {}
    got: Counter[str] = Counter()

    def step() -> None:
        result = core.step()
        if result is None:
            return
        assert result.prefill_tokens + result.decode_tokens <= budget
        replayed.apply(result.events)
        for output in result.outputs:
            got[output.request_id] += 1
            item = live[output.request_id]
            assert got[output.request_id] == output.produced
            assert item.output[output.produced - 1] == output.token
            if output.finish_reason is not None:
                assert output.produced == len(item.output)
                del live[output.request_id]
        assert replayed.resident == dict(core.cache.pool.resident())
        assert {content.digest for content in core.cache.resident()} == set(replayed.resident)
        check_blocks(core, list(live.values()))
        stats = core.stats()
        assert stats.running + stats.waiting == len(live) == core.unfinished

    for number, command in enumerate(commands):
        if isinstance(command, Add):
            item = request(
                f"r{number}", prompt_of(command), command.output, priority=command.priority, salt=command.salt
            )
            core.add_request(item)
            live[item.request_id] = item
        elif isinstance(command, Abort):
            names = sorted(live)
            if names:
                name = names[command.which % len(names)]
                assert core.abort(name)
                del live[name]
                check_blocks(core, list(live.values()))
        elif command == "reset":
            assert core.reset_prefix_cache() == (core.stats().running == 0)
        else:
            step()
    for _ in range(2000):
        if not core.unfinished:
            break
        step()
    assert core.unfinished == 0
    assert core.cache.pool.used_blocks == 0


@pytest.mark.long
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.sampled_from([None, "s"])), max_size=12),
    together=st.booleans(),
)
def test_cached_tokens_against_a_naive_model(prompts: list[tuple[int, int, str | None]], together: bool) -> None:
    """With room for all, a prompt hits the longest full-block prefix stored before it, never its last token."""
    core = core_of(4096)
    stored: set[tuple[str | None, tuple[int, ...]]] = set()
    items: list[tuple[EngineRequest, int]] = []
    for number, (prefix, length, salt) in enumerate(prompts):
        tokens = [1000 * prefix + position for position in range(length)]
        expected = 0
        while expected + BLOCK < length and (salt, tuple(tokens[: expected + BLOCK])) in stored:
            expected += BLOCK
        for end in range(BLOCK, length + 1, BLOCK):
            stored.add((salt, tuple(tokens[:end])))
        item = request(f"r{number}", tokens, salt=salt)
        items.append((item, expected))
        core.add_request(item)
        if not together:
            finish(core)
    finish(core)
    for item, expected in items:
        assert expected == item.cached_tokens
        assert (item.cached_tokens or 0) <= (item.prompt_tokens - 1) // BLOCK * BLOCK


def test_second_turn_hits_prompt_and_output() -> None:
    """Turn 2 begins with turn 1's prompt and output: every full block of what was computed is hit."""
    core = core_of(block=16)
    first = request("t1", list(range(100)), 30)
    core.add_request(first)
    finish(core)
    second = request("t2", [*range(100), *first.output, *range(900, 940)])
    core.add_request(second)
    finish(core)
    assert second.cached_tokens == (100 + 30 - 1) // 16 * 16


def test_duplicate_store_of_an_exact_prompt() -> None:
    """A prompt of exactly k blocks sent again stores its last block again; both copies are removed later."""
    core = core_of()
    replayed = Replayed()
    for name in ("a", "b"):
        core.add_request(request(name, list(range(8))))
        for result in finish(core):
            replayed.apply(result.events)
    assert sorted(replayed.resident.values()) == [1, 2]


def test_priority_runs_first_and_preempts_the_worst() -> None:
    """Lower is earlier; when blocks run out the worst priority is recomputed, and all still end with whole outputs."""
    core = core_of(9, seats=8, policy="priority")
    core.add_request(request("late", list(range(12)), 8, priority=5))
    core.add_request(request("early", list(range(100, 112)), 8, priority=-1))
    results = finish(core)
    assert [name for name, _ in results[0].admitted] == ["early", "late"]
    assert {name for result in results for name in result.preempted} == {"late"}
    ended = [output.request_id for result in results for output in result.outputs if output.finish_reason]
    assert ended == ["early", "late"]


def test_fcfs_preempts_the_youngest_and_requeues_it_at_the_head() -> None:
    """Without priorities the last one in is thrown out, and comes back before anything that waited longer."""
    core = core_of(9, seats=2)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        core.add_request(request(name, list(range(first, first + 12)), 8))
    results = finish(core)
    preempted = [name for result in results for name in result.preempted]
    admitted = [name for result in results for name, _ in result.admitted]
    assert preempted[0] == "b"
    assert admitted[:4] == ["a", "b", "b", "c"]
    assert core.stats().preemptions == len(preempted)


def test_chunked_prefill_and_running_before_waiting() -> None:
    """A long prompt comes in chunks of the budget; a running decode keeps its token of each of them."""
    core = core_of(budget=8)
    core.add_request(request("decode", [1, 2], 20))
    core.step()
    core.add_request(request("prompt", list(range(100, 120)), 1))
    chunks = []
    while core.request("prompt") is not None:
        result = core.step()
        assert result is not None
        assert result.decode_tokens == 1
        chunks.append(result.prefill_tokens)
    assert chunks == [7, 7, 6]


def test_reset_is_refused_while_running_and_published_with_the_next_step() -> None:
    """AllBlocksCleared comes in front of the next step's stores; a forced reset preempts and stores all again."""
    core = core_of()
    core.add_request(request("a", list(range(10)), 4))
    core.step()
    assert core.reset_prefix_cache() is False
    assert core.reset_prefix_cache(reset_running=True) is True
    result = core.step()
    assert result is not None
    assert [type(event) for event in result.events] == [AllBlocksCleared, BlockStored]
    assert isinstance(result.events[1], BlockStored)
    assert result.events[1].parent is None
    finish(core)


def test_adapters_and_salts_never_share_blocks() -> None:
    """A11: the same tokens under base, adapter and salt hit only their own kind."""
    core = core_of()
    kinds: list[dict[str, str]] = [{}, {"lora": "A"}, {"salt": "A"}, {"lora": "A", "salt": "A"}]
    for round_number in (0, 1):
        for index, kind in enumerate(kinds):
            item = request(f"{round_number}-{index}", list(range(10)), **kind)  # type: ignore[arg-type]
            core.add_request(item)
            finish(core)
            assert item.cached_tokens == 8 * round_number


def test_refusals() -> None:
    """What can never fit, or is here already, is refused at the door."""
    core = core_of(4)
    with pytest.raises(TooLargeError):
        core.add_request(request("big", list(range(12)), 2))
    core.add_request(request("a", [1]))
    with pytest.raises(DuplicateRequestError):
        core.add_request(request("a", [1]))
    assert core.abort("nobody") is False


def test_same_input_same_run() -> None:
    """No clock and no chance: two runs give equal results."""
    runs = []
    for _ in range(2):
        core = core_of(16, budget=16, seats=4)
        for number in range(8):
            core.add_request(request(f"r{number}", list(range(number, number + 20)), 6))
        runs.append(finish(core))
    assert runs[0] == runs[1]


@pytest.mark.long
def test_iteration_times() -> None:
    """Vectors of the time model: floors, prefill of 10k and 70k tokens in chunks, decode over context."""
    assert H100_8B.step_s(1, 0, 0) == pytest.approx(0.0077)
    assert H100_70B.step_s(1, 0, 0) == pytest.approx(0.0188)
    assert H100_8B.step_s(1, 0, 100_000) == pytest.approx(0.0077 + 0.0052)
    assert prefill_s(10_000) == pytest.approx(0.31, rel=0.1)
    assert prefill_s(70_000) == pytest.approx(4.4, rel=0.1)


def prefill_s(tokens: int) -> float:
    core = EngineCore(CoreConfig(num_blocks=25_000), H100_8B)
    core.add_request(EngineRequest("p", array("I", range(tokens)), array("I", [1])))
    return sum(result.duration_s for result in finish(core))
