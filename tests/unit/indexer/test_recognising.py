"""The recogniser's rules one by one, and that nothing is ever given to a wrong conversation, whatever clients do."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcore.session_index import SessionLimits
from schemas.index import RecogniseReply, RecogniseRequest
from schemas.request import Usage
from schemas.session import SessionKey
from services.indexer.recognising import (
    FIRST_PROMPT,
    RETRIED_S,
    SETTLED_S,
    STARTED_LATELY,
    SURE,
    UNFINISHED_S,
    Recogniser,
)
from services.ingress.message_chain import MessageChain
from tests.support.recognition import House, placed

SYSTEM, HELLO, ANSWER, OTHER_ANSWER, MORE, OTHER = "system", "hello", "!hi", "!ho", "more", "other"
PREAMBLE = 1


def chain(*parts: str) -> MessageChain:
    """A prompt after the system message; parts that begin with ``!`` were said by the model."""
    hashes, parent = b"", 0
    for part in (SYSTEM, *parts):
        parent = xxh3_64_intdigest(f"{parent} {part}".encode()) & ~1 | part.startswith("!")
        hashes += parent.to_bytes(8, "little")
    return MessageChain(hashes, PREAMBLE)


def sent(house: House, *parts: str, failed: bool = False, now: float = 0.0) -> tuple[SessionKey, RecogniseReply]:
    return house.send(chain(*parts), now, failed=failed)


def test_the_next_turn_continues() -> None:
    """Turn by turn one session; the confidence rises once an answer of its own is in the prompt."""
    house = House()
    session, reply = sent(house, HELLO)
    assert (reply.relation, reply.confidence) == ("new", 1.0)
    again, reply = sent(house, HELLO, ANSWER, MORE)
    assert (again, reply.relation, reply.confidence, reply.reason) == (
        session,
        "continues",
        FIRST_PROMPT,
        "first_prompt",
    )
    again, reply = sent(house, HELLO, ANSWER, MORE, ANSWER, MORE)
    assert (again, reply.relation, reply.confidence, reply.reason) == (session, "continues", SURE, None)
    assert reply.depth == 1 + 3


def test_equal_first_prompts_are_not_guessed_at() -> None:
    """Rollouts of one task: both turns that go on from the same first prompt are new sessions, and go on as such once
    their answers differ."""
    house = House()
    one, _ = sent(house, HELLO)
    other, reply = sent(house, HELLO)
    assert (reply.relation, reply.reason, reply.parent) == ("repeats", "asked_before", None)
    assert other != one
    first, reply = sent(house, HELLO, ANSWER, MORE)
    assert (reply.relation, reply.reason, reply.confidence) == ("new", "ambiguous", 0.0)
    second, reply = sent(house, HELLO, OTHER_ANSWER, MORE)
    assert (reply.relation, reply.reason) == ("new", "ambiguous")
    assert len({one, other, first, second}) == 4
    assert sent(house, HELLO, ANSWER, MORE, ANSWER, MORE)[0] == first
    assert sent(house, HELLO, OTHER_ANSWER, MORE, ANSWER, MORE)[0] == second


def test_a_retry_is_the_same_session() -> None:
    """No answer came: the same prompt again is a retry, as often as it takes (harness.md §6.4). Once it is answered,
    the same prompt is somebody else's."""
    house = House()
    session, _ = sent(house, HELLO, failed=True)
    again, reply = sent(house, HELLO, failed=True)
    assert (again, reply.relation, reply.reason) == (session, "repeats", "retry")
    assert sent(house, HELLO)[0] == session
    assert sent(house, HELLO)[1].session is None


def test_what_a_client_broke_off_is_no_retry() -> None:
    """It keeps what had come and goes on from there; somebody who asks the same meanwhile is somebody else. Before
    anything had come it may have given up to ask again."""
    house = House()
    session = house.session_of(house.begin(chain(HELLO), 0.0))
    house.end(session, outcome="client_disconnect", usage=Usage(output_tokens=3))
    other, reply = sent(house, HELLO)
    assert (reply.session, reply.reason) == (None, "asked_before")
    assert other != session
    house = House()
    session = house.session_of(house.begin(chain(HELLO), 0.0))
    house.end(session, outcome="client_disconnect")
    assert sent(house, HELLO)[0] == session


