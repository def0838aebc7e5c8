"""What was sent where, as admission says and hears it: one fact a grant; its own index knows at once, of others by the
bus."""

from __future__ import annotations

from pathlib import Path

from bus import subjects
from bus.nats import NatsBus
from kvcore.hashing import pack_chain
from schemas.base import from_msgpack, to_msgpack
from schemas.decision import Decision
from schemas.placed import Placed
from tests.integration.admission.processes import page
from tests.integration.admission.world import World
from tests.support.nats import NatsServer
from tests.support.processes import eventually, python_process, settings_arguments

LONG = pack_chain(range(1, 21))
"""Twenty blocks of 16 tokens; the world's workers publish no events."""


async def decided(world: World, name: str, session: str, chain: bytes, **more: object) -> Decision:
    """A turn from ask to end, and its decision."""
    request = world.request(name, session, tokens=330, chain=chain, **more)
    granted = await world.grant(request)
    world.end(request, granted.grant.worker)
    await eventually(lambda: any(each.request_id == name for each in world.decisions), 10, "decided")
    return next(each for each in world.decisions if each.request_id == name)


async def test_own_grants_at_once_and_others_over_the_bus(
    bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """Workers without events: the second session with the same prefix follows the first, in tokens and in text; so does
    a session whose prefix another leader, or an ingress by itself, has placed. One `placed` per grant, own ones not
    counted twice."""
    placed: list[Placed] = []
    await bus.subscribe(
        f"{subjects.ROOT}.placed.*", lambda message: placed.append(from_msgpack(message.payload, Placed))
    )
    world = World(bus)
    await world.start(index=False)
    arguments = settings_arguments(
        {"nats_url": nats_server.url, "instance": "admission-1", "warmup_s": 0.4, "index": "own"}
    )
    try:
        async with python_process("services.admission", *arguments, directory=tmp_path, name="admission-1") as process:
            await process.wait_said("leadership key=admission epoch=")
            first = await decided(world, "r1", "a", LONG)
            second = await decided(world, "r2", "b", LONG[: 10 * 8])
            assert (first.predicted_cached_tokens, second.predicted_cached_tokens) == (0, 160)
            assert second.worker == first.worker
            assert (second.index_health, second.index_reason) == ("approximate", "no_events")
            text = {"chain_unit": "text", "block_size": 64}
            await decided(world, "r3", "c", LONG[:40], **text)
            fourth = await decided(world, "r4", "d", LONG[:40], **text)
            assert (fourth.predicted_cached_tokens, fourth.index_reason) == (320, "text_blocks")
            await eventually(lambda: len(placed) == 4, 10, "one a grant")
            assert [(fact.request_id, fact.unit) for fact in placed] == [
                ("r1", "tokens"),
                ("r2", "tokens"),
                ("r3", "text"),
                ("r4", "text"),
            ]
            assert {(fact.source, fact.mode, fact.indexed) for fact in placed} == {("admission-1", "policy", None)}
            assert [fact.seq for fact in placed] == [0, 1, 2, 3]

            elsewhere = "w2" if first.worker == "w1" else "w1"
            foreign = Placed(
                **world.stamp("ingress-1"),
                request_id="r5",
                model=world.model,
                worker=elsewhere,
                rank=0,
                mode="fallback",
                block_size=16,
                chain=pack_chain(range(101, 121)),
            )
            bus.publish(subjects.placed(elsewhere), to_msgpack(foreign))
            known = 'tidegate_admission_index_sent_blocks{unit="tokens"} 40.0'
            await eventually(lambda: known in page(process, "/metrics"), 10, "heard of the fallback")
            sixth = await decided(world, "r6", "e", foreign.chain)
            assert (sixth.worker, sixth.predicted_cached_tokens) == (elsewhere, 320)
    finally:
        await world.stop()
