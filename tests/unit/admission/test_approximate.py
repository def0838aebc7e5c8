"""Placing by what was sent where: approximate blocks are blocks, text blocks become the pool's, and what is not known
leaves a session where it was."""

from __future__ import annotations

import msgspec

from schemas.decision import Decision
from schemas.index import MatchReply, SourceHealth, TierBlocks, WorkerMatch
from schemas.placed import Placed
from services.admission.events import MatchAnswered, WorkerStated
from services.admission.placement import IndexView, Preference
from tests.unit.admission.build import ask, driven, end, facts, match_reply, worker_state
from tests.unit.admission.test_placement import PROMPT, fleet, run


def matched(worker: str, blocks: int, health: SourceHealth = "approximate", indexed: int | None = None) -> WorkerMatch:
    return WorkerMatch(worker=worker, rank=0, blocks=TierBlocks(device=blocks), health=health, indexed=indexed)


def view(*matches: WorkerMatch) -> IndexView:
    return IndexView.of(MatchReply(indexer="i", matches=matches))


def test_sent_blocks_are_blocks() -> None:
    """An approximate rank with more of the prompt beats an exact one with less, and its health is in the candidate."""
    placement = run(fleet("a", "b"), index=view(matched("a", 8), matched("b", 3, "synced")))
    assert placement.chosen.worker == "a"
    assert [candidate.cost for candidate in placement.candidates()] == [12.0, 17.0]
    assert [candidate.health for candidate in placement.candidates()] == ["approximate", "synced"]


def test_a_session_stays_where_it_was_while_nothing_is_known() -> None:
    """An approximate rank without a trace of the prompt (it was sent before anybody took notes) counts like a blind
    one: what the session left there is held and credited. With a trace, that is what counts."""
    preference = Preference("a", 0, margin=1.0, affinity_blocks=6)
    unknown = run(fleet("a", "b"), index=view(matched("a", 0), matched("b", 2)), preference=preference)
    assert unknown.chosen.worker == "a"
    assert unknown.candidates()[unknown.choice or 0].parts["affinity_credit"] == 6.0
    known = run(fleet("a", "b"), index=view(matched("a", 1), matched("b", 5)), preference=preference)
    assert known.chosen.worker == "b"
    assert known.candidates()[0].parts["affinity_credit"] == 0.0
    exact = run(
        fleet("a", "b"), index=view(matched("a", 0, "synced"), matched("b", 2, "synced")), preference=preference
    )
    assert exact.chosen.worker == "b", "an exact index that has nothing is believed"


def test_text_blocks_become_the_pool_s() -> None:
    """Text blocks of about 64 tokens are counted in blocks of 16; workers of any block size are answered for."""
    view = IndexView.of_text(match_reply({"a": 2, "b": 0}, "approximate"), 64, PROMPT.block_size)
    built = fleet("a", "b")
    placement = run(built, index=view)
    assert (placement.chosen.worker, placement.chosen.blocks.reach, placement.chosen.cost) == ("a", 8, 12.0)
    assert view.indexed(placement.chosen) is None
    assert IndexView.of_text(MatchReply(indexer="i", error="bad_chain: x"), 64, 16).reason == "bad_chain: x"


def test_what_the_index_knew_is_said_where_it_can_be_judged() -> None:
    """The reach of an exact source, of an approximate one what its events would say, of others nothing."""
    for match, expected in (
        (matched("a", 3, "synced"), 3),
        (matched("a", 3, indexed=7), 7),
        (matched("a", 3), None),
        (matched("a", 3, "catching_up"), None),
        (matched("a", 3, "blind"), None),
    ):
        index = view(match)
        assert index.indexed(run(fleet("a"), index=index).chosen) == expected
    assert IndexView.blind("late").indexed(run(fleet("a"), index=IndexView.blind("late")).chosen) is None


def test_every_grant_is_said_once_as_placed() -> None:
    """Beside its decision: whose turn, which chain in which unit, and what the index had of it there."""
    at = driven()
    at.workers("w1")
    at.reach["w1"] = 3
    effects = at.ask(ask("r1", tokens=160, parent="p"))
    (placed,), (decision,) = facts(effects, Placed), facts(effects, Decision)
    assert (placed.request_id, placed.worker, placed.rank, placed.mode) == ("r1", "w1", 0, "policy")
    assert (placed.unit, placed.block_size, len(placed.chain) // 8, placed.indexed) == ("tokens", 16, 10, 3)
    assert (placed.session, placed.parent) == (decision.identity.key, decision.identity.parent)
    assert (placed.source, placed.epoch, placed.seq) == ("admission-1", 10, 0)
    assert facts(at.ask(ask("r1", tokens=160, parent="p")), Placed) == [], "asked again: the same grant"
    at.end(end("r1"))
    (side,) = facts(at.ask(ask("r2", kind="title")), Placed)
    assert (side.session, side.parent) == (None, None)
    (without,) = facts(at.ask(ask("r3", "other", chain=False)), Placed)
    assert (without.chain, without.indexed) == (b"", None)


def test_a_text_chain_from_ask_to_decision() -> None:
    """The index is asked in its unit, the decision counts in the pool's blocks and says that it is an estimate."""
    at = driven()
    at.answer_index = False
    at.do(WorkerStated(worker_state("w1", block_size=16)))
    at.do(WorkerStated(worker_state("w2", block_size=32)))
    request = msgspec.structs.replace(ask("r1", tokens=640), chain_unit="text", block_size=64, chain=bytes(80))
    at.ask(request)
    (question,) = at.questions
    assert (question.question.unit, question.question.block_size, question.question.session) == ("text", 64, None)
    matches = tuple(
        msgspec.structs.replace(matched(name, blocks), reason="text_blocks") for name, blocks in (("w1", 1), ("w2", 4))
    )
    effects = at.do(MatchAnswered(question.ticket, MatchReply(indexer="i", matches=matches)))
    (decision,), (placed,) = facts(effects, Decision), facts(effects, Placed)
    assert (decision.worker, decision.block_size, decision.predicted_cached_tokens) == ("w2", 16, 256)
    assert (decision.index_health, decision.index_reason) == ("approximate", "text_blocks")
    assert (placed.unit, placed.block_size, placed.indexed) == ("text", 64, None)
