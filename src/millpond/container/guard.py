"""User code under guard: it has a time to end in, and memory that it can run out of, without taking the pond along."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from millpond.container.holdings.base import Watched
from millpond.errors import CodeTookTooLong, Interrupted, OutOfMemory, RuleFailed, Unavailable

# What a process that ended itself returns, and how its last line begins.
EXIT_DOOMED = 70
DOOMED = "millpond: "
# How long interrupted code may take to end, and what a doomed process is given to answer.
GRACE_S = 2.0
LINGER_S = 1.0
# How often work with limits of its own is looked at.
LOOK_S = 0.02
IDLE_THREADS_MAX = 8
# Of the machine's memory, for a container of a pond that sets no limit: with more, the machine would choose whom to kill.
MEMORY_SHARE = 0.75
_CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"
_T = TypeVar("_T")
_U = TypeVar("_U")
_here = threading.local()


def end_process(why: str) -> None:
    os.write(2, f"{DOOMED}{why}\n".encode(errors="backslashreplace"))
    os._exit(EXIT_DOOMED)


class Guard:
    """Runs work that contains user code, for at most `seconds`.

    What runs longer is interrupted. Code that cannot be, as compiled loops, dooms the process: `doomed` says why, and
    `end` is called with it soon after, when the error has been sent.
    """

    def __init__(
        self,
        seconds: float,
        end: Callable[[str], None] = end_process,
        grace_s: float = GRACE_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self.seconds = seconds
        self.doomed = ""
        self._end = end
        self._grace_s = grace_s
        self._linger_s = linger_s
        self._idle: list[SimpleQueue[_Task[Any]]] = []

    def run(self, what: str, work: Callable[[], _T], watched: Watched | None = None) -> _T:
        """What `work` gives or raises. `what` names it in errors, as in "transactions 'ledger'".

        Work that is `watched` may have less time, and a share of the memory; its errors say what it was at.

        After `CodeTookTooLong` and `OutOfMemory` the work has ended anywhere inside, or never will: the caller takes
        back what it may have changed. Work inside guarded work is part of it. Not for work that waits for other work.
        """
        if current() is not None:
            return work()
        if self.doomed:
            raise Unavailable(
                f"the container is ending: {self.doomed}", hint="try again in a moment", address=""
            )
        task = _Task(work)
        self._hand_over(task, what)
        over = self._await(task, what, watched)
        if over is not None:
            self._interrupt(task, over.message)
            raise over
        return task.outcome(what, watched)

    def _await(
        self, task: _Task[Any], what: str, watched: Watched | None
    ) -> CodeTookTooLong | OutOfMemory | None:
        """Returns when the task has ended; or what it has too much of."""
        # Of work that comes in pieces, what earlier ones took counts, too.
        deadline = time.monotonic() + self.seconds - (0.0 if watched is None else watched.before_s)
        is_limited = watched is not None and (
            watched.seconds_max is not None or watched.memory_max is not None
        )
        while True:
            left = deadline - time.monotonic()
            if is_limited:
                left = min(left, LOOK_S)
            if watched is not None and watched.seconds_max is not None:
                # A short piece of work whose time was over before it began is not waited for.
                left = min(left, watched.seconds_max - watched.spent_s)
            if task.ended.wait(max(0.0, min(left, threading.TIMEOUT_MAX))):
                return None
            if time.monotonic() >= deadline:
                return CodeTookTooLong(
                    f"{what} ran longer than {self.seconds:g} s{_at(watched)}",
                    hint="mend what never ends, send smaller batches, or open the pond with a larger code_seconds=",
                    what=what,
                    seconds=self.seconds,
                )
            if watched is None:
                continue
            if watched.seconds_max is not None and watched.spent_s > watched.seconds_max:
                return CodeTookTooLong(
                    f"{what} ran longer than its limit of {watched.seconds_max:g} s{_at(watched)}",
                    hint="mend what takes so long, send smaller batches, or give the operator a larger limit=",
                    what=what,
                    seconds=watched.seconds_max,
                )
            if watched.memory_max is not None and watched.grown_bytes > watched.memory_max:
                return OutOfMemory(
                    f"{what} took more than its {watched.memory_max:,} bytes of memory{_at(watched)}",
                    hint="let the code hold less at once, send smaller batches, or give the operator a larger memory=",
                    what=what,
                )

    def _hand_over(self, task: _Task[Any], what: str) -> None:
        """Gives the task to an idle thread, or to a new one."""
        with suppress(IndexError):
            self._idle.pop().put(task)
            return
        tasks: SimpleQueue[_Task[Any]] = SimpleQueue()
        try:
            threading.Thread(target=self._serve, args=(tasks,), name="millpond-code", daemon=True).start()
        except RuntimeError:  # there is no room for its stack
            raise _out_of_memory(what) from None
        tasks.put(task)

    def _serve(self, tasks: SimpleQueue[_Task[Any]]) -> None:
        while True:
            task = tasks.get()
            task.perform()
            is_needed = len(self._idle) < IDLE_THREADS_MAX
            if is_needed:
                self._idle.append(tasks)
            task.ended.set()
            if not is_needed:
                return
            del task

    def doom(self, why: str) -> None:
        """The process ends soon, when the error has been sent."""
        if self.doomed:
            return
        self.doomed = why
        ending = threading.Timer(self._linger_s, self._end, [why])
        ending.daemon = True
        try:
            ending.start()
        except RuntimeError:
            self._end(why)

    def _interrupt(self, task: _Task[Any], what: str) -> None:
        """Returns when the task has ended, or the process is doomed."""
        # Once: a second one might hit what takes back the work of the first.
        task.interrupt()
        if task.ended.wait(self._grace_s):
            return
        self.doom(f"{what}, and could not be interrupted")


class _Task(Generic[_T]):
    """A piece of guarded work, and the threads that are at it."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._value: _T
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._threads: set[int] = set()

    def perform(self) -> None:
        try:
            self._value = self.take_part(self._work)
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            self._error = error
        if isinstance(self._error, MemoryError | SystemError) and not isinstance(self._error, OutOfMemory):
            # Without its traceback, whose frames hold what filled the memory. A SystemError comes where Python had not
            # even enough to say so.
            self._error = MemoryError()

    def outcome(self, what: str, watched: Watched | None = None) -> _T:
        error, self._error = self._error, None
        if error is None:
            return self._value
        if isinstance(error, MemoryError) and not isinstance(error, OutOfMemory):
            raise _out_of_memory(what, _at(watched))
        if isinstance(error, RecursionError):
            raise RuleFailed(
                f"{what} called itself too deeply", hint="let the code use a loop, or less depth", rule=what
            )
        if not isinstance(error, Exception):
            raise RuleFailed(f"{what} raised {type(error).__name__}", rule=what)
        raise error

    def take_part(self, work: Callable[[], _U]) -> _U:
        """Runs `work` in this thread, which is interrupted with the task."""
        thread = threading.get_ident()
        try:
            with self._lock:
                self._threads.add(thread)
            _here.task = self
            return work()
        finally:
            _here.task = None
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        """From here on no interrupt comes, or is still to come."""
        while thread in self._threads:
            with suppress(Interrupted):
                with self._lock:
                    self._threads.discard(thread)
                _raise_in(thread, ctypes.py_object())

    def interrupt(self) -> None:
        with self._lock:
            for thread in self._threads:
                _raise_in(thread, ctypes.py_object(Interrupted))


