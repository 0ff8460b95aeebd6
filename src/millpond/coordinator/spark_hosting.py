"""Containers on the machines of a Spark application: each is kept by a job of one task, which dials home.

A task holds a slot of the cluster's. When only the container process ends, the next one runs in the same slot: no query
takes it meanwhile and then waits for the container that it keeps out. When the task ends, or its executor, Spark may try it
again: an attempt that arrives is one more slot for the same container, and no more than that. Which process runs is the
coordinator's to say, and each incarnation is given to one attempt, once. An attempt that arrives while another keeps the
container waits: if it ended, Spark would end the other one, too.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from itertools import count
from typing import Any

import msgspec

from millpond import private
from millpond.container.printing import log_path
from millpond.coordinator.hosting import (
    CODE_SECONDS,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Hello,
    Host,
    cannot_start,
)
from millpond.coordinator.spark_cluster import Cluster, Executor, choose
from millpond.coordinator.spark_home import Home, TaskLine
from millpond.coordinator.spark_task import NOT_AT_HOME, ROOT_UNSEEN, ContainerTask, Outcome
from millpond.errors import ContainerFailed, MillpondError, RootUnseen, error_named
from millpond.wire.base import Term
from millpond.wire.home import LEASE_S, Busy, End, Ended, Grant, Greeted, Leave, Message, Start
from millpond.wire.keyring import ContainerKeys
from millpond.wire.sockets import machine

GRANTS = "grants"
"""The folder of the root with the files by which tasks are known."""
WATCH_S = 1.0
CANCEL_S = 5.0
BUSY_S = 2.0
"""For so long after word that a process is at work it counts as that: word comes each half second."""


class SparkHosting:
    """A `Hosting`. On this machine, containers serve at sockets in the directory `sockets`; on others, by TLS.

    `keys` are what a container in that term is handed, and where it listens if it is on another machine.

    `on_exit` is called, in a thread of its own, when one has ended that was not asked to.
    """

    def __init__(
        self,
        cluster: Cluster,
        root: str,
        sockets: str,
        threads: int,
        on_exit: Callable[[int], None],
        keys: Callable[[int, Term, str], ContainerKeys],
        code_seconds: float = CODE_SECONDS,
        memory: int | None = None,
        trust: str = "all",
    ) -> None:
        self._cluster = cluster
        self._root = root
        self._sockets = sockets
        self._threads = threads
        self._slots_each = cluster.slots_of(threads)
        self._on_exit = on_exit
        self._keys = keys
        self._code_seconds = code_seconds
        self._memory = memory
        self._trust = trust
        self._changed = threading.Condition()
        self._submitting = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._jobs: list[_Job] = []
        self._incarnations = count(1)
        self._stopping = False
        self._stopped = threading.Event()
        self._grants = os.path.join(root, GRANTS)
        private.make_dir(self._grants)
        for name in os.listdir(self._grants):
            os.unlink(os.path.join(self._grants, name))
        self._home = Home(cluster.bind_address, cluster.driver_host, self)
        threading.Thread(target=self._watch_executors, name="millpond-executors", daemon=True).start()

    # Hosting

    def start(self, container: int, term: Term) -> Host:
        with self._changed:
            place = self._places.setdefault(container, _Place(container))
            self._count_slots()
        self._end(place)
        line = self._awaited_line(place)
        with self._changed:
            incarnation = place.run_on(line, next(self._incarnations))
            line.send(self._order(container, incarnation, term, line))
            answered = self._changed.wait_for(lambda: place.hello or not place.runs, START_TIMEOUT_S)
            words, hello, pid = place.words, place.hello, place.pid
            if not place.runs or not answered:
                place.expected_end = True
        if hello is None or not answered:
            why = f"it {words}" if answered else f"it was not ready after {START_TIMEOUT_S:g} s"
            self._end(place)
            raise cannot_start(
                container, why, f"its whole output is in {log_path(self._root, container)}, on {place.host}"
            )
        if hello.error:
            self._end(place)
            raise error_named(hello.error)(hello.message)
        return Host(pid, hello.address, line.arrived.host)

    def alive(self, container: int) -> bool:
        with self._changed:
            place = self._places.get(container)
            return place is not None and place.runs

    def has_ended(self, container: int) -> bool:
        with self._changed:
            place = self._places.get(container)
            return place is None or not (place.runs or time.monotonic() < place.may_run_until)

    def is_busy(self, container: int) -> bool:
        with self._changed:
            place = self._places.get(container)
            return place is not None and place.runs and time.monotonic() < place.busy_until

    def check_room(self, containers: int) -> None:
        self._check_session(containers - 1)
        self._cluster.check_slots(containers, self._threads, patience_s=0.0)

    def task_slots(self) -> dict[str, int]:
        each = self._slots_each
        with self._changed:
            places = list(self._places.values())
            return {"wanted": each * len(places), "had": each * sum(bool(place.waiting) for place in places)}

    def kill(self, container: int) -> None:
        with self._changed:
            place = self._places.get(container)
            if place is not None and place.runs and place.line is not None:
                place.expected_end = True
                place.line.send(End(place.incarnation))

    def last_words(self, container: int) -> str:
        with self._changed:
            place = self._places.get(container)
            return "has not ended" if place is None else place.last_words or "has not ended"

    def stop_one(self, container: int) -> None:
        with self._changed:
            place = self._places.get(container)
        if place is None:
            return
        self._end(place)
        with self._changed:
            jobs = [] if place.job is None else [place.job]
            place.dismiss()
        self._await(jobs, CANCEL_S)
        with self._changed:
            del self._places[container]
            self._count_slots()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            for place in self._places.values():
                place.dismiss()
            jobs = list(self._jobs)
            self._changed.notify_all()
        self._stopped.set()
        self._await(jobs, STOP_TIMEOUT_S + CANCEL_S)
        self._home.close()
        self._cluster.held = 0
        with suppress(OSError):
            os.rmdir(self._grants)

    # Slots

    def _count_slots(self) -> None:
        self._cluster.held = self._slots_each * (2 if self._cluster.speculates else 1) * len(self._places)

    def _awaited_line(self, place: _Place) -> TaskLine:
        """The line to an attempt that waits for work. A job is started if none could bring one."""
        deadline = time.monotonic() + START_TIMEOUT_S
        own: _Job | None = None
        while True:
            self._check_session(place.container)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or place.waiting or place.job is None or place.job.is_over,
                    max(0.0, deadline - time.monotonic()),
                )
                self._check_open(place.container)
                if place.waiting:
                    return place.waiting[0]
                job = place.job
                if job is None or job.is_over:
                    place.job = None
                elif time.monotonic() >= deadline:
                    place.job = None
                    break
            if own is not None:
                # One from before may have come to its end, this one has failed.
                why = own.failure or "its Spark task has ended"
                raise own.error or cannot_start(place.container, why)
            own = self._submitted(place)
        self._cluster.cancel(job.group)
        raise cannot_start(
            place.container,
            f"Spark had no slot for its task within {START_TIMEOUT_S:g} s",
            "queries that run may hold them all: give the application more cores, or spark.scheduler.mode=FAIR,"
            " by which a container comes before the rest of a large job",
        )

    def _submitted(self, place: _Place) -> _Job:
        """Starts a job for the place, in a thread of its own."""
        with self._submitting:
            executors = self._cluster.executors()
            with self._changed:
                others = [other.executor for other in self._places.values() if other is not place]
            executor = choose(executors, Counter(others))
            place.executor = "" if executor is None else executor.id
        job = _Job(place.container, os.path.join(self._grants, secrets.token_hex(8)), self._home.grant())
        with self._changed:
            self._check_open(place.container)
            private.write_text(job.grant_path, job.grant.text())
            place.job = job
            self._jobs = [known for known in self._jobs if not known.ended] + [job]
        work = partial(self._run_job, place, job, executor)
        self._cluster.thread(work, f"millpond-job-{place.container}").start()
        return job

    def _run_job(self, place: _Place, job: _Job, executor: Executor | None) -> None:
        home = self._home
        task = ContainerTask(home.host, home.port, job.grant_path, self._sockets)
        description = f"container {place.container} of the pond at {self._root}"
        error: MillpondError | None = None
        try:
            result: Any = self._cluster.run(task, job.group, description, executor, self._threads)
            error = self._error_of(place.container, Outcome(*result))
        except Exception as failure:  # noqa: BLE001 - Spark has many, and a cancelled job is one of them
            job.failure = f"its Spark task failed: {_reason(failure)}"
        with suppress(OSError):
            os.unlink(job.grant_path)
        with self._changed:
            job.ended, job.error = True, job.error or error
            self._changed.notify_all()

    def _error_of(self, container: int, outcome: Outcome) -> MillpondError | None:
        if outcome.kind == ROOT_UNSEEN:
            return RootUnseen(
                f"{outcome.host} does not see the pond's root {self._root} as this user's own: {outcome.why}",
                hint=f"all machines of the Spark application must see one file system at {self._root}, as one user",
                root=self._root,
                host=outcome.host,
            )
        if outcome.kind == NOT_AT_HOME:
            return cannot_start(
                container,
                f"its task on {outcome.host} does not reach the driver at {outcome.why}",
                "set spark.driver.host to an address of this machine that executors reach",
            )
        return None

    def _await(self, jobs: list[_Job], patience_s: float) -> None:
        """Returns when jobs whose tasks were told to leave have ended; one that does not is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: all(job.ended or not job.has_come for job in jobs), patience_s)
            left = [job for job in jobs if not job.ended]
        for job in left:
            self._cluster.cancel(job.group)
        with self._changed:
            self._changed.wait_for(lambda: all(job.ended for job in left), CANCEL_S)

    # Processes

    def _order(self, container: int, incarnation: int, term: Term, line: TaskLine) -> Start:
        is_here = line.arrived.machine == machine(self._sockets)
        limits = [str(self._code_seconds), str(self._memory or 0), self._trust]
        # Where the directory is not seen, the task makes one of its own.
        sockets = self._sockets if is_here else ""
        arguments = [self._root, sockets, str(container), str(self._threads), *limits]
        keys = self._keys(container, term, "" if is_here else line.arrived.host)
        settings = msgspec.json.encode(keys) + b"\n"
        return Start(incarnation, container, self._root, arguments, self._memory is not None, settings)

    def _end(self, place: _Place) -> None:
        """Returns when no process of the place runs any more."""
        with self._changed:
            if place.runs and place.line is not None:
                place.expected_end = True
                place.line.send(End(place.incarnation))
                if self._changed.wait_for(lambda: not place.runs, STOP_TIMEOUT_S + CANCEL_S):
                    return
                line = place.line
            else:
                # Of an attempt that fell silent, nobody knows whether it has ended: until its lease is over, it may not.
                while not self._stopping and (left := place.may_run_until - time.monotonic()) > 0:
                    self._changed.wait(left)
                return
        line.close()  # the task takes the end of the line for ours, and ends what it keeps
        with self._changed:
            self._changed.wait_for(lambda: not place.runs, CANCEL_S)

    def _check_open(self, container: int) -> None:
        if self._stopping:
            raise ContainerFailed("the pond is closing", container=container)

    def _check_session(self, container: int) -> None:
        if self._cluster.is_stopped:
            raise ContainerFailed(
                f"container {container} cannot be started: the Spark session has been stopped",
                hint="open the pond again, in a new session",
                container=container,
            )

    # Visits: in the thread of `Home`

    def arrived(self, line: TaskLine) -> bool:
        with self._changed:
            for place in self._places.values():
                job = place.job
                if job is not None and compare_digest(job.grant.word.encode(), line.arrived.grant.encode()):
                    job.has_come = True
                    if self._stopping:
                        line.send(Leave())
                    else:
                        place.lines.append(line)
                    self._changed.notify_all()
                    return True
        return False

    def said(self, line: TaskLine, message: Message) -> None:
        with self._changed:
            place = self._place_of(line)
            if place is None or line is not place.line:
                return
            match message:
                case Greeted(incarnation, pid, hello) if incarnation == place.incarnation:
                    place.pid = pid
                    place.hello = _hello(hello)
                case Busy(incarnation) if incarnation == place.incarnation:
                    place.busy_until = time.monotonic() + BUSY_S
                case Ended(incarnation, words) if incarnation == place.incarnation:
                    self._note_end(place, words)
            self._changed.notify_all()

    def lost(self, line: TaskLine) -> None:
        with self._changed:
            place = self._place_of(line)
            if place is None:
                return
            place.lines.remove(line)
            if line is place.line:
                if line.fell_silent:
                    place.may_run_until = time.monotonic() + LEASE_S
                if place.runs:
                    how = "was not heard of any more" if line.fell_silent else "ended with its Spark task"
                    self._note_end(place, f"{how}, on {line.arrived.host}")
            self._changed.notify_all()

    def _place_of(self, line: TaskLine) -> _Place | None:
        return next((place for place in self._places.values() if line in place.lines), None)

    def _note_end(self, place: _Place, words: str) -> None:
        if not place.runs:
            return
        served = place.hello is not None and not place.hello.error
        expected = place.expected_end or self._stopping
        place.ended(words)
        if served and not expected:
            threading.Thread(
                target=self._on_exit, args=(place.container,), name="millpond-exit", daemon=True
            ).start()

    # Executors that leave

    def _watch_executors(self) -> None:
        """A container leaves an executor that is being decommissioned: nobody knows for how long it lives."""
        leaves = self._cluster.setting("spark.decommission.enabled", "false") == "true"
        while not self._stopped.wait(WATCH_S):
            with self._changed:
                running = [(each, each.job, each.line) for each in self._places.values() if each.runs]
            for place, job, line in running:
                if job is None or line is None or self._cluster.is_stopped:
                    continue
                if place.located is not line:
                    executor = self._cluster.executor_of(job.group, line.arrived.attempt)
                    if executor:
                        place.executor, place.located = executor, line
                elif leaves and self._cluster.is_leaving(place.executor):
                    self._leave(place, job)

    def _leave(self, place: _Place, job: _Job) -> None:
        """Another attempt may not get a slot there: the next start finds no job, and begins one elsewhere."""
        with self._changed:
            if place.job is not job or not place.runs:
                return
            place.job = None
            place.dismiss()