def test_a_retry_comes_soon() -> None:
    """What failed long ago is not tried again by him who asks now; nor is what nobody has heard the end of."""
    house = House()
    session, _ = sent(house, HELLO, failed=True)
    assert sent(house, HELLO, failed=True, now=RETRIED_S)[0] == session
    assert sent(house, HELLO, now=2 * RETRIED_S + 1)[1].session is None
    house = House()
    house.begin(chain(HELLO), 0.0)
    _, reply = sent(house, HELLO, now=UNFINISHED_S)
    assert (reply.session, reply.reason) == (None, "asked_before")


def test_a_retry_or_another_rollout_s_same_turn() -> None:
    """Two rollouts of one task got the same answer and ask the same next. The first one's turn failed: the second one's
    is not its retry."""
    house = House()
    sent(house, HELLO)
    sent(house, HELLO)
    first, reply = sent(house, HELLO, ANSWER, MORE, failed=True)
    assert reply.reason == "ambiguous"
    second, reply = sent(house, HELLO, ANSWER, MORE)
    assert (second == first, reply.session, reply.reason) == (False, None, "asked_before")


def test_an_answer_that_was_not_taken_keeps_nobody_busy() -> None:
    """It came too late, or was not sure enough: the request became a session of its own, by what is said of it when it
    is accepted or only when it is placed, before or after the question is read."""
    for heard in ("accepted", "placed", "placed first"):
        house = House()
        session, _ = sent(house, HELLO)
        turn, own = chain(HELLO, ANSWER, MORE), SessionKey(family="prefix", root="own")
        question = RecogniseRequest(model="m", message_chain=turn.hashes, preamble=PREAMBLE, request_id="own")
        fact = placed(own, "own", turn)
        if heard == "placed first":
            house.recogniser.placed(fact, 1.0)
        given = house.recogniser.recognise(question, "i", 1.0).session
        assert given == (None if heard == "placed first" else session)
        if heard == "accepted":
            house.recogniser.accepted(own, "own", 1.0)
        elif heard == "placed":
            house.recogniser.placed(fact, 1.0)
            _, reply = sent(house, HELLO, ANSWER, MORE, ANSWER, MORE)
            assert reply.reason == "in_flight"  # its own request still runs
        _, reply = sent(house, HELLO, OTHER_ANSWER, MORE)
        assert (reply.session, reply.reason) == (session, "first_prompt")


def test_a_placement_that_is_heard_late_moves_nobody_back() -> None:
    """Admission's and an ingress's own facts may overtake each other: the session does not end at its first prompt
    again, where a fork would be its next turn."""
    house = House()
    session, _ = sent(house, HELLO)
    sent(house, HELLO, ANSWER, MORE)
    house.recogniser.placed(placed(session, "r1", chain(HELLO)), 2.0)
    _, reply = sent(house, HELLO, OTHER_ANSWER, MORE)
    assert (reply.session, reply.relation) == (None, "new")
    assert sent(house, HELLO, ANSWER, MORE, ANSWER, MORE)[0] == session


def test_who_asked_before_an_indexer_began_is_not_known() -> None:
    """Of many rollouts, or of forks, it has heard only the last one's prompt: whoever goes on is not surely that one,
    until all who were there before have moved on."""
    house = House(Recogniser(SessionLimits(), since=100.0))
    session, _ = sent(house, HELLO, now=101.0)
    _, reply = sent(house, HELLO, ANSWER, MORE, now=102.0)
    assert (reply.session, reply.confidence, reply.reason) == (session, STARTED_LATELY, "started_lately")
    session, _ = sent(house, OTHER, ANSWER, MORE, now=103.0)
    _, reply = sent(house, OTHER, ANSWER, MORE, ANSWER, MORE, now=104.0)
    assert (reply.session, reply.confidence, reply.reason) == (session, STARTED_LATELY, "started_lately")
    house = House(Recogniser(SessionLimits(), since=100.0))
    session, _ = sent(house, HELLO, now=101.0)
    _, reply = sent(house, HELLO, ANSWER, MORE, now=100.0 + SETTLED_S)
    assert (reply.session, reply.confidence) == (session, FIRST_PROMPT)


def test_a_repeated_turn_that_was_answered_is_a_child() -> None:
    """Somebody asks for another answer (or a harness sends twice): a new session, whose parent is known; the next turn
    could be either's, and its parent is the one that both come from."""
    house = House()
    session, _ = sent(house, HELLO)
    sent(house, HELLO, ANSWER, MORE)
    _, reply = sent(house, HELLO, ANSWER, MORE)
    assert (reply.relation, reply.parent) == ("repeats", session)
    _, reply = sent(house, HELLO, ANSWER, MORE, OTHER_ANSWER, MORE)
    assert (reply.relation, reply.reason, reply.parent) == ("forks", "ambiguous", session)