def current() -> _Task[Any] | None:
    return getattr(_here, "task", None)


def shared(work: Callable[[], _T]) -> Callable[[], _T]:
    """`work` for another thread that helps this one: if this one's is guarded, it is part of it."""
    task = current()
    return work if task is None else lambda: task.take_part(work)


def _raise_in(thread: int, error: Any) -> None:
    """Python raises the error in the thread before its next step; null takes back what is not yet raised."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def _at(watched: Watched | None) -> str:
    """What it is at, to be said at the end of an error."""
    where = "" if watched is None else watched.where()
    return f", {where}" if where else ""


def _out_of_memory(what: str, where: str = "") -> OutOfMemory:
    return OutOfMemory(
        f"{what} ran out of memory{where}",
        hint="let the code hold less at once, send smaller batches, or open the pond with a larger memory=",
        what=what,
    )


def limit_memory(limit: int) -> int:
    """From here on this process gets a `MemoryError` where it asks for more than `limit` bytes. Returns the limit.

    It counts what the process may write to, whether or not it has. 0 is for most of what the machine has.
    """
    limit = limit or memory_share()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return limit


def memory_share() -> int:
    """What a container may take by default, and all on one machine together."""
    return int(machine_memory() * MEMORY_SHARE)


def machine_memory() -> int:
    """In bytes; where this runs in a control group with a limit, that."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError), open(_CGROUP_LIMIT) as file:
        return min(total, int(file.read()))
    return total
