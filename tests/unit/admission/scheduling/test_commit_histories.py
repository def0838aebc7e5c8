"""Invariants of spec scheduling §5.3, as amended by policy §6, over random histories; see `world`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.admission.policies.commit import CommitParameters
from services.admission.scheduling.interface import TurnFacts
from tests.unit.admission.scheduling.world import LABELS, TOOLS, World

CAPACITIES = (600, 1000, 2500)
PROFILES = (
    CommitParameters(),
    CommitParameters(span_s=0.0),
    CommitParameters(hold_limit_s=20.0, idle_expiry_s=60.0, output_tokens=30),
)


def make_world(seats: list[int], profile: int, experience: int | None, blind: bool) -> World:
    return World(seats, PROFILES[profile], experience, blind)


class Histories(RuleBasedStateMachine):
    """Clients, engines and a bus that may do anything."""

    @initialize(
        seats=st.lists(st.sampled_from(CAPACITIES), min_size=1, max_size=3),
        profile=st.integers(0, len(PROFILES) - 1),
        experience=st.one_of(st.none(), st.integers(0, 5)),
        blind=st.booleans(),
    )
    def begin(self, seats: list[int], profile: int, experience: int | None, blind: bool) -> None:
        self.world = make_world(seats, profile, experience, blind)

    @rule(data=st.data(), label=st.sampled_from(LABELS), prompt=st.integers(1, 1200), single=st.booleans())
    def arrive(self, data: st.DataObject, label: str, prompt: int, single: bool) -> None:
        parents = [None, *self.world.programs]
        self.world.arrive(label, prompt, data.draw(st.sampled_from(parents)), single=single and prompt % 4 == 0)

    @precondition(lambda self: self.world.programs)
    @rule(data=st.data(), more=st.integers(-200, 400))
    def come_back(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(list(self.world.programs)))
        self.world.ready(name, max(1, self.world.programs[name] + more))

    @precondition(lambda self: self.world.running)
    @rule(
        data=st.data(),
        output=st.integers(0, 300),
        cached=st.one_of(st.none(), st.floats(0, 1)),
        tool=st.sampled_from(TOOLS),
        final=st.booleans(),
    )
    def finish(self, data: st.DataObject, output: int, cached: float | None, tool: str | None, final: bool) -> None:
        turn = data.draw(st.sampled_from(list(self.world.running)))
        prompt = self.world.running[turn][0].prompt_tokens
        found = None if cached is None else int(cached * prompt)
        usage = self.world.finish(turn, output, found, tool, final=final)
        if output % 3 == 0:  # told twice
            self.world.tell("turn_finished", self.world.now, usage)

    @precondition(lambda self: self.world.held or self.world.running)
    @rule(data=st.data(), twice=st.booleans())
    def abort(self, data: st.DataObject, twice: bool) -> None:
        turn = data.draw(st.sampled_from([*self.world.held, *self.world.running]))
        self.world.abort(turn)
        if twice:
            self.world.tell("turn_aborted", self.world.now, turn)

    @precondition(lambda self: self.world.held)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(list(self.world.held)))
        self.world.tell("turn_ready", self.world.now, self.world.held[turn])

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.world.tell("first_token", self.world.now, data.draw(st.sampled_from(list(self.world.running))))

    @precondition(lambda self: self.world.programs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(list(self.world.programs))))

    @rule(number=st.integers(0, 3), capacity=st.one_of(st.none(), st.sampled_from(CAPACITIES)))
    def seat(self, number: int, capacity: int | None) -> None:
        self.world.seat(number, capacity)

    @rule(seconds=st.one_of(st.floats(0, 3), st.floats(0, 400)))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


Histories.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def step(world: World, source: random.Random) -> None:
    """One event of a history that is drawn by a plain generator, mostly of clients and engines that behave."""
    kind = source.random()
    if kind < 0.2 and len(world.programs) < 12:
        parent = source.choice([None, None, *world.programs])
        world.arrive(source.choice(LABELS), source.randint(1, 400), parent, single=source.random() < 0.05)
    elif kind < 0.45 and world.programs:
        busy = {facts.program for facts in world.held.values()} | {each.program for each, _ in world.running.values()}
        idle = [name for name in world.programs if name not in busy] or list(world.programs)
        name = source.choice(idle)
        world.ready(name, max(1, world.programs[name] + source.randint(-20, 200)))
    elif kind < 0.8 and world.running:
        turn = source.choice(list(world.running))
        prompt = world.running[turn][0].prompt_tokens
        cached = None if source.random() < 0.02 else source.randint(0, prompt)
        final = source.random() < 0.15
        world.finish(turn, source.randint(1, 60), cached, source.choice(TOOLS), final=final)
    elif kind < 0.84 and (world.held or world.running):
        world.abort(source.choice([*world.held, *world.running]))
    elif kind < 0.86 and world.programs:
        world.close(source.choice(list(world.programs)))
    elif kind < 0.88:
        number = source.randrange(3)
        world.seat(number, source.choice((None, *CAPACITIES)))
    else:
        world.wait(source.expovariate(0.2))


def tell_histories(seeds: range, steps: int, play: Callable[[World, random.Random], None] = step) -> None:
    for seed in seeds:
        source = random.Random(seed)
        seats = [source.choice(CAPACITIES) for _ in range(source.randint(1, 3))]
        experience = source.choice((None, 0, 1, 2))
        world = make_world(seats, source.randrange(len(PROFILES)), experience, source.random() < 0.3)
        try:
            for _ in range(steps):
                play(world, source)
            world.end(is_told_again=seed % 4 == 0)
        except Exception as error:
            error.add_note(f"history {seed}")
            raise


def test_many_histories() -> None:
    """Histories that go further than a shrinking search does; 10,000 of them where the search is deep."""
    tell_histories(range(10_000 if settings().max_examples >= 1000 else 40), 50)


def test_turn_of_a_program_that_is_not_known() -> None:
    """Its arrival was lost: it is a program without a label."""
    world = World([1000], CommitParameters())
    world.programs["stranger"] = 0
    world.ready("stranger", 100)
    assert world.running
    assert isinstance(world.running[0][0], TurnFacts)
    world.end()


@pytest.mark.parametrize("event", ["turn_aborted", "first_token"])
def test_turns_that_never_were(event: str) -> None:
    world = World([1000], CommitParameters())
    world.tell(event, 0.0, 17)
    world.end()
