"""When a container that ended is started again, and what is remembered of starts that failed."""

from __future__ import annotations

import itertools

from millpond.coordinator.members import BACKOFF_S, Members
from millpond.errors import Unavailable
from millpond.wire.base import Term

GONE = Unavailable("gone", address="")


def joined(*ids: int) -> Members:
    members = Members()
    members.join(ids)
    return members


def test_a_pause_grows_with_each_failure_and_is_capped() -> None:
    members = joined(0)
    pauses = []
    now = 100.0
    for term in range(1, 20):
        members.failed(0, Term(term), GONE, now)
        pauses.append(members.members[0].retry_at_s - now)
        assert members.due(now) == []
        now = members.members[0].retry_at_s
        assert members.due(now) == [0]
    first, longest = BACKOFF_S
    assert abs(pauses[0] - first) < 1e-9
    assert all(after > before - 1e-9 for before, after in itertools.pairwise(pauses))
    assert abs(pauses[-1] - longest) < 1e-9
    assert all(pause <= longest + 1e-9 for pause in pauses)


def test_very_many_failures_do_no_harm() -> None:
    members = joined(0)
    for term in range(1, 5000):
        members.failed(0, Term(term), GONE, 0.0)
    assert members.members[0].retry_at_s == BACKOFF_S[1]


def test_careful_is_the_first_term_that_failed_until_one_serves() -> None:
    members = joined(0)
    assert members.members[0].careful == 0
    members.failed(0, Term(5), GONE, 0.0)
    members.failed(0, Term(6), GONE, 1.0)
    assert members.members[0].careful == 5
    members.started(0, Term(7))
    assert members.members[0].careful == 0
    assert members.members[0].error is None
    members.failed(0, Term(9), GONE, 2.0)
    assert members.members[0].careful == 9
    assert members.members[0].retry_at_s == 2.0 + BACKOFF_S[0], "the pause begins anew"


def test_only_that_very_incarnation_serves() -> None:
    members = joined(0, 1)
    assert not members.serves(0, Term(0))
    members.started(0, Term(3))
    assert members.serves(0, Term(3))
    assert not members.serves(0, Term(2))
    assert not members.serves(1, Term(3))
    assert not members.serves(7, Term(3))
    members.ended(0)
    assert not members.serves(0, Term(3))


def test_what_is_due_is_away_and_has_waited() -> None:
    members = joined(2, 0, 1)
    assert members.due(0.0) == [0, 1, 2]
    for container in (0, 1, 2):
        members.started(container, Term(container + 1))
    assert members.due(0.0) == []
    members.ended(1)
    assert members.due(0.0) == [1]
    members.failed(1, Term(9), GONE, 10.0)
    assert members.due(10.0) == []
    assert members.due(10.0 + BACKOFF_S[0]) == [1]


def test_restarts_are_counted_not_first_starts() -> None:
    members = joined(0)
    members.failed(0, Term(1), GONE, 0.0)
    members.started(0, Term(2))
    assert members.restarts == 0
    members.ended(0)
    members.started(0, Term(3))
    assert members.restarts == 1


def test_who_joins_twice_stays_as_it_is_and_who_left_is_gone() -> None:
    members = joined(0, 1)
    members.started(0, Term(3))
    members.join([0, 2])
    assert members.serves(0, Term(3))
    assert members.ids == [0, 1, 2]
    members.leave(0)
    members.leave(0)
    assert members.ids == [1, 2]
    assert not members.serves(0, Term(3))
