"""What goes wrong: programs change as is said, every policy finishes them, nothing is lost or counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from load.sim import workloads
from load.sim.disturbed import DisturbedSimulation, disturbed
from load.sim.perturb import NOTHING, PERTURBATIONS, RETRY_S, Perturbation, perturbed, until_aborted
from load.sim.programs import Program
from load.sim.run import SimConfig, simulate
from services.admission.policies.kv import Kv
from services.admission.policies.registry import POLICIES, make_policy
from services.admission.scheduling.interface import Actions, TurnFacts, TurnUsage, WorkerFacts

FLEET = SimConfig(workers=2, kv_tokens=125_000)


def programs(name: str = "mix", count: int = 8) -> list[Program]:
    return workloads.generate(name, count=count, rate_per_s=0.3, seed=3)


class Told(Kv):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[TurnUsage] = []
        self.changes: list[tuple[float, int, WorkerFacts | None]] = []
        self.residency: list[list[int]] = []

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        self.usages.append(usage)
        return super().turn_finished(now, usage)

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        self.changes.append((now, seat, facts))
        return super().worker_changed(now, seat, facts)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        self.residency.append(list(self.fleet.residency(turn.turn) or ()))
        return super().turn_ready(now, turn)


@pytest.mark.parametrize("name", sorted(PERTURBATIONS))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_finishes_whatever_goes_wrong(policy: str, name: str) -> None:
    """Under pressure, on two workers: every program ends, by itself or by its client, and each turn that ended found
    a worker that was there."""
    how = PERTURBATIONS[name]
    changed = perturbed(programs(), how, 3)
    result = disturbed(changed, make_policy(policy), FLEET, how)
    assert (result.unfinished, result.refused) == (0, 0)
    assert len(result.programs) + result.aborted == len(changed)
    wanted = sum(
        len(until_aborted(program).turns) - (until_aborted(program).turns[-1].fails == "abort") for program in changed
    )
    assert len(result.turns) == wanted


def test_nothing_wrong_is_the_same_simulation() -> None:
    """Hooks that do nothing change nothing."""
    plain = simulate(programs(), Kv(), FLEET)
    for how in (NOTHING, replace(PERTURBATIONS["stale-index"], index_s=0.0)):
        assert DisturbedSimulation(programs(), Kv(), FLEET, perturbation=how).run().turns == plain.turns


def test_labels() -> None:
    """Missing, or dealt out at random among those there are; what programs do stays the same."""
    plain = programs()
    missing = perturbed(plain, PERTURBATIONS["no-labels"], 3)
    wrong = perturbed(plain, PERTURBATIONS["wrong-labels"], 3)
    assert {program.label for program in missing} == {""}
    assert {program.label for program in wrong} == {"short", "long"}
    assert [program.label for program in wrong] != [program.label for program in plain]
    assert [program.turns for program in wrong] == [program.turns for program in plain]
    of_one_class = perturbed(programs("swe"), PERTURBATIONS["wrong-labels"], 3)
    assert len({program.label for program in of_one_class}) > 1


def test_tools_change_their_regime_half_way() -> None:
    """The first half as it was, the second ten times slower."""
    plain, slow = programs(), perturbed(programs(), PERTURBATIONS["regime"], 3)
    factors = [slow[number].turns[0].gap_s / plain[number].turns[0].gap_s for number in (0, 3, 4, 7)]
    assert factors == [1.0, 1.0, pytest.approx(10.0), pytest.approx(10.0)]


def test_a_compaction_rewrites_the_prompt_and_loses_its_cache() -> None:
    """Half way the context is 30 % of what it was, on another chain; it grows as before, and is found again then."""
    plain, how = programs("swe"), replace(PERTURBATIONS["compaction"], compacts=1.0)
    changed = perturbed(plain, how, 3)
    for before, after in zip(plain, changed, strict=True):
        at = len(before.turns) // 2
        assert after.turns[:at] == before.turns[:at]
        assert after.turns[at].prompt_tokens == round(0.3 * before.turns[at].prompt_tokens)
        grown = [turns[-1].prompt_tokens - turns[at].prompt_tokens for turns in (before.turns, after.turns)]
        assert grown[0] == grown[1]
        assert after.turns[at].chain is not before.turns[at].chain
    one = [replace(changed[0], arrival_s=0.0)]
    found = [row.cached_tokens > 0 for row in disturbed(one, Kv(), FLEET, how).turns]
    at = len(one[0].turns) // 2
    assert found == [index not in (0, at) for index in range(len(found))]


def test_what_engines_say_of_cached_tokens() -> None:
    """Nothing, or what they should have said of the session's turn before."""
    exact, missing, stale = Told(), Told(), Told()
    simulate(programs(), exact, FLEET)
    disturbed(programs(), missing, FLEET, PERTURBATIONS["no-cached"])
    disturbed(programs(), stale, FLEET, PERTURBATIONS["stale-cached"])
    assert {usage.cached_tokens for usage in missing.usages} == {None}
    before: dict[str, int] = {}
    for said, usage in zip(stale.usages, exact.usages, strict=True):
        assert said.cached_tokens == before.get(usage.program, 0)
        before[usage.program] = usage.cached_tokens or 0