def test_an_edited_message_forks() -> None:
    """Behind the first answer the history is the session's own: another last message is a fork. Before it, only the
    first question is shared: a session of its own."""
    house = House()
    session, _ = sent(house, HELLO)
    sent(house, HELLO, ANSWER, MORE)
    fork, reply = sent(house, HELLO, ANSWER, OTHER)
    assert (reply.relation, reply.parent) == ("forks", session)
    _, reply = sent(house, HELLO, ANSWER, OTHER, ANSWER, MORE)
    assert (reply.relation, reply.session) == ("continues", fork)
    _, reply = sent(house, OTHER)
    assert (reply.relation, reply.reason) == ("new", None)


def test_two_conversations_that_differ_in_their_last_message_only() -> None:
    """A long beginning that a client brings along (examples, a document) is nobody's: with blocks instead of messages,
    the second would have looked like the first one's next turn."""
    house = House()
    shots = [part for number in range(5) for part in (f"question {number}", f"!answer {number}")]
    sent(house, *shots, HELLO)
    _, reply = sent(house, *shots, OTHER)
    assert (reply.relation, reply.reason) == ("new", "same_beginning")


def test_sub_agents_share_tools_and_system_only() -> None:
    """What every session of a harness has in common says nothing, even where a whole prompt is no more than that."""
    house = House()
    sent(house)
    _, reply = sent(house, HELLO)
    assert (reply.relation, reply.confidence) == ("new", 1.0)
    _, reply = sent(house)
    assert (reply.relation, reply.confidence) == ("new", 1.0)


def test_a_busy_session_cannot_be_continued() -> None:
    """Its answer is not there yet, so a prompt that has one is somebody else's: a fork where it shares an answer. A
    request whose end is never heard is over after an hour."""
    house = House()
    session, _ = sent(house, HELLO)
    reply = house.begin(chain(HELLO, ANSWER, MORE), 0.0)
    assert reply.session == session
    open_request = house.request_id
    _, reply = sent(house, HELLO, ANSWER, MORE, ANSWER, MORE)
    assert (reply.relation, reply.reason, reply.parent) == ("forks", "in_flight", session)
    house.end(session, request_id=open_request)
    _, reply = sent(house, HELLO, ANSWER, MORE, OTHER_ANSWER, MORE)
    assert (reply.relation, reply.session) == ("continues", session)
    lost = house.begin(chain(HELLO, ANSWER, MORE, OTHER_ANSWER, MORE, ANSWER, MORE), 10.0)
    assert lost.session == session
    _, reply = sent(house, HELLO, ANSWER, MORE, OTHER_ANSWER, MORE, ANSWER, MORE, ANSWER, MORE, now=10.0 + UNFINISHED_S)
    assert reply.session == session


def test_two_turns_that_go_on_at_once() -> None:
    """The first is given the session and is held, so that its prompt is not placed yet: the second, which goes on from
    the same end, is a fork. After the first one's end without being placed the session may go on."""
    house = House()
    session, _ = sent(house, HELLO)
    sent(house, HELLO, ANSWER, MORE)
    recogniser = house.recogniser
    recogniser.accepted(session, "held", 0.0)
    _, reply = sent(house, HELLO, ANSWER, MORE, ANSWER, OTHER)
    assert (reply.relation, reply.reason, reply.parent) == ("forks", "in_flight", session)
    house.end(session, request_id="held")
    assert sent(house, HELLO, ANSWER, MORE, OTHER_ANSWER, MORE)[0] == session


def test_without_an_answer_between_only_what_is_its_own_counts() -> None:
    """A harness that drops an answer goes on without one (mini-swe-agent): known by the answers before. A first prompt
    that begins with another's whole first prompt is not its next turn."""
    house = House()
    session, _ = sent(house, HELLO)
    _, reply = sent(house, HELLO, MORE)
    assert (reply.session, reply.reason) == (None, "no_answer")
    sent(house, HELLO, ANSWER, MORE)
    _, reply = sent(house, HELLO, ANSWER, MORE, OTHER)
    assert (reply.relation, reply.session) == ("continues", session)


def test_without_an_answer_a_fork_s_common_history_is_not_enough() -> None:
    """A fork that has the same answers goes back and says what the original said, and more: it is not the original."""
    house = House()
    sent(house, HELLO)
    sent(house, HELLO, ANSWER, OTHER)
    sent(house, HELLO, ANSWER, MORE)
    _, reply = sent(house, HELLO, ANSWER, OTHER, "and more")
    assert (reply.session, reply.reason) == (None, "no_answer")


