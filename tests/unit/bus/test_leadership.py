"""The rule of the lease, without a bus: who may lead when."""

from __future__ import annotations

from bus.leadership import DOUBT_S, Claim, Lease, LeaseValue

LEASE_S = 2.0


class Key:
    """The key as a bucket keeps it: a value, a revision, compare-and-set."""

    def __init__(self) -> None:
        self.value: LeaseValue | None = None
        self.revision = 0

    def write(self, claim: Claim) -> int | None:
        if claim.revision != self.revision:
            return None
        self.value = claim.value
        self.revision += 1
        return self.revision


def look(lease: Lease, key: Key, now: float) -> bool:
    """One look of a standby; ``True`` when it leads after it."""
    claim = lease.look(key.revision, key.value, now)
    if claim is not None:
        revision = key.write(claim)
        if revision is not None:
            lease.written(revision, now)
    return lease.epoch(now) is not None


def renew(lease: Lease, key: Key, now: float) -> bool:
    revision = key.write(lease.renewal())
    if revision is None:
        lease.lose()
        return False
    lease.written(revision, now)
    return True


def test_the_first_to_look_leads_with_the_revision_of_its_take_over_as_epoch() -> None:
    """Renewals do not change the epoch; everybody else waits."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    assert not look(second, key, 0.1)
    for step in range(1, 10):
        assert renew(first, key, step * 0.5)
        assert not look(second, key, step * 0.5 + 0.1)
    assert first.epoch(4.6) == 1
    assert key.revision == 10


def test_a_silent_holder_stops_before_anybody_takes_over_and_is_followed_within_the_lease() -> None:
    """No clock is shared: the holder counts from sending, the others from seeing; the epoch grows."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    times = [step / 10 for step in range(1, 30)]
    stopped = next(now for now in times if first.epoch(now) is None)
    taken = next(now for now in times if look(second, key, now))
    assert stopped < taken <= LEASE_S
    assert second.epoch(taken) == 2
    assert not renew(first, key, taken)


def test_a_restarted_process_of_the_same_name_takes_over_at_once_but_only_when_it_starts() -> None:
    """Its supervisor restarted it; two living processes of one name do not take turns."""
    key, before = Key(), Lease("a", "1", LEASE_S)
    assert look(before, key, 0.0)
    after = Lease("a", "2", LEASE_S)
    assert look(after, key, 0.2)
    assert not renew(before, key, 0.5)
    assert not look(before, key, 0.6)
    assert renew(after, key, 0.7)
    assert not look(before, key, 0.8)


def test_a_lease_given_back_is_free_at_once() -> None:
    """A clean stop costs nobody the wait."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    assert not look(second, key, 0.1)
    assert key.write(first.given_back()) is not None
    assert look(second, key, 0.2)


def test_a_take_over_whose_answer_was_lost_is_recognised_as_ours() -> None:
    """The write arrived, the answer did not: the next look finds our own incarnation and leads."""
    key, lease = Key(), Lease("a", "1", LEASE_S)
    claim = lease.look(key.revision, key.value, 0.0)
    assert claim is not None
    key.write(claim)
    lease.lose()
    assert lease.ours(key.value)
    assert look(lease, key, 0.1)


def test_of_two_who_take_over_at_the_same_time_one_leads() -> None:
    """Compare-and-set decides; the loser begins to wait anew."""
    key, first = Key(), Lease("a", "1", LEASE_S)
    assert look(first, key, 0.0)
    one, other = Lease("b", "1", LEASE_S), Lease("c", "1", LEASE_S)
    for lease in (one, other):
        for now in (0.1, 1.0):
            assert lease.look(key.revision, key.value, now) is None
    claims = [lease.look(key.revision, key.value, 1.9) for lease in (one, other)]
    assert all(claims)
    results = [key.write(claim) for claim in claims if claim is not None]
    assert [result is not None for result in results] == [True, False]
    other.lose()
    assert other.look(key.revision, key.value, 2.0) is None


def test_a_holder_whose_renewals_nobody_takes_leads_on_while_the_key_is_its_own() -> None:
    """The servers elect: as long as it tries and reads its own name, up to a bound; the standby, that could not look
    either, counts anew and finds the key renewed."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    assert not look(second, key, 0.1)
    for step in range(1, 9):
        first.unrenewed(float(step))
        assert first.epoch(step + 0.9) == 1
    assert not look(second, key, 9.0)
    assert renew(first, key, 9.1)
    assert not look(second, key, 9.2)
    assert first.epoch(10.5) == 1


def test_doubt_ends_when_its_time_is_over_or_nobody_tries() -> None:
    """One that slept did not try, and does not know who leads by now; one that tries in vain for too long is alone."""
    key, slept, tried = Key(), Lease("a", "1", LEASE_S), Lease("c", "1", LEASE_S)
    assert look(slept, key, 0.0)
    slept.unrenewed(1.0)
    assert slept.epoch(2.6) is None
    assert look(tried, Key(), 0.0)
    for step in range(1, int(DOUBT_S)):
        tried.unrenewed(float(step))
        assert tried.epoch(step + 0.5) == 1
    tried.unrenewed(DOUBT_S)
    assert tried.epoch(DOUBT_S) is None


def test_a_leader_is_in_doubt_from_the_end_of_its_renewal_to_the_next() -> None:
    """Nobody else is: neither who was renewed in time, nor who does not lead."""
    lease = Lease("a", "1", LEASE_S)
    assert not lease.in_doubt(0.0)
    key = Key()
    assert look(lease, key, 0.0)
    lease.unrenewed(1.0)
    assert [lease.in_doubt(now) for now in (1.0, 1.4, 1.6)] == [False, False, True]
    assert renew(lease, key, 2.0)
    assert not lease.in_doubt(2.1)
    assert not lease.in_doubt(9.0)
    assert lease.epoch(9.0) is None


def test_a_standby_that_could_not_look_counts_anew() -> None:
    """An unchanged key proves silence only while somebody watched it."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    assert not look(second, key, 0.1)
    assert not look(second, key, 3.0)
    assert not look(second, key, 3.5)
    assert not look(second, key, 4.0)
    assert not look(second, key, 4.5)
    assert look(second, key, 4.75)


def test_a_late_answer_counts_from_when_its_renewal_was_sent() -> None:
    """However slow the server: what it took was sent before anybody could see it, so nobody takes over sooner."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    revision = key.write(first.renewal())
    assert revision is not None
    first.written(revision, 0.5)  # told at 1.4
    assert first.epoch(1.9) == 1
    assert not look(second, key, 0.6)
    assert not look(second, key, 1.5)
    assert first.epoch(2.0) is None
    assert not look(second, key, 2.2)
    assert look(second, key, 2.4)


def test_one_whose_lease_ran_out_leads_again_by_a_renewal_that_nobody_forestalled() -> None:
    """Its own revision is still the last: under a new epoch. Where somebody wrote meanwhile it is refused."""
    key, first, second = Key(), Lease("a", "1", LEASE_S), Lease("b", "1", LEASE_S)
    assert look(first, key, 0.0)
    assert (first.epoch(1.6), first.mine) == (None, True)
    assert renew(first, key, 1.6)
    assert first.epoch(3.0) == 2
    assert not look(second, key, 1.7)
    assert not look(second, key, 2.8)
    assert first.epoch(3.4) is None
    assert look(second, key, 3.5)
    assert (renew(first, key, 3.6), first.mine) == (False, False)
    assert not look(first, key, 3.7)
