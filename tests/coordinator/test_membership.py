"""Of one container only one start runs at a time, the very first included; and others serve what one that is gone had."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.coordinator.detector import LEASE_S
from millpond.coordinator.hosting import Host
from millpond.coordinator.membership import Membership
from millpond.errors import Unavailable
from millpond.runtime import Serial, Threads
from millpond.wire.base import Done, Term


class Hosts:
    def __init__(self) -> None:
        self.started = 0

    def start(self, container: int, term: Term) -> Host:
        self.started += 1
        return Host(self.started, f"at:{self.started}")

    def alive(self, container: int) -> bool:
        return True

    def has_ended(self, container: int) -> bool:
        return True

    def stop(self) -> None:
        pass


class SlowAssignment:
    """Gives a container its slices when it is told to."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def next_term(self) -> Term:
        return Term(1)

    def assign(self, *_: Any) -> None:
        self.begun.set()
        assert self.goes_on.wait(30)


def test_a_container_that_is_said_to_have_ended_while_it_first_comes_up_is_not_started_twice() -> None:
    hosts, assignment = Hosts(), SlowAssignment()
    connection: Any = SimpleNamespace(call=lambda message: Done(), close=lambda: None)
    membership = Membership(lambda address: connection, assignment, Threads())
    opening = threading.Thread(target=membership.start, args=(hosts, [0]))
    opening.start()
    assert assignment.begun.wait(30)
    recovering = threading.Thread(target=membership.recover, args=(0,))
    recovering.start()
    recovering.join(0.2)
    assignment.goes_on.set()
    opening.join()
    recovering.join()
    assert (hosts.started, membership.live[0].host) == (1, Host(1, "at:1"))
    membership.close()


class Relief:
    """Hands slices to others at the second try."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.relieved: list[int] = []

    def next_term(self) -> Term:
        return Term(1 + self.hosts.started)

    def assign(self, *_: Any) -> None:
        pass

    def relieve(self, container: int) -> None:
        self.relieved.append(container)


class LostHost(Hosts):
    """One on which nothing starts after the first time."""

    def start(self, container: int, term: Term) -> Host:
        if self.started:
            raise Unavailable("no machine takes it", address="")
        return super().start(container, term)

    def alive(self, container: int) -> bool:
        return False

    def kill(self, container: int) -> None:
        pass


def test_whoever_could_not_serve_the_slices_of_one_that_ended_is_asked_again_while_it_does_not_start() -> (
    None
):
    hosts = LostHost()
    assignment = Relief(hosts)
    connection: Any = SimpleNamespace(call=lambda message: Done(), close=lambda: None)
    membership = Membership(lambda address: connection, assignment, Threads())
    membership.start(hosts, [0])
    assert not assignment.relieved, "nothing is handed on while a pond is opened"
    membership.recover(0)
    membership.recover(0)
    assert assignment.relieved == [0, 0]
    membership.close()


class Unheard(Hosts):
    """Nobody knows whether what was killed runs on."""

    ended = False

    def has_ended(self, container: int) -> bool:
        return self.ended

    def kill(self, container: int) -> None:
        pass


@pytest.mark.parametrize("ended", [False, True])
def test_others_serve_what_a_container_had_once_it_answers_nobody(ended: bool) -> None:
    """It may run on where its end is not certain: until its lease is over, readers may be answered by it."""
    hosts, runtime = Unheard(), Serial()
    relief, connection = Relief(hosts), SimpleNamespace(call=lambda message: Done(), close=lambda: None)
    relieved_s: list[float] = []
    relief.relieve = lambda container: relieved_s.append(runtime.now())  # type: ignore[method-assign]
    membership = Membership(lambda address: connection, relief, runtime)  # type: ignore[arg-type,return-value]
    membership.start(hosts, [0])
    runtime.sleep(100.0)
    membership.detector.hears(0, membership.live[0].term, runtime.now())
    runtime.sleep(1.0)
    hosts.ended = ended
    membership.recover(0, broken=True)
    [at_s] = relieved_s
    assert at_s == pytest.approx(101.0 if ended else 100.0 + LEASE_S, abs=0.1)
    membership.close()