def test_tenants_and_models_never_meet() -> None:
    """The same prompt for another model, or of another tenant, is not known."""
    house = House()
    sent(house, HELLO)
    hashes = chain(HELLO, ANSWER, MORE).hashes
    for question in (
        RecogniseRequest(model="other", message_chain=hashes, preamble=1),
        RecogniseRequest(model="m", message_chain=hashes, preamble=1, tenant="other"),
    ):
        assert house.recogniser.recognise(question, "i", 0.0).relation == "new"
    assert house.recogniser.relations == {"new": 3}


def test_memory_is_bounded() -> None:
    """Sessions over the bound go, with all that was known of their requests; requests that never end too."""
    house = House(Recogniser(SessionLimits(max_sessions=3)))
    for number in range(10):
        house.begin(chain(f"question {number}"), 0.0)
    assert len(house.recogniser.index) == 3
    assert house.recogniser.open_requests == 3
    session, _ = sent(house, "question 9")
    for number in range(1000):
        house.recogniser.accepted(session, f"never over {number}", 0.0)
    assert house.recogniser.open_requests <= 3 + 64


@dataclass(eq=False)
class Client:
    """One conversation as its client has it. ``sent``: the parts of its last prompt; ``answered``: it got an answer."""

    sent: list[str] = field(default_factory=list)
    answered: bool = False
    origin: Client | None = None
    turns: int = 0


@pytest.mark.long
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.integers(1, 3))
def test_nothing_is_given_to_a_wrong_conversation(seed: int, answers: int, questions: int) -> None:
    """Clients in any order, with few different questions and answers (down to one: rollouts at temperature 0): next
    turns of one or two parts, retries, forks at any place, requests that overlap. A session is only ever given a prompt
    of a client that it has been given before, with two exceptions that no content can tell: a fork at the end, which is
    its origin's until that goes on; and a prompt that was not answered, which is whoever sends the same again."""
    random, house = Random(seed), House()
    clients: list[Client] = []
    last: dict[SessionKey, Client] = {}
    members: dict[SessionKey, list[Client]] = {}
    running: list[tuple[str, SessionKey, Client, bool]] = []
    for now in range(60):
        if running and random.random() < 0.6:
            request_id, session, client, failed = running.pop(random.randrange(len(running)))
            house.end(session, request_id=request_id, failed=failed)
            client.answered = not failed
            continue
        busy = [client for _, _, client, _ in running]
        client = next_client(random, [each for each in clients if each not in busy])
        if client not in clients:
            clients.append(client)
        parts = next_prompt(random, client, answers, questions)
        reply = house.begin(chain(*parts), float(now))
        session = house.session_of(reply)
        client.turns += 1
        if reply.session is not None:
            before = last[reply.session]
            fork_at_the_end = client.turns == 1 and client.origin in members[reply.session]
            same_again = reply.relation == "repeats" and before.sent == parts and not before.answered
            assert client in members[reply.session] or fork_at_the_end or same_again, (reply, parts)
        last[session] = client
        members.setdefault(session, []).append(client)
        client.sent, client.answered = parts, False
        running.append((house.request_id, session, client, random.random() < 0.2))


def next_client(random: Random, idle: list[Client]) -> Client:
    choice = random.random()
    if not idle or choice < 0.25:
        return Client()
    client = random.choice(idle)
    if choice < 0.4 and client.answered:
        return Client(list(client.sent), answered=True, origin=client)
    return client


def next_prompt(random: Random, client: Client, answers: int, questions: int) -> list[str]:
    asked = [f"question {random.randrange(questions)}" for _ in range(random.choice((1, 1, 1, 2)))]
    if not client.sent:
        return asked
    if not client.answered:
        return client.sent
    if client.turns and random.random() < 0.1:  # it goes back, and asks something else
        return [*client.sent[: random.randrange(len(client.sent))], *asked]
    return [*client.sent, f"!answer {random.randrange(answers)}", *asked]


def test_half_a_hash_is_left_out() -> None:
    """A chain that is no whole hashes, and one of another family, are not taken in."""
    house = House()
    for session, message_chain in (
        (SessionKey(family="prefix", root="r"), chain(HELLO).hashes[:-3]),
        (SessionKey(family="codex", root="r"), chain(HELLO).hashes),
    ):
        fact = placed(session, "r", MessageChain(message_chain, PREAMBLE))
        house.recogniser.placed(fact, 0.0)
    assert len(house.recogniser.index) == 0