def test_residency_is_as_it_was_a_while_ago() -> None:
    """At 5 s it is that of 5 s, at 9.9 s too."""
    one = [replace(programs("swe", 1)[0], arrival_s=0.5)]
    fresh, stale = Told(), Told()
    simulate(one, fresh, FLEET)
    disturbed(one, stale, FLEET, PERTURBATIONS["stale-index"])
    assert all(max(late) <= max(early) for late, early in zip(stale.residency, fresh.residency, strict=True))
    assert sum(map(max, stale.residency)) < sum(map(max, fresh.residency))


def test_a_client_that_goes_away_ends_its_program_at_once() -> None:
    """At the first token; the parent of a sub-agent goes on."""
    how = replace(PERTURBATIONS["aborts"], aborts=1.0)
    changed = perturbed(programs("tree", 3), how, 3)
    result = disturbed(changed, Kv(), FLEET, how)
    assert (result.aborted, result.programs, result.turns, result.unfinished) == (3, [], [], 0)
    children = [replace(program, turns=tuple(replace(turn, fails="") for turn in program.turns)) for program in changed]
    result = disturbed(children, Kv(), FLEET, how)
    assert len(result.roots) == 3
    assert result.aborted == sum(len(turn.children) for program in children for turn in program.turns)


def test_a_retry_is_another_turn_of_the_same_request() -> None:
    """A second later; every turn ends once, and the time it was tried before is in the program's."""
    one = [replace(programs("swe", 1)[0], arrival_s=0.0)]
    how = replace(PERTURBATIONS["retries"], retries=1.0)
    plain, retried = simulate(one, Kv(), FLEET), disturbed(perturbed(one, how, 3), Kv(), FLEET, how)
    assert retried.retried == len(one[0].turns) == len(retried.turns)
    assert retried.roots[0].jct_s > plain.roots[0].jct_s + RETRY_S * retried.retried


def test_a_worker_that_dies_loses_its_memory_and_comes_back() -> None:
    """The policy is told of both; what ran there is asked again, and nobody is admitted there meanwhile."""
    told, how = Told(), PERTURBATIONS["worker-lost"]
    changed = perturbed(programs(count=20), how, 3)
    result = disturbed(changed, told, FLEET, how)
    end_s = max(program.arrival_s for program in changed)
    (lost_s, seat, facts), (back_s, again, restored) = told.changes
    assert (seat, facts, again, restored) == (0, None, 0, WorkerFacts(125_000 // 16 * 16, 16))
    assert [lost_s, back_s] == pytest.approx([0.4 * end_s, 0.6 * end_s])
    assert [row for row in result.turns if row.worker == 0 and lost_s <= row.dispatched_s < back_s] == []
    assert result.retried > 0
    assert len(result.lost) == 1


def test_memory_that_is_taken_away_is_given_back() -> None:
    """The policy hears of the smaller worker and of the whole one; at the end all blocks are free."""
    told = Told()
    how = replace(PERTURBATIONS["less-memory"], from_share=0.1, to_share=0.9)
    simulation = DisturbedSimulation(programs(count=20), told, FLEET, perturbation=how)
    simulation.run()
    sizes = [facts.kv_tokens for _, _, facts in told.changes if facts is not None]
    assert sizes[0] == pytest.approx(0.6 * 125_000, rel=0.001)
    assert sizes[1] == 125_000 // 16 * 16
    cache = simulation._ranks[0].cache
    assert cache.free_blocks == cache.usable


def test_requests_without_a_session_are_no_programs_of_the_figures() -> None:
    """They run, also beside a closed loop, where they start nobody."""
    how = PERTURBATIONS["singles"]
    changed = perturbed(programs(), how, 3)
    result = disturbed(changed, Kv(), replace(FLEET, concurrency=2), how)
    assert (len(changed), len(result.roots), len(result.programs)) == (40, 8, 40)
    starts = sorted((row.started_s, 1) for row in result.roots) + sorted((row.finished_s, -1) for row in result.roots)
    running = most = 0
    for _, change in sorted(starts):
        running += change
        most = max(most, running)
    assert most == 2


def test_a_perturbation_says_what_it_needs() -> None:
    """Fleets of two for a worker that dies; bounds know no future of fleets."""
    lost = PERTURBATIONS["worker-lost"]
    assert (lost.least_workers, lost.static_fleet) == (2, False)
    assert Perturbation(name="x", what="x").static_fleet