class _Job:
    """A Spark job of one task. Its attempts show the grant, which they find in a file."""

    def __init__(self, container: int, grant_path: str, grant: Grant) -> None:
        self.group = f"millpond-container-{container}-{os.path.basename(grant_path)}"
        self.grant = grant
        self.grant_path = grant_path
        self.has_come = False
        self.ended = False
        self.error: MillpondError | None = None
        self.failure = ""

    @property
    def is_over(self) -> bool:
        """Whether no attempt of it will do."""
        return self.ended or self.error is not None


class _Place:
    """Where one container runs: its job, the lines to attempts of the task, and the process in one of them."""

    def __init__(self, container: int) -> None:
        self.container = container
        self.job: _Job | None = None
        self.executor = ""
        """The one that it is on, once `located` is its `line`; until then, the one that was wished for."""
        self.located: TaskLine | None = None
        self.lines: list[TaskLine] = []
        self.dismissed: list[TaskLine] = []
        self.line: TaskLine | None = None
        """The one to the attempt that has, or had, the newest process."""
        self.incarnation = 0
        self.runs = False
        self.pid = 0
        self.hello: Hello | None = None
        self.words = ""
        self.last_words = ""
        self.expected_end = False
        self.may_run_until = 0.0
        self.busy_until = 0.0

    @property
    def host(self) -> str:
        return "" if self.line is None else self.line.arrived.host

    @property
    def waiting(self) -> list[TaskLine]:
        """To attempts that would run what they are told."""
        return [line for line in self.lines if line not in self.dismissed]

    def dismiss(self) -> None:
        """Lets all attempts go, with what they keep."""
        for line in self.waiting:
            line.send(Leave())
        self.dismissed = list(self.lines)

    def run_on(self, line: TaskLine, incarnation: int) -> int:
        self.line, self.incarnation = line, incarnation
        self.runs, self.expected_end, self.busy_until = True, False, 0.0
        self.pid, self.hello, self.words = 0, None, ""
        return incarnation

    def ended(self, words: str) -> None:
        self.runs = False
        self.words = self.last_words = words


def _hello(said: bytes) -> Hello:
    try:
        return msgspec.json.decode(said, type=Hello)
    except msgspec.MsgspecError as error:
        return Hello(error=ContainerFailed.__name__, message=f"a container said no hello: {error}")


def _reason(failure: Exception) -> str:
    """What a job ended with, out of the pages that Spark makes of it."""
    text = str(failure)
    lines = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception): .*)", text, re.MULTILINE)
    told = [line for line in lines if not line.startswith(("Py4J", "SparkException", "PythonException"))]
    return str((told or lines or [text.partition("\n")[0]])[0]).strip()
