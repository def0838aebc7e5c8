"""The laboratory without its short cuts: block-exact engine cores, whose KV events feed a real index, which alone says
what is resident where. The policy drives it as it drives `load.sim.run`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvcore import PrefixIndex, chain_hashes
from load.engine.core import CoreConfig, EngineCore, StepResult
from load.engine.kv_wire import KvEncoder
from load.engine.requests import EngineRequest
from load.sim.content import Chain
from load.sim.engine import Outcome, Rank, RankConfig
from load.sim.requests import SimRequest
from load.sim.run import Simulation
from tests.integration.sim.exact import TIMING, profile


class Contents:
    """Token ids of chains: block ``i`` of a chain always has the same, and no other block has them."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[Chain, int] = {}
        self._made: dict[Chain, array[int]] = {}

    def of(self, chain: Chain, count: int) -> array[int]:
        """The first ``count`` tokens."""
        made = self._made.setdefault(chain, array("I"))
        for own, first, end in chain.path:
            number = self._numbers.setdefault(own, len(self._numbers) + 1)
            for block in range(max(first, len(made) // self._size), min(end, -(-count // self._size))):
                start = (number << 18) + block * self._size
                made.extend(range(start, start + self._size))
        return made[:count]


class IndexedRank(Rank):
    """One `EngineCore`, stepped; ``index`` hears of its cache what a bridge would: encoded batches of events."""

    def __init__(self, config: RankConfig, number: int, index: PrefixIndex, contents: Contents) -> None:
        super().__init__(config, TIMING)
        self.events = 0
        self.rejected = 0
        self._number = number
        self._index = index
        self._contents = contents
        self._encoder = KvEncoder("vllm-map", "int", config.block_size, 0)
        self._core = EngineCore(
            CoreConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                token_budget=config.token_budget,
                max_num_seqs=config.max_num_seqs,
            ),
            profile(),
        )
        self._requests: dict[str, SimRequest] = {}
        self._result: StepResult | None = None

    @property
    def idle(self) -> bool:
        return self._result is None

    @property
    def unfinished(self) -> int:
        return self._core.unfinished

    def submit(self, request: SimRequest, now: int) -> None:
        tokens = self._contents.of(request.chain, request.prompt_tokens + request.output_tokens)
        prompt, output = tokens[: request.prompt_tokens], tokens[request.prompt_tokens :]
        request.submitted_ps = now
        self._requests[str(request.number)] = request
        self._core.add_request(EngineRequest(str(request.number), prompt, output))

    def start(self, now: int) -> None:
        result = self._result = self._core.step()
        if result is None:
            return
        self.due_ps = now + int(result.duration_s)
        for name, cached in result.admitted:
            request = self._requests[name]
            if request.admitted_ps is None:
                request.admitted_ps, request.cached_tokens = now, cached
        for name in result.preempted:
            self._requests[name].preemptions += 1
        self.counters.iterations += 1
        self.counters.preemptions += len(result.preempted)
        self.counters.prefill_tokens += result.prefill_tokens
        self.counters.decode_tokens += result.decode_tokens
        self.counters.busy_ps += self.due_ps - now
        if result.events:
            self.events += len(result.events)
            applied = self._index.apply_payload(f"worker-{self._number}", 0, self._encoder.encode(result.events, 0.0))
            self.rejected += sum(applied.rejected.values()) + applied.held + applied.unknown_removed

    def finish(self, now: int) -> Outcome:
        assert self._result is not None
        outcome = Outcome()
        for output in self._result.outputs:
            request = self._requests[output.request_id]
            request.produced = output.produced
            if request.first_token_ps is None:
                request.first_token_ps = now
                outcome.first_tokens.append(request)
            if output.finish_reason is not None:
                request.finished_ps = now
                outcome.finished.append(self._requests.pop(output.request_id))
        self._result = self.due_ps = None
        return outcome

    def reach(self, chain: Chain, limit: int, now: int) -> int:
        raise AssertionError("only the index says what is resident")


@dataclass(eq=False)
class IndexedSimulation(Simulation):
    """Of a fleet without pins and host memory. ``answers``: how often the index was asked, and how often it found
    something."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    answers: list[int] = field(default_factory=lambda: [0, 0])
    _chains: dict[int, bytes] = field(default_factory=dict)

    def _prepare(self) -> None:
        contents = self._contents = Contents(self.config.block_size)
        self._ranks[:] = [
            IndexedRank(rank.config, number, self.index, contents) for number, rank in enumerate(self._ranks)
        ]

    def _residency(self, number: int) -> list[int]:
        plan = self._open[number].plan
        chain = self._chains.get(number)
        if chain is None:
            tokens = self._contents.of(plan.chain, plan.prompt_tokens)
            chain = self._chains[number] = chain_hashes(tokens.tobytes(), self.config.block_size)
        reach = {match.worker: match.reach for match in self.index.match(chain)}
        self.answers[0] += 1
        self.answers[1] += bool(reach)
        return [reach.get(f"worker-{each}", 0) for each in range(len(self._ranks))]
